"""The supported families: one small file each, keyed by `model_type` of config.json."""

from __future__ import annotations

from bridge.mapping import Rule
from bridge.models import llama, qwen2, qwen3
from bridge.models.rows import Config

FAMILIES = {"llama": llama.FAMILY, "qwen2": qwen2.FAMILY, "qwen3": qwen3.FAMILY}


def check_supported(hf_config: Config) -> None:
    """ValueError unless weights of this config.json can be converted; nothing is read."""
    kind = hf_config.get("model_type")
    if kind not in FAMILIES:
        raise ValueError(
            f"got model_type {kind!r} (architectures {hf_config.get('architectures')}); expected one of "
            f"{sorted(FAMILIES)}; choose a supported model or add a family to bridge/models"
        )
    FAMILIES[kind].check(hf_config)


def family_rules(hf_config: Config) -> list[Rule]:
    check_supported(hf_config)
    return FAMILIES[hf_config["model_type"]].rules(hf_config)
