"""The MLP of the families that follow DeepSeek-V3: the first layers dense, then a sigmoid router with a
correction bias, experts and shared experts. Extra prediction layers are like the last layer."""

from __future__ import annotations

from bridge.models.moe import is_moe, moe_rows
from bridge.models.rows import mlp_rows
from bridge.models.scope import Config, Scope, Target
from bridge.rules import Rule

REQUIRED = ("moe_intermediate_size", "first_k_dense_replace")


def sigmoid_mlp_rows(config: Config, scope: Scope, target: Target) -> list[Rule]:
    sparse = {layer for layer in scope.layers if is_moe(config, layer)}
    return [
        *mlp_rows(config, scope.only(set(scope.layers) - sparse)),
        *moe_rows(config, scope.only(sparse), target.ep, correction_bias=True),
    ]
