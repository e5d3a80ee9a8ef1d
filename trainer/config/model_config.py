"""The small part of a model's config.json that checks and summaries read. No model library is imported."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.config.errors import ConfigError

SUPPORTED_ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
KEY = "actor_rollout_ref.model.path"


@dataclass(frozen=True)
class ModelFacts:
    """Sizes of the model; `experts` 0 is a dense model, `max_positions` None is unlimited."""

    architecture: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    tied: bool
    experts: int
    max_positions: int | None

    @property
    def parameters(self) -> int:
        """Matrices of a dense decoder (norms and biases left out)."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.ffn) + self.vocab * self.hidden * (2 - self.tied)


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
    needed = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size")
    missing = [name for name in needed if name not in content]
    if missing:
        got = f"{file} without {', '.join(missing)}"
        return None, ConfigError("model.path", KEY, got, f"all of {', '.join(needed)}", "download the model again")
    heads, hidden = content["num_attention_heads"], content["hidden_size"]
    facts = ModelFacts(
        architecture=names[0],
        layers=content["num_hidden_layers"],
        hidden=hidden,
        heads=heads,
        kv_heads=content.get("num_key_value_heads") or heads,
        head_dim=content.get("head_dim") or hidden // heads,
        ffn=content["intermediate_size"],
        vocab=content["vocab_size"],
        tied=bool(content.get("tie_word_embeddings", False)),
        experts=content.get("num_experts") or content.get("num_local_experts") or content.get("n_routed_experts") or 0,
        max_positions=content.get("max_position_embeddings"),
    )
    return facts, None
