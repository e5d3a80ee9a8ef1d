"""Norms of vLLM's CPU build as one kernel each: outside torch.compile vLLM takes a dozen PyTorch operations for one.

Registered the way vLLM lets other packages bring kernels.
"""

from __future__ import annotations

import torch
from torch import Tensor
from vllm import ir
from vllm.platforms import current_platform

current_platform.import_kernels()
_NAME = "fused_cpu"


def use_fused_norms() -> None:
    """In this process, wherever they fit."""
    for operation in (ir.ops.rms_norm, ir.ops.fused_add_rms_norm):
        operation.set_default([_NAME, "native"])


def _norm_fits(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> bool:
    """The kernels read whole rows of memory, 16 numbers at a time."""
    return (
        variance_size is None
        and weight is not None
        and weight.dtype == x.dtype
        and x.shape[-1] % 16 == 0
        and x.is_contiguous()
    )


def _add_norm_fits(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> bool:
    same = x_residual.dtype == x.dtype and x_residual.is_contiguous()
    return same and _norm_fits(x, weight, epsilon, variance_size)


@ir.ops.rms_norm.register_impl(_NAME, supports_args=_norm_fits)
def rms_norm(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> Tensor:
    output = torch.empty_like(x)
    torch.ops._C.rms_norm(output, x, weight, epsilon)
    return output


@ir.ops.fused_add_rms_norm.register_impl(_NAME, supports_args=_add_norm_fits, inplace=True)
def fused_add_rms_norm(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> tuple[Tensor, Tensor]:
    """The results are written over both inputs."""
    torch.ops._C.fused_add_rms_norm(x, x_residual, weight, epsilon)
    return x, x_residual
