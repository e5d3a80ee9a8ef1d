"""Packed tokens and the samples they belong to.

Shape legend: T packed tokens, B samples.
"""

from __future__ import annotations

from torch import Tensor, arange, repeat_interleave, where

from engines.batch import TrainBatch


def sample_of_token(batch: TrainBatch) -> Tensor:
    """[T] int64: which of the B samples each packed token belongs to."""
    lengths_B = batch.cu_seqlens[1:] - batch.cu_seqlens[:-1]
    return repeat_interleave(arange(len(batch), device=lengths_B.device), lengths_B)


def sum_by_sample(values_T: Tensor, row_T: Tensor, num_samples: int) -> Tensor:
    """[B] differentiable sums over the tokens of each sample."""
    return values_T.new_zeros(num_samples).index_add(0, row_T, values_T)


def mean_by_sample(values_T: Tensor, mask_T: Tensor, row_T: Tensor, num_samples: int) -> Tensor:
    """[B] means over the masked tokens of each sample, 0 where there are none; other positions may hold nan."""
    total_B = sum_by_sample(where(mask_T, values_T, 0.0), row_T, num_samples)
    return total_B / sum_by_sample(mask_T.to(values_T.dtype), row_T, num_samples).clamp_min(1.0)
