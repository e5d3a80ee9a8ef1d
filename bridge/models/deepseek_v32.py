"""DeepSeek-V3.2 (arXiv 2512.02556): DeepSeek-V3 with a sparse-attention indexer in each layer, whose rows turn in
halves."""

from __future__ import annotations

from bridge.models import deepseek_v3
from bridge.models.family import Family
from bridge.models.mla import full_indexer_layers, indexer_rows
from bridge.models.mtp import mtp_layers
from bridge.models.scope import Config, Scope, Target
from bridge.ops import RopeRows
from bridge.rules import Rule

REQUIRED = (*deepseek_v3.FAMILY.required, "q_lora_rank", "index_n_heads", "index_head_dim", "index_topk")


def rows_with_indexer(config: Config, scope: Scope, target: Target, interleaved_default: bool) -> list[Rule]:
    """DeepSeek-V3's rows, and an indexer in the layers that have one; extra prediction layers do."""
    interleaved = config.get("indexer_rope_interleave")
    source = RopeRows(first=True, interleaved=interleaved_default if interleaved is None else interleaved)
    indexed = scope.only([*full_indexer_layers(config), *mtp_layers(config)])
    return [*deepseek_v3.layer_rows(config, scope, target), *indexer_rows(config, indexed, source, target.indexer)]


def layer_rows(config: Config, scope: Scope, target: Target) -> list[Rule]:
    return rows_with_indexer(config, scope, target, interleaved_default=False)


FAMILY = Family("DeepseekV32ForCausalLM", layer_rows, REQUIRED, deepseek_v3.REFUSED, has_indexer=True)
