"""The last resort: math-verify and sympy, with a check of constants to 50 digits.

Only for the main thread of a process that may be killed: the library limits itself by SIGALRM, and
some inputs keep the interpreter busy where no signal gets through.
"""

from __future__ import annotations

import logging

import sympy
from math_verify import LatexExtractionConfig, parse, verify

LIBRARY_SECONDS = 3  # per parse and per comparison
DIGITS = 50
TOLERANCE = sympy.Float("1e-5")  # the library compares some constants by absolute difference only

_BOXED = [LatexExtractionConfig(boxed_match_priority=0)]

# A limit that strikes is part of normal scoring; the library would report each one as a warning.
logging.getLogger("math_verify").setLevel(logging.ERROR)


def symbolically_equal(gold: str, answer: str) -> bool:
    """True when the library finds both equal and, for constants, 50 digits agree to 1e-5."""
    gold_parsed, answer_parsed = _parse(gold), _parse(answer)
    if not gold_parsed or not answer_parsed:
        return False
    equal = verify(
        gold_parsed, answer_parsed, strict=True, allow_set_relation_comp=True, timeout_seconds=LIBRARY_SECONDS
    )
    return equal and not _constants_differ(gold_parsed[0], answer_parsed[0])


def _parse(text: str) -> list:
    return parse(
        f"\\boxed{{{text}}}",
        extraction_config=_BOXED,
        fallback_mode="no_fallback",
        parsing_timeout=LIBRARY_SECONDS,
    )


def _constants_differ(gold: object, answer: object) -> bool:
    if not all(isinstance(side, sympy.Expr) and side.is_number for side in (gold, answer)):
        return False
    left, right = sympy.N(gold, DIGITS), sympy.N(answer, DIGITS)
    size = max(abs(left), abs(right))
    return bool(size.is_finite and size > 0 and abs(left - right) > TOLERANCE * size)
