"""Qwen3 dense: Llama with a norm on each query and key head."""

from __future__ import annotations

from bridge.models.family import Family
from bridge.models.rows import attention_rows, mlp_rows
from bridge.models.scope import Config, Scope, Target
from bridge.rules import Rule


def layer_rows(config: Config, scope: Scope, target: Target) -> list[Rule]:
    return [*attention_rows(config, scope, qk_norm=True), *mlp_rows(config, scope)]


# attention_bias would add a bias to o_proj too.
FAMILY = Family("Qwen3ForCausalLM", layer_rows, refused={"attention_bias": (True,), "use_sliding_window": (True,)})
