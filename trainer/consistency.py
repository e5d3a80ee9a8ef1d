"""Do trainer and rollout agree? Differences of token probabilities, and what to say when they grow.

Both sides score the same tokens with the same weights at the same temperature; what remains is the numerics
of two implementations, or a fault.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field

import torch
from torch import Tensor

from engines.metric import Metric, Metrics

DIFF = "training/rollout_probs_diff"
LOG_DIFF = "training/rollout_logprobs_abs_diff"
PEARSON = "training/rollout_actor_probs_pearson_corr"

HISTORY = 50  # steps that the running median looks back
MIN_HISTORY = 3  # a median of fewer steps says nothing
NOISE_FLOOR = 1e-4  # a jump between two tiny numbers is rounding, not a fault

CAUSES = (
    "the usual causes: implementation (different operators or attention), precision (dtype of weights, logits or "
    "cache), hyper-parameters (a norm's eps, rope, temperature), parallel split (TP, EP, PP) and randomness "
    "(dropout, routing, non-deterministic kernels)"
)


def probability_difference(old_log_probs_T: Tensor, rollout_log_probs_T: Tensor, mask_T: Tensor) -> Metrics:
    """Metrics of d = |exp(old) - exp(rollout)| over all valid response tokens of a step, in float64.

    A token whose rollout log-prob is nan was never scored and is left out. Without any token only
    `training/rollout_probs_diff_valid` = 0 is reported. The correlation is left out where it is undefined:
    fewer than two tokens, or one side constant. Give all tokens of all ranks: deviations do not merge.
    """
    valid_T = mask_T.bool() & ~rollout_log_probs_T.isnan()
    old, rollout = old_log_probs_T[valid_T].double(), rollout_log_probs_T[valid_T].double()
    count = old.numel()
    if count == 0:
        return {f"{DIFF}_valid": Metric("last", 0.0)}
    difference, log_difference = (old.exp() - rollout.exp()).abs(), (old - rollout).abs()
    metrics = {
        f"{DIFF}_valid": Metric("last", 1.0),
        f"{DIFF}_mean": Metric("mean", float(difference.sum()), count),
        f"{DIFF}_max": Metric("max", float(difference.max())),
        f"{DIFF}_std": Metric("last", float(difference.std()) if count > 1 else 0.0),
        f"{LOG_DIFF}_mean": Metric("mean", float(log_difference.sum()), count),
        f"{LOG_DIFF}_max": Metric("max", float(log_difference.max())),
    }
    if count > 1 and _varies(old) and _varies(rollout):
        metrics[PEARSON] = Metric("last", float(torch.corrcoef(torch.stack([old.exp(), rollout.exp()]))[0, 1]))
    return metrics


def _varies(log_probs: Tensor) -> bool:
    return bool(log_probs.exp().max() > log_probs.exp().min())


class ConsistencyError(RuntimeError):
    """Trainer and rollout differ more than the run allows."""


@dataclass(frozen=True)
class ConsistencyLimits:
    """healthy_mean  mean probability difference of a healthy run; a low-precision rollout needs its own
    patience      consecutive steps above it before a warning
    fail_mean     mean difference that stops the run; None never stops
    log_mean      mean log-prob difference that points at wrong weights
    jump          the same, as a multiple of the running median of the mean probability difference
    """

    healthy_mean: float = 0.01
    patience: int = 3
    fail_mean: float | None = None
    log_mean: float = 0.1
    jump: float = 5.0


@dataclass
class ConsistencyMonitor:
    """Turns the metrics of each step into warnings, or into the end of the run."""

    limits: ConsistencyLimits = field(default_factory=ConsistencyLimits)
    steps_above: int = 0
    recent_means: list[float] = field(default_factory=list)

    def check(self, step: int, metrics: Metrics) -> list[str]:
        """Warnings for this step. Raises ConsistencyError above `fail_mean`. A step without tokens says nothing."""
        if f"{DIFF}_mean" not in metrics:
            return []
        mean, log_mean = metrics[f"{DIFF}_mean"].value, metrics[f"{LOG_DIFF}_mean"].value
        limits = self.limits
        warnings = self._stale_weights(step, mean, log_mean)
        self.steps_above = 0 if mean <= limits.healthy_mean else self.steps_above + 1  # nan counts as above
        if self.steps_above and self.steps_above % limits.patience == 0:
            warnings.append(
                f"step {step}: mean probability difference between trainer and rollout {mean:.4g}, for "
                f"{self.steps_above} steps above the healthy {limits.healthy_mean:g}; {CAUSES}; "
                "watch actor/grad_norm along with it: a falling or flat trend is expected"
            )
        if math.isfinite(mean):
            self.recent_means = [*self.recent_means, mean][-HISTORY:]
        if limits.fail_mean is not None and not mean <= limits.fail_mean:
            raise ConsistencyError(
                f"step {step}: got a mean probability difference between trainer and rollout of {mean:.4g}; expected "
                f"at most trainer.consistency.fail_mean={limits.fail_mean:g}; look for {CAUSES}, or raise the limit"
            )
        return warnings

    def _stale_weights(self, step: int, mean: float, log_mean: float) -> list[str]:
        reasons = []
        if len(self.recent_means) >= MIN_HISTORY:
            median = statistics.median(self.recent_means)
            if mean > max(self.limits.jump * median, NOISE_FLOOR):
                multiple = f"{self.limits.jump:g}x its running median {median:.4g}"
                reasons.append(f"the mean probability difference {mean:.4g} is above {multiple}")
        if log_mean > self.limits.log_mean:
            reasons.append(f"the mean log-prob difference {log_mean:.4g} is above {self.limits.log_mean:g}")
        return [f"step {step}: stale or wrong rollout weights? " + " and ".join(reasons)] if reasons else []

    def state_dict(self) -> dict:
        return {"steps_above": self.steps_above, "recent_means": list(self.recent_means)}

    def load_state_dict(self, state: dict) -> None:
        self.steps_above, self.recent_means = state["steps_above"], list(state["recent_means"])
