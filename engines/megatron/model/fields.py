"""What the model decides: TransformerConfig fields that follow from config.json.

Every field that decides a number is set, none is left to a default: Megatron's own are a GELU network with biases,
dropout, an auxiliary loss and YaRN.
"""

from __future__ import annotations

from typing import Any

from torch.nn import functional

from bridge.models.mla import full_indexer_layers
from bridge.models.moe import moe_layers, num_experts
from engines.megatron.layers.options import AttentionOptions, IndexerOptions
from engines.megatron.model.families import FAMILIES, Family
from engines.megatron.model.hf_config import head_size
from engines.megatron.rope import latent_rope_fields
from engines.spec import MegatronSpec


def model_fields(hf: dict[str, Any]) -> dict[str, Any]:
    """Fields of TransformerConfig, or of MLATransformerConfig if the family has latent attention."""
    family = FAMILIES[hf["model_type"]]
    fields = dict(
        num_layers=hf["num_hidden_layers"],
        hidden_size=hf["hidden_size"],
        ffn_hidden_size=hf["intermediate_size"],
        num_attention_heads=hf["num_attention_heads"],
        layernorm_epsilon=hf["rms_norm_eps"],
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )
    fields |= _latent_fields(hf) if family.latent else _grouped_fields(hf, family)
    return fields | (_moe_fields(hf, family) if family.router else {})


def _grouped_fields(hf: dict[str, Any], family: Family) -> dict[str, Any]:
    bias, norm = (hf[x] if isinstance(x, str) else x for x in (family.qkv_bias, family.qk_norm))
    return dict(
        num_query_groups=hf["num_key_value_heads"], kv_channels=head_size(hf), add_qkv_bias=bias, qk_layernorm=norm
    )


def _latent_fields(hf: dict[str, Any]) -> dict[str, Any]:
    return dict(
        multi_latent_attention=True,
        add_qkv_bias=False,
        qk_layernorm=True,  # the norms of the two latents
        q_lora_rank=hf["q_lora_rank"],
        kv_lora_rank=hf["kv_lora_rank"],
        qk_head_dim=hf["qk_nope_head_dim"],
        qk_pos_emb_head_dim=hf["qk_rope_head_dim"],
        v_head_dim=hf["v_head_dim"],
        rotary_interleaved=False,  # Megatron un-interleaves the projection's rows itself
        **latent_rope_fields(hf),
    )


def _moe_fields(hf: dict[str, Any], family: Family) -> dict[str, Any]:
    """Nothing that balances experts: an auxiliary loss or a drifting bias would fight the policy gradient."""
    sparse = set(moe_layers(hf))
    fields = dict(
        num_moe_experts=num_experts(hf),
        moe_layer_freq=[int(layer in sparse) for layer in range(hf["num_hidden_layers"])],
        moe_ffn_hidden_size=hf["moe_intermediate_size"],
        moe_router_topk=hf["num_experts_per_tok"],
        moe_router_score_function=family.router,
        moe_router_load_balancing_type="none",
        moe_aux_loss_coeff=0.0,
        moe_z_loss_coeff=None,
        moe_input_jitter_eps=None,
        moe_expert_capacity_factor=None,
        moe_router_force_load_balancing=False,
        moe_apply_probs_on_input=False,
        moe_router_bias_update_rate=0.0,
    )
    if family.router == "softmax":
        return fields | dict(
            # transformers and vLLM compute these logits in the model's dtype.
            moe_router_dtype=None,
            moe_router_enable_expert_bias=False,
            # Softmax over all experts, or over the chosen ones, which is the same as dividing by their sum.
            moe_router_pre_softmax=not hf["norm_topk_prob"],
            moe_router_topk_scaling_factor=None,
            moe_shared_expert_intermediate_size=None,
        )
    grouped = hf["n_group"] > 1
    return fields | dict(
        moe_router_dtype="fp32",
        moe_router_enable_expert_bias=True,
        moe_router_pre_softmax=False,
        moe_router_topk_scaling_factor=hf["routed_scaling_factor"],
        moe_router_num_groups=hf["n_group"] if grouped else None,
        moe_router_group_topk=hf["topk_group"] if grouped else None,
        moe_shared_expert_intermediate_size=hf["moe_intermediate_size"] * hf["n_shared_experts"] or None,
    )


def attention_options(hf: dict[str, Any], backend: MegatronSpec) -> AttentionOptions:
    """What the latent attention layers must know beyond TransformerConfig."""
    if not FAMILIES[hf["model_type"]].indexer:
        return AttentionOptions(absorb=backend.mla_absorb)
    full = set(full_indexer_layers(hf))
    indexer = IndexerOptions(
        heads=hf["index_n_heads"],
        head_dim=hf["index_head_dim"],
        topk=hf["index_topk"],
        rope_interleaved=hf["indexer_rope_interleave"],
        full_layers=tuple(layer in full for layer in range(hf["num_hidden_layers"])),
        k_norm_eps=backend.indexer_k_norm_eps,
        loss_coeff=backend.indexer_loss_coeff,
    )
    return AttentionOptions(absorb=backend.mla_absorb, indexer=indexer)
