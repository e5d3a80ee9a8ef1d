"""The KL coefficient over the run: fixed, steered towards a target, or following a schedule."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from engines.batch import TrainBatch
from trainer.by_sample import mean_by_sample, sample_of_token, sum_by_sample
from trainer.kl import kl_estimate

Interpolation = Literal["step", "linear", "cosine"]
ERROR_LIMIT = 0.2  # relative distance from the target beyond which the coefficient moves no faster


@dataclass(frozen=True)
class KlControl:
    """Names follow `algorithm.kl_ctrl.*`.

    kl_coef               the coefficient at the start (fixed, adaptive)
    target_kl, horizon    adaptive: the KL to hold, in nats per token, and the samples over which to approach it
    schedule, interp      schedule: (completed updates, coefficient) pairs and what lies between two of them
    """

    type: Literal["fixed", "adaptive", "schedule"] = "fixed"
    kl_coef: float = 0.001
    horizon: int = 10000
    target_kl: float = 0.1
    schedule: tuple[tuple[int, float], ...] = ()
    interp: Interpolation = "step"

    def __post_init__(self) -> None:
        if self.type == "adaptive" and not (self.horizon > 0 and self.target_kl > 0):
            raise ValueError(
                f"got kl_ctrl.type=adaptive with horizon={self.horizon}, target_kl={self.target_kl}; expected both "
                "above 0; correct algorithm.kl_ctrl"
            )
        if self.type == "schedule":
            check_schedule(self.schedule, "algorithm.kl_ctrl.schedule")


class KlController:
    """`coefficient(step)` before the updates of the step that follows `step` completed ones; `update` after them."""

    def __init__(self, control: KlControl) -> None:
        self.control = control
        self._current = control.kl_coef

    def coefficient(self, step: int) -> float:
        if self.control.type == "schedule":
            return scheduled(self.control.schedule, self.control.interp, step)
        return self._current

    def update(self, kl: float, samples: int) -> None:
        """Adaptive: beta <- beta (1 + clip(kl / target - 1, -0.2, 0.2) samples / horizon) (arXiv 1909.08593).

        kl       the step's mean divergence from the reference (`mean_kl`); one that is not finite changes nothing
        samples  of the step's batch
        """
        if self.control.type == "adaptive" and math.isfinite(kl):
            error = min(max(kl / self.control.target_kl - 1, -ERROR_LIMIT), ERROR_LIMIT)
            self._current *= 1 + error * samples / self.control.horizon

    def state_dict(self) -> dict[str, float]:
        """A schedule is a function of the step alone: it needs none."""
        return {"coefficient": self._current} if self.control.type == "adaptive" else {}

    def load_state_dict(self, state: dict[str, float]) -> None:
        if self.control.type == "adaptive" and state:
            self._current = state["coefficient"]


def mean_kl(batch: TrainBatch, name: str) -> float:
    """Mean over non-empty samples of the token mean of KL(old || reference); nan without any model token.

    Reads tokens old_log_probs, ref_log_probs and response_mask (or else loss_mask).
    """
    mask_T = batch.tokens["response_mask" if "response_mask" in batch.tokens else "loss_mask"].bool()
    row_T = sample_of_token(batch)
    old_T, ref_T = batch.tokens["old_log_probs"].double(), batch.tokens["ref_log_probs"].double()
    kl_B = mean_by_sample(kl_estimate(old_T, ref_T, name.removesuffix("+")), mask_T, row_T, len(batch))
    return float(kl_B[sum_by_sample(mask_T.double(), row_T, len(batch)) > 0].mean())


def check_schedule(schedule: Sequence[tuple[int, float]], key: str) -> None:
    """ValueError unless there is a pair and the steps rise."""
    steps = [step for step, _ in schedule]
    if not steps or steps != sorted(set(steps)) or steps[0] < 0:
        raise ValueError(
            f"got {key}={[list(pair) for pair in schedule]}; expected [[completed updates, value], ...] with rising "
            "updates from 0 on, for example [[0,0.05],[300,0.01]]; correct the list"
        )


def scheduled(schedule: Sequence[tuple[int, float]], interp: Interpolation, step: int) -> float:
    """Value after `step` completed updates; constant before the first pair and behind the last.

    Examples: [(0, .05), (300, .01)] by `step` is .05 up to update 299 and .01 from 300 on; [(100, .05), (300, .01)]
    is .03 at 200 by `linear` and by `cosine`.
    """
    if step <= schedule[0][0]:
        return schedule[0][1]
    place = max(i for i, (start, _) in enumerate(schedule) if start <= step)
    start, value = schedule[place]
    if interp == "step" or place == len(schedule) - 1:
        return value
    end, target = schedule[place + 1]
    progress = (step - start) / (end - start)
    if interp == "cosine":
        progress = (1 - math.cos(math.pi * progress)) / 2
    return value + (target - value) * progress
