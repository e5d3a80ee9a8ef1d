"""Which names of `override_transformer_config` are MindSpeed's, and what MindSpeed is told when it adapts Megatron.

MindSpeed (branch core_r0.16.0) and Megatron-Core share one namespace of settings: what is given to `repatch`
decides which functions are replaced, and becomes the default of every TransformerConfig built afterwards. Plain
names and values, no torch: the driver reads this before any worker starts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engines.spec import MegatronSpec

ABSORB = "use_dsa_absorb"
FUSED_DSA = ("use_fused_lightning_indexer", "use_fused_sparse_flash_attention", "use_fused_lightning_indexer_kl_loss")
DSA = (ABSORB, *FUSED_DSA)
DSA_CONTEXT_PARALLEL = "kvallgather_cp_algo"

# Arguments of MindSpeed's own parser that a run may set. Everything else there is in REFUSED or not offered.
PARSER_FLAGS = frozenset(
    (
        *DSA,
        "apply_rope_in_complex",
        *("attention_mask_type", "sparse_mode", "pre_tockens", "next_tockens"),
        *("use_fused_rmsnorm", "use_fused_swiglu", "use_fused_rotary_pos_emb", "use_fused_ring_attention_update"),
        *("use_fused_moe_token_permute_and_unpermute", "gemm_gradient_accumulation_fusion"),
        *("context_parallel_algo", "ulysses_degree_in_cp", "cp_window_size", "megatron_cp_in_bnsd"),
        *("use_cp_send_recv_overlap", "use_ascend_mc2", "disable_gloo_group"),
        *("moe_alltoall_overlap_comm", "moe_fb_overlap", "balanced_moe_experts", "balanced_moe_hot_expert_num"),
        *("moe_zero_memory", "moe_zero_memory_num_layers", "moe_unperm2_mem_optim_swap"),
        *("recompute_norm", "recompute_norm_num_layers"),
        *("recompute_activation_function", "recompute_activation_function_num_layers"),
        *("swap_optimizer", "swap_optimizer_times", "virtual_optimizer", "reuse_fp32_param", "quant_states"),
        *("param_and_grad_buffer_pad", "hccl_group_buffer", "hccl_group_buffer_adaptive"),
        *("hccl_ep_group_buffer_adaptive_factor", "optimizer_selection", "optimization_level"),
        *("use_batch_invariant_ops", "use_flash_attn_npu_batch_invariant"),
    )
)
# Read from the namespace without an argument of the parser.
NAMESPACE_FLAGS = frozenset(("use_flash_attn", "swiglu", "position_embedding_type"))
FLAGS = PARSER_FLAGS | NAMESPACE_FLAGS

_OTHER_LOOP = "it changes Megatron's own training loop, which this trainer does not use"
_DATASET = (
    "it makes MindSpeed replace the packed sequences of the trainer by those of its own data set "
    "(and needs megatron.training)"
)
_NO_RULE = "the weight bridge has no rule for the shards it makes"
_DEAD = "it exists in documents only; core_r0.16.0 reads it nowhere"
# Names that public recipes and MindSpeed's documents show, and why they cannot work here.
REFUSED: dict[str, str] = {
    "swap_attention": "it refuses adapters and imports legacy modules of megatron.training",
    **dict.fromkeys(("smart_swap", "schedules_method", "dualpipev_dw_detach", "async_log_allreduce"), _OTHER_LOOP),
    **dict.fromkeys(("layerzero", "layerzero_config", "op_cal_tflops", "auto_settings", "profile"), _OTHER_LOOP),
    **dict.fromkeys(("profile_level", "profile_with_cpu", "profile_with_stack", "profile_with_memory"), _OTHER_LOOP),
    **dict.fromkeys(("profile_record_shapes", "profile_save_path"), _OTHER_LOOP),
    "npu_deterministic": "it wraps Megatron's seeding, which is never called here; set the engine's seed and HCCL_"
    "DETERMINISTIC instead",
    "use_ascend_coc": "it does not work with transformer_impl=transformer_engine, which the Ascend layers need",
    **dict.fromkeys(("tp_2d", "tp_x", "tp_y", "unaligned_linear", "noop_layers"), _NO_RULE),
    **dict.fromkeys(("pipeline_num_transformer_layers", "use_multiparameter_pipeline_model_parallel"), _NO_RULE),
    **dict.fromkeys(("moe_tp_extend_ep", "moe_permutation_async_comm"), "it belongs to the dispatcher alltoall_seq"),
    "moe_allgather_overlap_comm": "it belongs to the dispatcher allgather",
    **dict.fromkeys(("reset_attention_mask", "reset_position_ids"), _DATASET),
    **dict.fromkeys(("fused_permute_unpermute", "ckpt_acceleration", "use_triton_gdn", "use_ascend_gdn"), _DEAD),
}
# The replacement to paste, where there is one.
INSTEAD = {"fused_permute_unpermute": "moe_permute_fusion=True"}


def split(overrides: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """`override_transformer_config` of an Ascend run -> (fields of Megatron's config, MindSpeed's names).

    Names that are neither stay on Megatron's side, which knows its own fields and reports the rest.
    """
    own = {key: value for key, value in overrides.items() if key in FLAGS or key in REFUSED}
    return {key: value for key, value in overrides.items() if key not in own}, own


def is_sparse(hf: Mapping[str, Any]) -> bool:
    """Whether a config.json describes DeepSeek Sparse Attention."""
    return hf.get("index_topk") is not None


def is_latent(hf: Mapping[str, Any]) -> bool:
    """Whether a config.json describes multi-latent attention."""
    return hf.get("kv_lora_rank") is not None


def mindspeed_flags(hf: Mapping[str, Any], backend: MegatronSpec, device: str) -> dict[str, Any]:
    """The MindSpeed flags in force: what the model and the device need, then what the run asks for.

    The fused sparse-attention operators exist on the device only; on a host the absorbed layers run in plain torch.
    """
    flags: dict[str, Any] = {"use_flash_attn": not backend.mindspeed.get("use_flash_attn_npu_batch_invariant")}
    if is_sparse(hf):
        flags |= {ABSORB: True, **dict.fromkeys(FUSED_DSA, device == "npu"), "apply_rope_in_complex": False}
        if backend.context_parallel_size > 1:
            flags["context_parallel_algo"] = DSA_CONTEXT_PARALLEL
    return flags | backend.mindspeed


def config_fields(hf: Mapping[str, Any], backend: MegatronSpec, device: str) -> dict[str, Any]:
    """TransformerConfig fields that an Ascend engine adds to the run's own overrides.

    The fused operators of SwiGLU and of rotary embeddings are reached through Megatron's own fusion switches
    only; without them the flag is accepted and the slow path runs.
    """
    flags = mindspeed_flags(hf, backend, device)
    fields: dict[str, Any] = {"transformer_impl": "transformer_engine"}
    if flags.get("use_fused_swiglu"):
        fields["bias_activation_fusion"] = True
    if flags.get("use_fused_rotary_pos_emb"):
        fields["apply_rope_fusion"] = True
    if is_sparse(hf):
        fields |= {
            "experimental_attention_variant": "dsa",
            "dsa_indexer_n_heads": hf.get("index_n_heads"),
            "dsa_indexer_head_dim": hf.get("index_head_dim"),
            "dsa_indexer_topk": hf["index_topk"],
            "dsa_indexer_loss_coeff": backend.indexer_loss_coeff,
            "dsa_indexer_use_sparse_loss": True,
        }
    return fields | backend.override_transformer_config


def repatch_arguments(hf: Mapping[str, Any], backend: MegatronSpec, device: str) -> dict[str, Any]:
    """Everything MindSpeed is told before it replaces Megatron's functions: the one argument of `repatch`.

    Unset (None) values are left out: an unset key would still overwrite MindSpeed's default.
    """
    arguments = config_fields(hf, backend, device) | mindspeed_flags(hf, backend, device)
    arguments |= {"swiglu": True, "position_embedding_type": "rope", "moe_token_dispatcher_type": "alltoall"}
    arguments |= {"variable_seq_lengths": True, "use_distributed_optimizer": backend.use_distributed_optimizer}
    # The fused attention reads it from the namespace without a default, also when nothing is split.
    arguments["context_parallel_size"] = backend.context_parallel_size
    if is_latent(hf):
        arguments |= {"multi_latent_attention": True, "qk_layernorm": True}
    return {key: value for key, value in arguments.items() if value is not None}
