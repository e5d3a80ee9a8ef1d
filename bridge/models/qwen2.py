"""Qwen2 and Qwen2.5: Llama with biases on q, k and v, which no config field announces."""

from __future__ import annotations

from bridge.models.family import Family
from bridge.models.rows import attention_rows, mlp_rows
from bridge.models.scope import Config, Scope, Target
from bridge.rules import Rule


def layer_rows(config: Config, scope: Scope, target: Target) -> list[Rule]:
    return [*attention_rows(config, scope, bias=True), *mlp_rows(config, scope)]


FAMILY = Family("Qwen2ForCausalLM", layer_rows, refused={"use_sliding_window": (True,)})
