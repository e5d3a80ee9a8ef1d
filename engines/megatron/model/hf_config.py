"""config.json, read once: what is absent is filled in from the family's table, what we cannot compute is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bridge import has_value_head, value_fields
from bridge.models.moe import num_experts
from engines.megatron.model.families import FAMILIES, Family
from engines.spec import ModelSpec


def read_hf_config(model: ModelSpec) -> dict[str, Any]:
    """config.json of a model directory with `override_config` on top and absent keys filled in; with a value head,
    that of the value model.

    Raises ValueError for a missing file, an unsupported family, a missing or contradictory key, or an option
    Megatron cannot reproduce.
    """
    path = Path(model.path) / "config.json"
    if not path.is_file():
        raise ValueError(
            f"got model path {model.path} without config.json; expected a Hugging Face directory; set model.path"
        )
    hf = {**json.loads(path.read_text()), **model.override_config}
    if model.head == "value":
        hf |= value_fields(hf)
    elif has_value_head(hf):
        raise ValueError(
            f"got {hf['architectures']} in {path}, a value model; expected a causal language model; name one in "
            "model.path (a value model serves as critic.model.path)"
        )
    if hf["model_type"] not in FAMILIES:
        raise ValueError(
            f"got model_type {hf['model_type']!r}; expected one of {sorted(FAMILIES)}; use model_engine=fsdp for it"
        )
    family = FAMILIES[hf["model_type"]]
    hf |= {key: value for key, value in family.absent.items() if hf.get(key) is None}
    _check_complete(hf, family)
    _check_computable(hf, family)
    return hf


def _check_complete(hf: dict[str, Any], family: Family) -> None:
    missing = [key for key in family.required if key not in hf]
    if family.router and not num_experts(hf):
        missing.append("num_experts or n_routed_experts")
    if missing:
        raise ValueError(
            f"got a {hf['model_type']} config.json without {', '.join(missing)}; expected these keys, because no "
            "default is safe; add them to config.json or model.override_config"
        )


def _check_computable(hf: dict[str, Any], family: Family) -> None:
    wrong = {name: hf[name] for name in family.off if hf.get(name)}
    expected = {"hidden_act": "silu", **family.fixed}
    wrong |= {name: hf[name] for name, value in expected.items() if hf.get(name, value) != value}
    if wrong:
        want = {name: expected.get(name, False) for name in wrong}
        raise ValueError(
            f"got {hf['model_type']} with {wrong}; expected {want}: the Megatron layers do not compute anything "
            "else; use model_engine=fsdp"
        )


def head_size(hf: dict[str, Any]) -> int:
    """Size of a grouped-query attention head."""
    return hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"]
