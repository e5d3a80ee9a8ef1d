"""Qwen3 with experts: softmax router, no shared expert, some layers dense if config.json says so."""

from __future__ import annotations

from bridge.models.family import Family
from bridge.models.moe import moe_layers, moe_rows
from bridge.models.rows import attention_rows, mlp_rows
from bridge.models.scope import Config, Scope, Target
from bridge.rules import Rule


def layer_rows(config: Config, scope: Scope, target: Target) -> list[Rule]:
    sparse = set(moe_layers(config))
    return [
        *attention_rows(config, scope, qk_norm=True),
        *mlp_rows(config, scope.only(set(scope.layers) - sparse)),
        *moe_rows(config, scope.only(sparse), target.ep, correction_bias=False),
    ]


FAMILY = Family(
    "Qwen3MoeForCausalLM",
    layer_rows,
    required=("moe_intermediate_size",),
    refused={"attention_bias": (True,), "use_sliding_window": (True,)},
)
