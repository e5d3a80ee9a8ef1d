"""GLM-4.5: grouped-query attention, its q, k, v biases and query-key norms switched by config.json."""

from __future__ import annotations

from bridge.models.family import Family
from bridge.models.rows import attention_rows
from bridge.models.scope import Config, Scope, Target
from bridge.models.sigmoid_moe import REQUIRED, sigmoid_mlp_rows
from bridge.rules import Rule


def layer_rows(config: Config, scope: Scope, target: Target) -> list[Rule]:
    bias, qk_norm = bool(config.get("attention_bias", False)), bool(config.get("use_qk_norm", False))
    return [*attention_rows(config, scope, bias, qk_norm), *sigmoid_mlp_rows(config, scope, target)]


FAMILY = Family("Glm4MoeForCausalLM", layer_rows, required=REQUIRED)
