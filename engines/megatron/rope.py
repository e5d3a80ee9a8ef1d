"""Rotary base and frequencies as transformers computes them."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


def rope_parameters(hf: dict[str, Any]) -> dict[str, Any]:
    """Nested `rope_parameters` (transformers 5), else flat `rope_theta` and `rope_scaling`.

    Raises ValueError when both are present and disagree, or for a rope type other than default and llama3.
    """
    nested = hf.get("rope_parameters")
    if nested is None:
        nested = {"rope_theta": hf["rope_theta"], **(hf.get("rope_scaling") or {})}
    elif "rope_theta" in hf and hf["rope_theta"] != nested["rope_theta"]:
        raise ValueError(
            f"got rope_theta={hf['rope_theta']} beside rope_parameters.rope_theta={nested['rope_theta']}; "
            "expected one value; correct config.json"
        )
    kind = nested.get("rope_type", nested.get("type", "default"))
    if kind not in ("default", "llama3"):
        raise ValueError(f"got rope type {kind!r}; expected default or llama3; use model_engine=fsdp for this model")
    if nested.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(
            f"got partial_rotary_factor={nested['partial_rotary_factor']}; expected 1.0; "
            "use model_engine=fsdp for this model"
        )
    return {**nested, "rope_type": kind}


def rope_base(hf: dict[str, Any]) -> float:
    return rope_parameters(hf)["rope_theta"]


def inverse_frequencies(hf: dict[str, Any], head_size: int) -> Tensor:
    """[head_size / 2] float32: base^(-2i/head_size), for llama3 divided by `factor` at long wavelengths and
    blended in between (Llama 3.1; transformers' modeling_rope_utils)."""
    rope = rope_parameters(hf)
    inv_freq = 1.0 / rope["rope_theta"] ** (torch.arange(0, head_size, 2).float() / head_size)
    if rope["rope_type"] == "default":
        return inv_freq
    factor, original = rope["factor"], rope["original_max_position_embeddings"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    wavelength = 2 * math.pi / inv_freq
    # 0 at wavelength original/low and beyond (fully scaled), 1 at original/high and below (unscaled)
    keep = ((original / wavelength - low) / (high - low)).clamp(0, 1)
    return (1 - keep) * inv_freq / factor + keep * inv_freq
