"""DeepSeek-V3 and R1: latent attention, experts behind a group-limited sigmoid router."""

from __future__ import annotations

from bridge.models.family import Family
from bridge.models.mla import mla_rows
from bridge.models.scope import Config, Scope, Target
from bridge.models.sigmoid_moe import REQUIRED, sigmoid_mlp_rows
from bridge.rules import Rule

MLA = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
REFUSED = {"attention_bias": (True,), "rope_interleave": (False,)}


def layer_rows(config: Config, scope: Scope, target: Target) -> list[Rule]:
    return [*mla_rows(config, scope), *sigmoid_mlp_rows(config, scope, target)]


FAMILY = Family("DeepseekV3ForCausalLM", layer_rows, required=REQUIRED + MLA, refused=REFUSED)
