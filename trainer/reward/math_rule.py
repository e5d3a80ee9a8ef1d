"""Mathematical answers against a reference answer. Runs only in scoring processes (see reward/pool.py)."""

from __future__ import annotations

import re
from dataclasses import dataclass

from trainer.prompts.row import Row
from trainer.reward.math.candidate import by_rules, last_number
from trainer.reward.math.clean import clean
from trainer.reward.math.compare import equal
from trainer.reward.result import RewardResult
from trainer.reward.text import answer_part


@dataclass(frozen=True)
class MathRule:
    """Scores 1 or 0. Reasons: correct, wrong, no_answer, think_unclosed (and timeout, from the pool).

    answer       rules: a box, a marked line or a short whole answer; last_number: the last number anywhere
    require_box  with `rules`: only a box counts
    """

    answer: str = "rules"
    require_box: bool = False

    def __call__(self, text: str, row: Row, think_open: bool = False) -> RewardResult:
        judged = answer_part(text, think_open)
        if judged is None:
            return RewardResult(0.0, 0.0, None, "think_unclosed")
        candidate = last_number(judged) if self.answer == "last_number" else by_rules(judged, self.require_box)
        if candidate is None:
            return RewardResult(0.0, 0.0, None, "no_answer")
        right = equal(reference(row.ground_truth), candidate)
        return RewardResult(float(right), float(right), clean(candidate), "correct" if right else "wrong")


def reference(ground_truth: str) -> str:
    """The reference as stored, or what follows `####` where the file keeps the worked solution (GSM8K)."""
    return re.split(r"^####", ground_truth, flags=re.MULTILINE)[-1]
