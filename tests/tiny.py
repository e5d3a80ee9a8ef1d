"""The tiny models of `scripts.make_tiny` by kind: a family, with `_tied` for a head tied to the embedding."""

from __future__ import annotations

from pathlib import Path

from transformers import PretrainedConfig

from scripts.make_tiny import tiny_config as family_config
from scripts.make_tiny import write_checkpoint, write_tokenizer

KINDS = ("llama", "llama_tied", "qwen2", "qwen3", "qwen3_tied")
MOE_KINDS = ("qwen3_moe", "glm4_moe", "deepseek_v3", "deepseek_v32", "glm_moe_dsa")

write_tiny_tokenizer = write_tokenizer


def tiny_config(kind: str, **changes: object) -> PretrainedConfig:
    return family_config(kind.removesuffix("_tied"), **_tied(kind), **changes)


def write_tiny_model(folder: Path | str, kind: str, seed: int = 0, **changes: object) -> Path:
    """A random fp32 model saved by transformers; `changes` are those of `write_checkpoint` (mtp, fp8, fields)."""
    return write_checkpoint(folder, kind.removesuffix("_tied"), seed=seed, **_tied(kind), **changes)


def _tied(kind: str) -> dict[str, bool]:
    return {"tie_word_embeddings": kind.endswith("_tied")}
