"""Latent attention runs on two tensors that vLLM derives from kv_b_proj: did an update reach them?

Shape legend: N heads of this rank, P their key width, V their value width, L latent width.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor, nn

DERIVED = ("W_UV", "W_UK_T")  # computed from kv_b_proj, never sent


def check_derived(model: nn.Module, sent: Mapping[str, Tensor]) -> None:
    """Compare W_UK_T [N, P, L] and W_UV [N, L, V] of the layers whose kv_b_proj [heads (P + V), L] is in `sent`.

    ValueError when they are not made of it. Layers that hold other forms (fp8, packed for AMX) are not looked at."""
    for name, tensor in sent.items():
        match = re.fullmatch(r"(.*\.layers\.\d+\.self_attn)\.kv_b_proj\.weight", name)
        if match is None:
            continue
        for own, module in model.named_modules():
            if own.startswith(f"{match[1]}.") and all(hasattr(module, derived) for derived in DERIVED):
                _check_layer(module, name, tensor)


def _check_layer(module: nn.Module, name: str, tensor: Tensor) -> None:
    heads, width, latent = module.W_UK_T.shape
    both = width + module.W_UV.shape[-1]
    first = module.kv_b_proj.tp_rank * heads
    own_NBL = tensor.view(-1, both, latent)[first : first + heads]
    expected = {"W_UK_T": own_NBL[:, :width], "W_UV": own_NBL[:, width:].transpose(1, 2)}
    for derived, wanted in expected.items():
        held = getattr(module, derived)
        if not torch.equal(held, wanted.to(held)):
            gap = (held.float() - wanted.to(held).float()).abs().max().item()
            raise ValueError(
                f"got {derived} that differs from the {name} just sent by up to {gap:.3g}; expected it to be derived "
                "anew by every update: attention would run on old weights; use the vLLM versions named in setup.py"
            )
