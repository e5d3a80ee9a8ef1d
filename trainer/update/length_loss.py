"""Shorter answers by gradient: the score-function estimator of expected length, against the group's mean.

    L = coef agg(sg(ratio_i - mean of ratio over the group) log_probs_t)
    ratio = clip((length - free_len) / (max_len - free_len), 0, 1)

Descent lowers the probability of long samples and raises that of short ones. A detached penalty added to the loss would
be a constant and teach nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engines.batch import TrainBatch
from trainer.by_sample import sample_of_token, sum_by_sample


def length_weights(batch: TrainBatch, uids: Sequence[str], free_len: int, max_len: int) -> Tensor:
    """[B] float32: each sample's ratio minus the mean of its group, for `batch.samples["length_weights"]`.

    Lengths count model tokens (tokens response_mask, or else loss_mask); samples without any are left out of the
    mean and get 0. Call it on the whole batch, before any split.
    """
    mask_T = batch.tokens["response_mask" if "response_mask" in batch.tokens else "loss_mask"]
    lengths_B = sum_by_sample(mask_T.double(), sample_of_token(batch), len(batch))
    ratio_B = ((lengths_B - free_len) / (max_len - free_len)).clamp(0, 1)
    weights_B = torch.zeros(len(batch), dtype=torch.float64)
    groups: dict[str, list[int]] = {}
    for row, uid in enumerate(uids):
        if lengths_B[row] > 0:
            groups.setdefault(uid, []).append(row)
    for rows in groups.values():
        weights_B[rows] = ratio_B[rows] - ratio_B[rows].mean()
    return weights_B.float()
