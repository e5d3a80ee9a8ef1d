"""GLM-5, 5.1 and 5.2: as DeepSeek-V3.2, but indexer rows turn in neighbouring pairs, and in 5.2 some layers use
the selection of an earlier one (arXiv 2603.12201)."""

from __future__ import annotations

from bridge.models import deepseek_v3
from bridge.models.deepseek_v32 import REQUIRED, rows_with_indexer
from bridge.models.family import Family
from bridge.models.scope import Config, Scope, Target
from bridge.rules import Rule


def layer_rows(config: Config, scope: Scope, target: Target) -> list[Rule]:
    return rows_with_indexer(config, scope, target, interleaved_default=True)


FAMILY = Family("GlmMoeDsaForCausalLM", layer_rows, REQUIRED, deepseek_v3.REFUSED, has_indexer=True)
