"""Llama 2 and 3: grouped-query attention and a gated MLP, no biases."""

from __future__ import annotations

from bridge.models.family import Family
from bridge.models.rows import attention_rows, mlp_rows
from bridge.models.scope import Config, Scope, Target
from bridge.rules import Rule


def layer_rows(config: Config, scope: Scope, target: Target) -> list[Rule]:
    return [*attention_rows(config, scope), *mlp_rows(config, scope)]


FAMILY = Family("LlamaForCausalLM", layer_rows, refused={"attention_bias": (True,), "mlp_bias": (True,)})
