"""The value head on the last pipeline stage, in the place of GPTModel's output layer."""

from __future__ import annotations

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor

from engines.value_head import ValueHead


class StageValueHead(ValueHead):
    """Hidden states of this rank's tokens -> values of all C tokens [C, 1, 1], the same on every tensor-parallel rank.

    Each rank holds a copy. Under sequence parallelism it sees its own tokens: its gradients are partial sums, which
    the mark `sequence_parallel` makes finalize_model_grads add up, as for norms. What follows is the same
    computation on every rank, so each keeps the gradient of its own tokens.
    """

    def __init__(self, hidden_size: int, sequence_parallel: bool, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(hidden_size, device, dtype)
        self.sequence_parallel = sequence_parallel
        for parameter in self.parameters():
            parameter.sequence_parallel = sequence_parallel

    def forward(
        self, hidden: Tensor, weight: None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, None]:
        values = super().forward(hidden)
        if self.sequence_parallel:
            values = gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False)
        return values, None


def replace_output_layer(chunk: GPTModel) -> None:
    """Put a value head where the vocabulary's was."""
    old = chunk.output_layer.weight
    config = chunk.config
    chunk.output_layer = StageValueHead(config.hidden_size, config.sequence_parallel, old.device, old.dtype)
