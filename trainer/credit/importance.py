"""Importance weights of tokens that another policy sampled: pure functions of log-ratios.

Shape legend: T packed tokens, B samples. Notation: rho = pi(token) / mu(token), pi the policy that learns, mu the one
that sampled.

    token      min(rho_t, high): truncated importance sampling per token
    sequence   min(prod_t rho_t, high): the whole sample, unbiased and of high variance
    geometric  min(geometric mean of rho_t over the sample, high)
    segment    as geometric, over each run of consecutive model tokens (a turn)

With a lower bound the weights are not truncated but dropped: rho where low <= rho <= high, else 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from trainer.by_sample import mean_by_sample, sum_by_sample

WeightKind = Literal["token", "sequence", "geometric", "segment"]
LOG_LIMIT = 20.0  # exp(20) = 4.9e8 is still far from float32 overflow


@dataclass(frozen=True)
class WeightRule:
    """`high` truncates; with `low` weights outside [low, high] become 0 instead."""

    kind: WeightKind
    high: float
    low: float | None = None

    def apply(self, raw_T: Tensor) -> Tensor:
        if self.low is None:
            return raw_T.clamp_max(self.high)
        return torch.where((raw_T >= self.low) & (raw_T <= self.high), raw_T, 0.0)


def raw_weights(log_ratio_T: Tensor, mask_T: Tensor, row_T: Tensor, num_samples: int, kind: WeightKind) -> Tensor:
    """[T] weights before their bounds; 1 at masked positions.

    log_ratio_T [T] is log pi - log mu, not clipped, and may hold anything where mask_T [T] bool is False.
    """
    log_T = torch.where(mask_T, log_ratio_T, 0.0)
    bounded_T = log_T.clamp(-LOG_LIMIT, LOG_LIMIT)
    if kind == "token":
        return bounded_T.exp()
    if kind == "sequence":
        log_B = sum_by_sample(log_T, row_T, num_samples).clamp(-LOG_LIMIT, LOG_LIMIT)
        return torch.where(mask_T, log_B[row_T].exp(), 1.0)
    if kind == "geometric":
        group_T, groups = row_T, num_samples
    else:
        group_T, groups = segments(mask_T, row_T)
    return torch.where(mask_T, mean_by_sample(bounded_T, mask_T, group_T, groups)[group_T].exp(), 1.0)


def segments(mask_T: Tensor, row_T: Tensor) -> tuple[Tensor, int]:
    """[T] number of the run of masked tokens that each token is in or behind, and how many runs there are (at
    least 1). A run never leaves its sample.

    Example, one sample with mask 0 1 1 0 1: runs 0 0 0 0 1.
    """
    before_T = torch.nn.functional.pad(mask_T[:-1] & (row_T[1:] == row_T[:-1]), (1, 0))
    segment_T = ((mask_T & ~before_T).cumsum(0) - 1).clamp_min(0)
    return segment_T, int(segment_T.max()) + 1 if len(segment_T) else 1
