"""One error that lists everything wrong, with the nearest known names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

SHOWN = 40  # offenders printed in one error


def raise_all(problems: list[str], what: str, expected: str, remedy: str) -> None:
    """ValueError with all `problems`, if there are any."""
    if not problems:
        return
    more = [f"... and {len(problems) - SHOWN} more"] if len(problems) > SHOWN else []
    listing = "\n  ".join(problems[:SHOWN] + more)
    raise ValueError(f"{what}, got {len(problems)} problem(s):\n  {listing}\nexpected {expected}; {remedy}")


def nearest(name: str, known: Iterable[str]) -> str:
    """ " (nearest: a, b)", or nothing."""
    pool = list(known)[:SHOWN]  # the search is quadratic
    close = difflib.get_close_matches(name, pool, n=2, cutoff=0.8)
    return f" (nearest: {', '.join(close)})" if close else ""
