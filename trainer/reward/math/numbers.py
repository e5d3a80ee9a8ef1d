"""Plain numbers as exact fractions, with the little leeway that long decimals and percent signs get."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

from trainer.reward.math.clean import THIN

ROUNDED_PLACES = 6  # a decimal with so many places also stands for what rounds to it
MAX_DIGITS = 1000  # longer numbers and exponents are left to the symbolic rules and their time limit

_INTEGER = rf"\d{{1,3}}(?:,\d{{3}})+|\d{{1,3}}(?:{THIN}\d{{3}})+|\d+"
_DECIMAL = rf"(?:{_INTEGER})?\.\d+|(?:{_INTEGER})\.?"
_SIGN = r"[+-]?"
_ARG = rf"(?:\{{\s*({_SIGN}(?:{_DECIMAL}))\s*\}}|(\d))"
_FRACTION = re.compile(rf"({_SIGN})\s*(?:({_INTEGER})\s*)?\\frac\s*{_ARG}\s*{_ARG}")
_SLASH = re.compile(rf"({_SIGN})(?:(\d+)\s+)?({_DECIMAL})\s*/\s*({_DECIMAL})")
_POWER = re.compile(rf"({_SIGN}(?:{_DECIMAL}))\s*(?:[eE]|(?:\\times|\\cdot|\*)\s*10\s*\^)\s*\{{?\s*({_SIGN}\d+)\s*\}}?")
_REPEATING = re.compile(rf"({_SIGN})(\d*)\.(\d*)\\overline\s*(?:\{{\s*(\d+)\s*\}}|(\d))")
_PLAIN = re.compile(rf"{_SIGN}(?:{_DECIMAL})")


@dataclass(frozen=True)
class Number:
    """An exact value; `places` counts decimals of a plain decimal (None for fractions and integers)."""

    value: Fraction
    places: int | None = None
    percent: bool = False


def parse_number(text: str) -> Number | None:
    r"""Integer, decimal, `a/b`, `\frac`, mixed number, `1e6`, `a\times10^b`, digit groups, `\overline`; else None."""
    text = text.strip()
    if text.startswith("{") and text.endswith("}"):
        text = text[1:-1].strip()
    percent = text.endswith(r"\%")
    body = text[:-2].strip(" " + THIN) if percent else text
    if len(body) > MAX_DIGITS:
        return None
    parsed = _plain(body) or _fraction(body) or _power(body) or _repeating(body)
    return None if parsed is None else Number(parsed.value, parsed.places, percent)


def _plain(text: str) -> Number | None:
    return _decimal(text) if _PLAIN.fullmatch(text) else None


def _decimal(text: str) -> Number:
    digits = text.replace(",", "").replace(THIN, "").rstrip(".")
    _, point, places = digits.partition(".")
    return Number(Fraction(digits), len(places) if point else None)


def _fraction(text: str) -> Number | None:
    match = _FRACTION.fullmatch(text)
    if match:
        sign, whole, *parts = match.groups()
        top, bottom = parts[0] or parts[1], parts[2] or parts[3]
    else:
        match = _SLASH.fullmatch(text)
        if not match:
            return None
        sign, whole, top, bottom = match.groups()
    divisor = _decimal(bottom).value
    if divisor == 0:
        return None
    value = _decimal(top).value / divisor + (_decimal(whole).value if whole else 0)
    return Number(-value if sign == "-" else value)


def _power(text: str) -> Number | None:
    match = _POWER.fullmatch(text)
    if not match or len(match.group(2)) > 4:
        return None
    return Number(_decimal(match.group(1)).value * Fraction(10) ** int(match.group(2)))


def _repeating(text: str) -> Number | None:
    match = _REPEATING.fullmatch(text)
    if not match:
        return None
    sign, whole, fixed, *cycles = match.groups()
    cycle = cycles[0] or cycles[1]
    value = Fraction(int((whole or "0") + fixed), 10 ** len(fixed))
    value += Fraction(int(cycle), (10 ** len(cycle) - 1) * 10 ** len(fixed))
    return Number(-value if sign == "-" else value)


def numbers_equal(gold: Number, answer: Number) -> bool:
    """Exact, except: a decimal of 6 or more places equals what rounds to it; one percent sign may mean
    value/100, or be left out when the number is at least 1 in size."""
    if gold.percent == answer.percent:
        return _same(gold, answer)
    with_sign, bare = (gold, answer) if gold.percent else (answer, gold)
    hundredth = Number(with_sign.value / 100, None if with_sign.places is None else with_sign.places + 2)
    return _same(hundredth, bare) or (abs(with_sign.value) >= 1 and _same(with_sign, bare))


def _same(a: Number, b: Number) -> bool:
    if a.value == b.value:
        return True
    return any(
        rounded.places is not None
        and rounded.places >= ROUNDED_PLACES
        and (other.places is None or other.places > rounded.places)
        and abs(rounded.value - other.value) * 2 * 10**rounded.places <= 1
        for rounded, other in ((a, b), (b, a))
    )
