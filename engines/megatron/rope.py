"""Rotary base and frequencies as transformers computes them."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

GROUPED_KINDS = ("default", "llama3")
LATENT_KINDS = ("default", "yarn")


def rope_parameters(hf: dict[str, Any], kinds: tuple[str, ...] = GROUPED_KINDS, share: float = 1.0) -> dict[str, Any]:
    """Nested `rope_parameters` (transformers 5) over flat `rope_theta`, `partial_rotary_factor`, `rope_scaling`.

    `share` is the rotated part of a head if the file does not say; 1 for families that always rotate all of it.
    Raises ValueError when nested and flat values disagree, when there is no base, or for a rope type not among `kinds`.
    """
    flat = dict(hf.get("rope_scaling") or {})
    flat |= {key: hf[key] for key in ("rope_theta", "partial_rotary_factor") if hf.get(key) is not None}
    nested = hf.get("rope_parameters") or {}
    for key in flat.keys() & nested.keys():
        if flat[key] != nested[key]:
            raise ValueError(
                f"got {key}={flat[key]} beside rope_parameters.{key}={nested[key]}; "
                "expected one value; correct config.json"
            )
    rope = {"partial_rotary_factor": share, **flat, **nested}
    kind = rope["rope_type"] = rope.get("rope_type", rope.get("type", "default"))
    if kind not in kinds:
        raise ValueError(
            f"got rope type {kind!r}; expected one of {', '.join(kinds)}; use model_engine=fsdp for this model"
        )
    if share == 1.0 and rope["partial_rotary_factor"] != 1.0:
        raise ValueError(
            f"got partial_rotary_factor={rope['partial_rotary_factor']}; expected 1.0: transformers' model of this "
            "family ignores it; correct config.json, or use model_engine=fsdp"
        )
    if "rope_theta" not in rope:
        raise ValueError(
            "got a config.json without rope_theta; expected it in rope_parameters or beside it, because no default "
            "is safe; add it to config.json or model.override_config"
        )
    return rope


def rope_base(hf: dict[str, Any]) -> float:
    return rope_parameters(hf)["rope_theta"]


def inverse_frequencies(hf: dict[str, Any], head_size: int, share: float = 1.0) -> Tensor:
    """[rotated / 2] float32: base^(-2i/rotated), for llama3 divided by `factor` at long wavelengths and
    blended in between (Llama 3.1; transformers' modeling_rope_utils)."""
    rope = rope_parameters(hf, share=share)
    rotated = int(head_size * rope["partial_rotary_factor"])
    inv_freq = 1.0 / rope["rope_theta"] ** (torch.arange(0, rotated, 2).float() / rotated)
    if rope["rope_type"] == "default":
        return inv_freq
    factor, original = rope["factor"], rope["original_max_position_embeddings"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    wavelength = 2 * math.pi / inv_freq
    # 0 at wavelength original/low and beyond (fully scaled), 1 at original/high and below (unscaled)
    keep = ((original / wavelength - low) / (high - low)).clamp(0, 1)
    return (1 - keep) * inv_freq / factor + keep * inv_freq


def latent_rope_fields(hf: dict[str, Any]) -> dict[str, Any]:
    """MLATransformerConfig's rotary fields: plain or YaRN (arXiv 2309.00071).

    Megatron scales the softmax by `rotary_scaling_factor` also for plain rotary embeddings, where transformers
    does not: the factor is 1 there. transformers uses `mscale` only together with `mscale_all_dim`.
    """
    rope = rope_parameters(hf, LATENT_KINDS)
    plain = dict(rotary_scaling_factor=1.0, beta_fast=32.0, beta_slow=1.0, mscale=1.0, mscale_all_dim=0.0)
    plain["original_max_position_embeddings"] = hf["max_position_embeddings"]
    fields = dict(rope_type="rope", rotary_base=rope["rope_theta"], rotary_percent=1.0, **plain)
    if rope["rope_type"] == "default":
        return fields
    unknown = {key: rope[key] for key in ("attention_factor", "truncate") if rope.get(key) not in (None, True)}
    if rope.get("mscale_all_dim") and not rope.get("mscale"):
        unknown["mscale_all_dim"] = rope["mscale_all_dim"]
    if unknown or not rope.get("factor") or not rope.get("original_max_position_embeddings"):
        raise ValueError(
            f"got yarn with {unknown or rope}; expected factor and original_max_position_embeddings, mscale wherever "
            "there is mscale_all_dim, and no attention_factor or truncate; use model_engine=fsdp for this model"
        )
    both = rope.get("mscale") and rope.get("mscale_all_dim")
    return fields | dict(
        rope_type="yarn",
        rotary_scaling_factor=rope["factor"],
        original_max_position_embeddings=rope["original_max_position_embeddings"],
        beta_fast=rope.get("beta_fast") or 32.0,
        beta_slow=rope.get("beta_slow") or 1.0,
        mscale=rope["mscale"] if both else 1.0,
        mscale_all_dim=rope.get("mscale_all_dim") or 0.0,
    )
