"""A fixed share of every batch for each domain.

A mix is a pattern of domain names that repeats every `block` prompts. Within it each domain has its share by
largest remainder, spread evenly, so a part of a batch is mixed like the whole. The pattern depends on shares and
block alone: prompts come in the same order whether they are drawn by the batch or one by one.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from fractions import Fraction
from typing import Any

from trainer.prompts.errors import FieldProblem

TOLERANCE = 1e-6  # of the sum of the shares


def largest_remainder(shares: Mapping[str, float], size: int) -> dict[str, int]:
    """Whole numbers that sum to `size`: every share rounded down, the rest to the largest remainders.

    Shares 0.5, 0.3, 0.2 of 32 are 16, 9.6 and 6.4, so 16, 10 and 6. Equal remainders: first name first.
    """
    exact = {name: Fraction(str(share)) for name, share in shares.items()}  # 0.29 * 100 is 29, not 28.999…
    total = sum(exact.values())
    wanted = {name: share * size / total for name, share in exact.items()}
    counts = {name: math.floor(amount) for name, amount in wanted.items()}
    spare = size - sum(counts.values())
    for name in sorted(wanted, key=lambda name: (counts[name] - wanted[name], name))[:spare]:
        counts[name] += 1
    return counts


def block_pattern(shares: Mapping[str, float], size: int) -> list[str]:
    """The domain of each of `size` prompts in a row: counts 2 and 1 give a, b, a."""
    counts = largest_remainder(shares, size)
    places = [((k + 0.5) / count, name) for name, count in counts.items() for k in range(count)]
    return [name for _, name in sorted(places)]


def share_problems(shares: Mapping[str, Any], present: Collection[str]) -> Iterator[FieldProblem]:
    """D28: what is wrong with `data.domain_interleave_probs` for rows of the domains `present`."""
    numbers = [share for share in shares.values() if _is_share(share)]
    got = [f"{share!r} for '{name}'" for name, share in shares.items() if not _is_share(share)]
    got += [f"domain '{name}' has no rows" for name in shares if name not in present]
    got += [f"rows of '{name}' without a probability" for name in sorted(present) if name not in shares]
    if len(numbers) == len(shares) and abs(sum(numbers) - 1) > TOLERANCE:
        got.append(f"sum {sum(numbers):.6g}")
    for text in got:
        expected = "sum 1 within 1e-6 over exactly the domains present"
        yield FieldProblem("D28", None, text, expected, "Fix data.domain_interleave_probs")


def _is_share(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf
