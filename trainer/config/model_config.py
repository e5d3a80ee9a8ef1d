"""The small part of a model's config.json that checks and summaries read. No model library is imported."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.config.errors import ConfigError
from trainer.config.model_size import expert_count, needed_sizes, parameters

SUPPORTED_ARCHITECTURES = (
    "LlamaForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
    "Glm4MoeForCausalLM",
    "DeepseekV3ForCausalLM",
    "DeepseekV32ForCausalLM",
    "GlmMoeDsaForCausalLM",
)
KEY = "actor_rollout_ref.model.path"


@dataclass(frozen=True)
class ModelFacts:
    """Sizes of the model; `experts` 0 is a dense model, `max_positions` None is unlimited. `parameters` counts
    matrices. Latent attention has as many key-value heads as heads."""

    architecture: str
    layers: int
    heads: int
    kv_heads: int
    experts: int
    expert_ffn: int | None
    parameters: int
    max_positions: int | None


def is_local(path: str) -> bool:
    """A path of this machine; otherwise a hub id such as Qwen/Qwen3-8B."""
    return path.startswith(("/", ".", "~")) or Path(path).expanduser().exists()


def read(path: str, overrides: dict[str, Any]) -> tuple[ModelFacts | None, ConfigError | None]:
    """Facts of a local model directory, or what is wrong with it; (None, None) for a hub id."""
    if not is_local(path):
        return None, None
    file = Path(path).expanduser() / "config.json"
    if not file.is_file():
        got = f"{path}: no such directory" if not file.parent.is_dir() else f"{path}: no config.json in it"
        return None, ConfigError(
            "model.path", KEY, got, "a Hugging Face model directory, or a hub id", f"{KEY}=DIRECTORY"
        )
    try:
        content = json.loads(file.read_text(encoding="utf-8")) | dict(overrides)
    except json.JSONDecodeError as error:
        return None, ConfigError("model.path", KEY, f"{file}: {error}", "valid JSON", "download the model again")
    return _facts(content, file)


def _facts(content: dict[str, Any], file: Path) -> tuple[ModelFacts | None, ConfigError | None]:
    names = content.get("architectures") or ["none"]
    if names[0] not in SUPPORTED_ARCHITECTURES:
        got = f"{names[0]} ({file})"
        expected = f"one of {', '.join(SUPPORTED_ARCHITECTURES)}"
        return None, ConfigError("model.arch", KEY, got, expected, f"{KEY}=A_MODEL_OF_THESE")
    needed = needed_sizes(content)
    missing = [name for name in needed if name not in content]
    if missing:
        got = f"{file} without {', '.join(missing)}"
        return None, ConfigError("model.path", KEY, got, f"all of {', '.join(needed)}", "download the model again")
    heads, experts = content["num_attention_heads"], expert_count(content)
    facts = ModelFacts(
        architecture=names[0],
        layers=content["num_hidden_layers"],
        heads=heads,
        kv_heads=heads if "kv_lora_rank" in content else content.get("num_key_value_heads") or heads,
        experts=experts,
        expert_ffn=content["moe_intermediate_size"] if experts else None,
        parameters=parameters(content),
        max_positions=content.get("max_position_embeddings"),
    )
    return facts, None
