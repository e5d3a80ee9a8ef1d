"""Which tokens drive entropy down? Selection by the covariance of advantage and log-prob (arXiv 2505.22617).

    cov_t = (A_t - mean A) (lp_t - mean lp)

Shape legend: T packed tokens, B samples. Means, counts and the choice are those of a whole mini-batch, before it is cut
over ranks and micro-batches, so that no cut changes them. Ties and random choices are settled by draws that depend on
the sample and the seeds alone, not on its place in the batch.
"""

from __future__ import annotations

import math
from hashlib import blake2b

import torch
from torch import Tensor

from engines.batch import TrainBatch
from trainer.update.loss_options import LossOptions


def select_cov(mini: TrainBatch, options: LossOptions, seeds: tuple[int, ...]) -> Tensor:
    """[T] float32, 1 on the chosen tokens of a mini-batch.

    clip_cov  max(1, int(clip_cov_ratio N)) random ones of those with lb < cov < ub
    kl_cov    the max(1, int(kl_cov_ratio N)) of largest cov

    Reads tokens loss_mask, advantages, old_log_probs and samples key. `seeds` identify the mini-batch: run seed, step
    and its number within the step.
    """
    mask_T = mini.tokens["loss_mask"].bool()
    cov_T, draws_T = covariance(mini), _draws(mini, seeds)
    if options.loss_mode == "kl_cov":
        ratio, eligible_T, rank_T = options.kl_cov_ratio, mask_T, -cov_T
    else:
        eligible_T = mask_T & (cov_T > options.clip_cov_lb) & (cov_T < options.clip_cov_ub)
        ratio, rank_T = options.clip_cov_ratio, torch.zeros_like(cov_T)
    count = max(1, int(ratio * int(mask_T.sum())))
    places = eligible_T.nonzero().flatten()
    places = places[draws_T[places].argsort()]
    places = places[rank_T[places].argsort(stable=True)]
    selected_T = torch.zeros(mini.num_tokens)
    selected_T[places[:count]] = 1.0
    return selected_T


def covariance(mini: TrainBatch) -> Tensor:
    """[T] float64; 0 where the loss mask is."""
    mask_T = mini.tokens["loss_mask"].bool()
    product_T = torch.ones(mini.num_tokens, dtype=torch.float64)
    for name in ("advantages", "old_log_probs"):
        values_T = torch.where(mask_T, mini.tokens[name].double(), 0.0)
        mean = math.fsum(values_T.tolist()) / max(int(mask_T.sum()), 1)  # exact: no order of samples shifts it
        product_T *= values_T - mean
    return torch.where(mask_T, product_T, 0.0)


def _draws(mini: TrainBatch, seeds: tuple[int, ...]) -> Tensor:
    """[T] float64 uniform numbers, the same for a sample wherever it stands."""
    rows = []
    for key, length in zip(mini.samples["key"].tolist(), mini.lengths, strict=True):
        digest = blake2b(repr((*seeds, key)).encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "big"))
        rows.append(torch.rand(length, generator=generator, dtype=torch.float64))
    return torch.cat(rows)
