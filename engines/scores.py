"""What a scoring pass collects: per-token results of micro-batches, back in the order of the whole batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engines.base import ForwardOptions
from engines.batch import PolicyOutput, TrainBatch


def empty_scores(batch: TrainBatch, options: ForwardOptions) -> PolicyOutput:
    """[T] zeros on CPU for everything that `options` ask for."""

    def zeros(wanted: bool) -> torch.Tensor | None:
        return torch.zeros(batch.num_tokens) if wanted else None

    return PolicyOutput(torch.zeros(batch.num_tokens), zeros(options.entropy), None, zeros(options.sum_pi_squared))


def put_back(
    scores: PolicyOutput, batch: TrainBatch, rows: Sequence[int], part: TrainBatch, output: PolicyOutput
) -> None:
    """Copy a micro-batch's results to the places of its sequences `rows`; a filler has none."""
    for target_T, values_T in (
        (scores.log_probs, output.log_probs),
        (scores.entropy, output.entropy),
        (scores.sum_pi_squared, output.sum_pi_squared),
    ):
        if target_T is not None:
            put_back_values(target_T, batch, rows, part, values_T)


def put_back_values(
    target_T: torch.Tensor, batch: TrainBatch, rows: Sequence[int], part: TrainBatch, values_T: torch.Tensor
) -> None:
    """The same for one tensor."""
    targets = batch.rows(target_T)
    for row, value in zip(rows, part.rows(values_T.cpu()), strict=False):
        targets[row].copy_(value)
