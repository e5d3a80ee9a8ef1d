"""Rewards against their own distribution: (s - m) / (k + eps), then a clip.

m and k are chosen apart, each from one of four sets of samples:

    none     m = 0; k is left out
    group    the samples of the same prompt
    batch    the samples of the same domain in this step
    running  all samples of the same domain so far, this step included

Deviations are unbiased. A set whose values are all equal has no scale of its own: k = 1 is used as it stands.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from engines.metric import Metric, Metrics

EPS = 1e-6  # added to a standard deviation before dividing
NormType = Literal["none", "batch", "group", "running"]


@dataclass(frozen=True)
class RewardNormOptions:
    """mean, std     which samples give m and k
    clip          bound of the normalised reward and of every token reward, None is off
    singleton     what a sample alone in its group gets from group statistics: m = 0 and k = 1 (`reward`, for one
                  sample per prompt, where no baseline exists), or m = its own reward (`zero`)
    """

    mean: NormType = "none"
    std: NormType = "none"
    clip: float | None = None
    singleton: Literal["reward", "zero"] = "zero"


@dataclass(frozen=True)
class Moments:
    """Count, mean and sum of squared deviations of some numbers, with their extremes."""

    count: int
    mean: float
    squares: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Moments:
        """Exact sums, so that the order of the values cannot matter; at least one value."""
        low, high = min(values), max(values)
        mean = low if low == high else math.fsum(values) / len(values)
        return cls(len(values), mean, math.fsum((value - mean) ** 2 for value in values), low, high)

    def merge(self, other: Moments) -> Moments:
        """Moments of both sets together (Chan, Golub, LeVeque 1983, "Algorithms for computing the sample variance")."""
        low, high, count = min(self.low, other.low), max(self.high, other.high), self.count + other.count
        step = other.mean - self.mean
        mean = low if low == high else self.mean + step * other.count / count
        squares = self.squares + other.squares + step**2 * self.count * other.count / count
        return Moments(count, mean, squares, low, high)

    @property
    def scale(self) -> float | None:
        """Unbiased standard deviation; None for equal values."""
        return None if self.low == self.high else math.sqrt(self.squares / (self.count - 1))

    def state_dict(self) -> dict[str, float]:
        return asdict(self)


def normalise(
    rewards: Sequence[float],
    uids: Sequence[str],
    domains: Sequence[str],
    baseline: Sequence[bool],
    options: RewardNormOptions,
    running: dict[str, Moments],
) -> tuple[list[float], Metrics]:
    """Normalised and clipped rewards. Samples outside the baseline set enter no statistic and get 0.

    `running` (domain -> moments so far) is brought up to date first, in place, if an option reads it.
    """
    rows = [row for row, flag in enumerate(baseline) if flag]
    groups = _by(uids, rewards, rows)
    batch = _by(domains, rewards, rows)
    if "running" in (options.mean, options.std):
        for domain, moments in batch.items():
            running[domain] = running[domain].merge(moments) if domain in running else moments
    result, clipped = [0.0] * len(rewards), 0
    for row in rows:
        sets = {"group": groups[uids[row]], "batch": batch[domains[row]], "running": running.get(domains[row])}
        if options.singleton == "reward" and sets["group"].count == 1:
            sets["group"] = None
        value = rewards[row]
        if (centre := sets.get(options.mean)) is not None:
            value -= centre.mean
        if (spread := sets.get(options.std)) is not None and spread.scale is not None:
            value /= spread.scale + EPS
        result[row] = clip(value, options.clip)
        clipped += result[row] != value
    metrics = {"critic/reward_clip_frac": Metric("mean", clipped, len(rows))} if options.clip else {}
    return result, metrics


def clip(value: float, bound: float | None) -> float:
    """The value in [-bound, bound]; None and 0 are off."""
    return max(-bound, min(bound, value)) if bound else value


def _by(names: Sequence[str], rewards: Sequence[float], rows: Sequence[int]) -> dict[str, Moments]:
    members: dict[str, list[float]] = {}
    for row in rows:
        members.setdefault(names[row], []).append(rewards[row])
    return {name: Moments.of(values) for name, values in members.items()}
