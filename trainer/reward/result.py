"""What a scorer says about one answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class RewardResult:
    """The verdict on one answer.

    score    what training uses: mapped by `score_map` and shaped by answer length
    acc      correctness in [0, 1], never mapped or shaped; None when it has no meaning
    pred     the extracted answer, for majority votes; None when there is none
    reason   one word from the scorer's closed list
    extra    further numbers or texts of the scorer
    failed   the answer could not be scored: leave it out, do not count it as wrong
    seconds  wall time of scoring
    """

    score: float
    acc: float | None = None
    pred: str | None = None
    reason: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict)
    failed: bool = False
    seconds: float = 0.0
