"""A price for long answers, in the reward or in the advantage.

    ratio = clip((len - free_len) / (max_len - free_len), 0, 1)

    stage reward     reward -= coef * ratio
    stage advantage  A -= coef * (ratio - mean ratio of the group), once all normalisation is done

In the reward the price loses its size wherever advantages are divided by the group's deviation: three right answers
of ratio 0, 0.25 and 1 get the same advantages for coef 0.5 and for 0.01. In the advantage it keeps it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from engines.metric import Metric, Metrics
from trainer.credit.sample_masks import accuracy
from trainer.kl_control import Interpolation, check_schedule, scheduled
from trainer.rollout.scored import Scored

KEY = "reward.length_penalty"


@dataclass(frozen=True)
class LengthPenaltyOptions:
    """Lengths in tokens, `max_len` above `free_len`.

    coef               price of the longest answer, in units of the reward or of the advantage
    schedule, interp   (completed updates, coefficient) pairs that take the place of `coef`
    only_correct       only answers with at least `correct_threshold` accuracy pay and enter the mean of their group
    """

    coef: float
    max_len: int
    free_len: int = 0
    stage: Literal["reward", "advantage"] = "reward"
    only_correct: bool = False
    correct_threshold: float = 1.0
    schedule: tuple[tuple[int, float], ...] = ()
    interp: Interpolation = "step"

    def __post_init__(self) -> None:
        if not 0 <= self.free_len < self.max_len:
            raise ValueError(
                f"got {KEY}.free_len={self.free_len}, max_len={self.max_len}; expected 0 <= free_len < max_len; "
                f"lower {KEY}.free_len"
            )
        if self.schedule:
            check_schedule(self.schedule, f"{KEY}.schedule")

    def coefficient(self, step: int) -> float:
        """Used in the step that follows `step` completed ones."""
        return scheduled(self.schedule, self.interp, step) if self.schedule else self.coef

    def ratio(self, length: int) -> float:
        return min(1.0, max(0.0, (length - self.free_len) / (self.max_len - self.free_len)))


def penalise_scores(scored: Sequence[Scored], options: LengthPenaltyOptions | None, step: int) -> list[Scored]:
    """Stage `reward`: the samples with lower scores and the change in `extra["length_penalty"]`; acc stays.

    Any other stage, or None, changes nothing.
    """
    if options is None or options.stage != "reward":
        return list(scored)
    coefficient = options.coefficient(step)

    def pay(each: Scored) -> Scored:
        penalty = -coefficient * options.ratio(len(each.sample.response_ids)) if _pays(each, options) else 0.0
        extra = {**each.result.extra, "length_penalty": penalty}
        return replace(each, result=replace(each.result, score=each.result.score + penalty, extra=extra))

    return [pay(each) for each in scored]


def advantage_shift(
    scored: Sequence[Scored], baseline: Sequence[bool], options: LengthPenaltyOptions, step: int
) -> tuple[list[float], Metrics]:
    """Stage `advantage`: what to add to the advantage of each sample; groups are those of the baseline set."""
    coefficient, groups = options.coefficient(step), {}
    for row, each in enumerate(scored):
        if baseline[row] and _pays(each, options):
            groups.setdefault(each.item.uid, []).append(row)
    shift = [0.0] * len(scored)
    for rows in groups.values():
        ratios = [options.ratio(len(scored[row].sample.response_ids)) for row in rows]
        mean = math.fsum(ratios) / len(ratios)
        for row, ratio in zip(rows, ratios, strict=True):
            shift[row] = coefficient * (mean - ratio)
    used = [abs(shift[row]) for rows in groups.values() for row in rows]
    metrics = {"actor/length_shift_abs": Metric("mean", math.fsum(used), len(used))} if used else {}
    return shift, metrics


def _pays(each: Scored, options: LengthPenaltyOptions) -> bool:
    if not each.counts:
        return False
    return not options.only_correct or accuracy(each, f"{KEY}.only_correct") >= options.correct_threshold
