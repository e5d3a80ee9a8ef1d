"""Norms that honour `config.normalization` and sequence parallelism.

Megatron-Core's torch fallback (transformer/torch_norm.py) refuses sequence_parallel. Under it each rank
normalises its own tokens, so the gradients of the gains are partial sums: the mark `sequence_parallel` on the
parameter makes finalize_model_grads add them over the tensor-parallel group.
"""

from __future__ import annotations

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn import functional


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight, statistics in float32 (arXiv 1910.07467)."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = _parameter(config, torch.ones(hidden_size))

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, self.weight.shape, self.weight, self.eps)


class LayerNorm(nn.Module):
    """(x - mean(x)) / sqrt(var(x) + eps) * weight + bias."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = _parameter(config, torch.ones(hidden_size))
        self.bias = _parameter(config, torch.zeros(hidden_size))

    def forward(self, x: Tensor) -> Tensor:
        return functional.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


_NORMS = {"RMSNorm": RMSNorm, "LayerNorm": LayerNorm}


class Norm:
    """What a layer spec names as its norm: the kind `config.normalization` asks for.

    A class and not a function, because Megatron's build_module takes a function for a finished module.
    """

    def __new__(cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> nn.Module:
        return _NORMS[config.normalization](config, hidden_size, eps)


def _parameter(config: TransformerConfig, value: Tensor) -> nn.Parameter:
    device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
    parameter = nn.Parameter(value.to(device=device, dtype=config.params_dtype))
    parameter.sequence_parallel = config.sequence_parallel
    return parameter
