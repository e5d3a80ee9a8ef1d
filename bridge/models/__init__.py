"""The supported families: one small file each, keyed by `model_type` of config.json."""

from __future__ import annotations

from bridge.models import deepseek_v3, deepseek_v32, glm4_moe, glm_moe_dsa, llama, qwen2, qwen3, qwen3_moe
from bridge.models.family import Extras, Family
from bridge.models.mla import full_indexer_layers
from bridge.models.moe import num_experts
from bridge.models.mtp import mtp_copies, mtp_pattern
from bridge.models.scope import Config, Target
from bridge.models.value import has_value_head, value_fields
from bridge.rules import Rule

FAMILIES: dict[str, Family] = {
    "llama": llama.FAMILY,
    "qwen2": qwen2.FAMILY,
    "qwen3": qwen3.FAMILY,
    "qwen3_moe": qwen3_moe.FAMILY,
    "glm4_moe": glm4_moe.FAMILY,
    "deepseek_v3": deepseek_v3.FAMILY,
    "deepseek_v32": deepseek_v32.FAMILY,
    "glm_moe_dsa": glm_moe_dsa.FAMILY,
}


def check_supported(hf_config: Config) -> Family:
    """The family of this config.json; ValueError unless its weights can be converted. Nothing is read."""
    kind = hf_config.get("model_type")
    if kind not in FAMILIES:
        raise ValueError(
            f"got model_type {kind!r} (architectures {hf_config.get('architectures')}); expected one of "
            f"{sorted(FAMILIES)}; choose a supported model or add a family to bridge/models"
        )
    FAMILIES[kind].check(hf_config)
    return FAMILIES[kind]


def local_experts(hf_config: Config, ep: int) -> int:
    """Experts a rank holds; ValueError if `ep` ranks cannot share them evenly."""
    count = num_experts(hf_config)
    if count % ep or (ep > 1 and not count):
        raise ValueError(
            f"got {count} experts for {ep} expert-parallel ranks; expected a multiple; "
            "change expert_model_parallel_size (--ep)"
        )
    return count // ep


def family_rules(hf_config: Config, target: Target) -> list[Rule]:
    local_experts(hf_config, target.ep)
    return check_supported(hf_config).rules(hf_config, target)


def family_extras(hf_config: Config, target: Target) -> Extras:
    return check_supported(hf_config).extras(hf_config, target)


def has_indexer(hf_config: Config) -> bool:
    """Whether this model selects its keys (DeepSeek Sparse Attention)."""
    return check_supported(hf_config).has_indexer


__all__ = [
    "FAMILIES",
    "Config",
    "Extras",
    "Family",
    "Target",
    "check_supported",
    "family_extras",
    "family_rules",
    "full_indexer_layers",
    "has_indexer",
    "has_value_head",
    "local_experts",
    "mtp_copies",
    "mtp_pattern",
    "num_experts",
    "value_fields",
]
