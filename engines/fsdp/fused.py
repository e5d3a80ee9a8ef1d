"""Fused operators of an accelerator's own package (torch_npu) in a transformers model. Untested on NPU.

RMSNorm, SwiGLU and rotary embeddings are small operations between matrix products; one kernel each saves launches
and memory traffic. Every operator is optional: where the package lacks it, torch's path stays.
"""

from __future__ import annotations

import logging
import sys
from types import MethodType, ModuleType

import torch
from torch import Tensor, nn

log = logging.getLogger(__name__)
# Whole heads turn, dimension k with k + d/2. Other families turn neighbours, or a part of each head.
ROTATES_HALVES = ("llama", "qwen2", "qwen3", "qwen3_moe")


def use_fused_operators(model: nn.Module, package: ModuleType) -> set[str]:
    """Replace the forward of norms and MLPs, and the rotary function of the model's file, in place.

    package  has npu_rms_norm, npu_swiglu, npu_rotary_mul, or some of them
    Returns the names of those in use. The rotary function is shared by all models of that file in the process.
    """
    used = set()
    for module in model.modules():
        if hasattr(package, "npu_rms_norm") and _is_rms_norm(module):
            module.forward = MethodType(_rms_norm(package), module)
            used.add("npu_rms_norm")
        elif hasattr(package, "npu_swiglu") and model.config.hidden_act == "silu" and _is_swiglu(module):
            module.forward = MethodType(_swiglu(package), module)
            used.add("npu_swiglu")
    file = sys.modules[type(model).__module__]
    if hasattr(package, "npu_rotary_mul") and model.config.model_type in ROTATES_HALVES:
        file.apply_rotary_pos_emb = _rotary(package)
        used.add("npu_rotary_mul")
    log.info("fused operators in use: %s", ", ".join(sorted(used)) or "none")
    return used


def _is_rms_norm(module: nn.Module) -> bool:
    return type(module).__name__.endswith("RMSNorm") and hasattr(module, "variance_epsilon")


def _is_swiglu(module: nn.Module) -> bool:
    """Gate, up and down by name, as every SwiGLU of transformers has them; fused experts do not."""
    parts = (vars(module)["_modules"].get(name) for name in ("gate_proj", "up_proj", "down_proj"))
    return all(isinstance(part, nn.Linear) for part in parts)


def _rms_norm(package: ModuleType):
    def forward(self: nn.Module, hidden_states: Tensor) -> Tensor:
        return package.npu_rms_norm(hidden_states, self.weight, epsilon=self.variance_epsilon)[0]

    return forward


def _swiglu(package: ModuleType):
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        return self.down_proj(package.npu_swiglu(torch.cat([self.gate_proj(x), self.up_proj(x)], dim=-1), dim=-1))

    return forward


def _rotary(package: ModuleType):
    def apply(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
        cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
        return package.npu_rotary_mul(q, cos, sin), package.npu_rotary_mul(k, cos, sin)

    return apply
