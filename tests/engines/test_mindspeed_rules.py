"""MindSpeed's rules as our checks: what passes, what is refused and why, and which flags it is told."""

from __future__ import annotations

import pytest

from engines.megatron.mindspeed_flags import DSA, FLAGS, FUSED_DSA, REFUSED, repatch_arguments, split
from engines.megatron.mindspeed_rules import check, problems
from engines.spec import MegatronSpec

QWEN = {"model_type": "qwen3", "num_attention_heads": 32}
MOE = {"model_type": "qwen3_moe", "num_attention_heads": 32, "num_experts": 128}
MLA = {"model_type": "deepseek_v3", "num_attention_heads": 128, "kv_lora_rank": 512, "n_routed_experts": 256}
GLM5 = {
    **{"model_type": "glm_moe_dsa", "num_attention_heads": 64, "kv_lora_rank": 512, "n_routed_experts": 256},
    **{"index_topk": 2048, "index_n_heads": 32, "index_head_dim": 128},
}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
GROUPED = {"moe_grouped_gemm": True}
CP2 = {"context_parallel_size": 2}


def backend(overrides: dict, sizes: dict | None = None) -> MegatronSpec:
    """As trainer/wiring.py builds it on npu."""
    mcore, own = split(overrides)
    return MegatronSpec(override_transformer_config=mcore, mindspeed=own, **(sizes or {}))


# (model, override_transformer_config, other settings of the engine)
ACCEPTED = {
    "dense": (QWEN, {"use_fused_rmsnorm": True, "use_fused_swiglu": True, "use_fused_rotary_pos_emb": True}, {}),
    "sparse attention as it comes": (GLM5, {}, {"tensor_model_parallel_size": 2}),
    "the full set by name": (GLM5, dict.fromkeys(DSA, True), {}),
    "whole layers recomputed": (GLM5, FULL, {}),
    "selective recomputation of experts": (
        GLM5,
        {"recompute_granularity": "selective", "recompute_modules": ["moe", "shared_experts", "mlp"]},
        {},
    ),
    "selective recomputation of plain attention": (QWEN, {"recompute_granularity": "selective"}, {}),
    "unset keys of the configuration": (GLM5, {"recompute_granularity": None, "recompute_modules": ["core_attn"]}, {}),
    "overlap of experts": (MOE, {**GROUPED, "moe_alltoall_overlap_comm": True, "moe_zero_memory": "level1"}, {}),
    "forward and backward overlapped": (
        MOE,
        {**GROUPED, "moe_fb_overlap": True, "moe_zero_memory": "level0"},
        {"expert_model_parallel_size": 4},
    ),
    "optimizer on the host": (QWEN, {"swap_optimizer": True, "swap_optimizer_times": 8}, {}),
    "the same numbers for any batch": (
        QWEN,
        {"use_flash_attn_npu_batch_invariant": True, "use_batch_invariant_ops": True},
        {},
    ),
}

# name: (model, override_transformer_config, other settings, part of the message)
REFUSALS = {
    "fused without absorb": (GLM5, {"use_dsa_absorb": False}, {}, "without use_dsa_absorb"),
    "a part of the fused set": (GLM5, {FUSED_DSA[2]: False}, {}, f"without {FUSED_DSA[2]}"),
    "absorb alone": (GLM5, dict.fromkeys(FUSED_DSA, False), {}, "packed sequences need the fused operators"),
    "sparse flags on a dense model": (QWEN, {"use_dsa_absorb": True}, {}, "index_topk in config.json"),
    "no norms of the latents": (GLM5, {"qk_layernorm": False}, {}, "qk_layernorm=False"),
    "no latent attention": (GLM5, {"multi_latent_attention": False}, {}, "multi_latent_attention=False"),
    "another attention variant": (GLM5, {"experimental_attention_variant": "gated_delta_net"}, {}, "expected dsa"),
    "shared indexers": ({**GLM5, "indexer_types": ["full", "shared"]}, {}, {}, "one indexer per layer"),
    "shared by formula": ({**GLM5, "index_topk_freq": 4}, {}, {}, "one indexer per layer"),
    "rope in complex": (GLM5, {"apply_rope_in_complex": True}, {}, "wrong place"),
    "ring for sparse attention": (GLM5, {"context_parallel_algo": "megatron_cp_algo"}, CP2, "kvallgather_cp_algo"),
    "absorbing dense attention": (MLA, {}, {"mla_absorb": True}, "mla_absorb=False"),
    "no sequence parallelism": (
        MLA,
        {},
        {"tensor_model_parallel_size": 2, "sequence_parallel": False},
        "sequence_parallel=True",
    ),
    "two attentions": (
        QWEN,
        {"use_flash_attn": True, "use_flash_attn_npu_batch_invariant": True},
        {},
        "both replace the same function",
    ),
    "invariant attention over ranks": (
        QWEN,
        {"use_flash_attn_npu_batch_invariant": True},
        CP2,
        "context_parallel_size=1",
    ),
    "masks": (QWEN, {"sparse_mode": 4}, {}, "sparse_mode=2"),
    "learned positions": (QWEN, {"position_embedding_type": "learned_absolute"}, {}, "rope"),
    "local layers": (QWEN, {"transformer_impl": "local"}, {}, "transformer_engine"),
    "size set twice": (QWEN, {"context_parallel_size": 4}, CP2, "the engine's own setting"),
    "unknown algorithm": (QWEN, {"context_parallel_algo": "ring"}, CP2, "one of megatron_cp_algo"),
    "kvallgather with a mask": (
        QWEN,
        {"context_parallel_algo": "kvallgather_cp_algo", "attention_mask_type": "general"},
        CP2,
        "causal",
    ),
    "hybrid without a degree": (QWEN, {"context_parallel_algo": "hybrid_cp_algo"}, CP2, "ulysses_degree_in_cp=None"),
    "hybrid of one ring": (
        QWEN,
        {"context_parallel_algo": "hybrid_cp_algo", "ulysses_degree_in_cp": 2},
        CP2,
        "smaller than it",
    ),
    "hybrid that does not divide": (
        QWEN,
        {"context_parallel_algo": "hybrid_cp_algo", "ulysses_degree_in_cp": 3},
        {"context_parallel_size": 8},
        "a divisor of context_parallel_size",
    ),
    "hybrid with too few heads": (
        {**QWEN, "num_attention_heads": 6},
        {"context_parallel_algo": "hybrid_cp_algo", "ulysses_degree_in_cp": 2},
        {"context_parallel_size": 4, "tensor_model_parallel_size": 2},
        "lower ulysses_degree_in_cp",
    ),
    "ulysses with too few heads": (
        QWEN,
        {"context_parallel_algo": "ulysses_cp_algo"},
        {"context_parallel_size": 8, "tensor_model_parallel_size": 8},
        "heads divisible",
    ),
    "a GPU dispatcher": (MOE, {"moe_token_dispatcher_type": "flex"}, {}, "expected alltoall"),
    "deep ep": (MOE, {"moe_enable_deepep": True}, {}, "moe_enable_deepep"),
    "permute fusion with allgather": (
        MOE,
        {"moe_permute_fusion": True, "moe_token_dispatcher_type": "allgather"},
        {},
        "expected alltoall",
    ),
    "permute fusion with capacity": (
        MOE,
        {"moe_permute_fusion": True, "moe_expert_capacity_factor": 1.5},
        {},
        "moe_pad_expert_input_to_capacity",
    ),
    "overlap without grouped products": (MOE, {"moe_alltoall_overlap_comm": True}, {}, "moe_grouped_gemm=True"),
    "overlap with mc2": (
        MOE,
        {**GROUPED, "moe_alltoall_overlap_comm": True, "use_ascend_mc2": True},
        {},
        "use_ascend_mc2",
    ),
    "experts over tensor ranks": (MOE, {**GROUPED, "moe_tp_extend_ep": True}, {}, "alltoall_seq"),
    "dropped activations alone": (MOE, {"moe_zero_memory": "level0"}, {}, "moe_fb_overlap beside it"),
    "overlap on one expert rank": (MOE, {**GROUPED, "moe_fb_overlap": True}, {}, "expert_model_parallel_size above 1"),
    "overlap with split experts": (
        MOE,
        {**GROUPED, "moe_fb_overlap": True},
        {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 2},
        "expert_tensor_parallel_size 1",
    ),
    "both overlaps": (
        MOE,
        {**GROUPED, "moe_fb_overlap": True, "moe_alltoall_overlap_comm": True},
        {"expert_model_parallel_size": 2},
        "moe_fb_overlap and moe_alltoall_overlap_comm",
    ),
    "overlap with level1": (
        MOE,
        {**GROUPED, "moe_fb_overlap": True, "moe_zero_memory": "level1"},
        {"expert_model_parallel_size": 2},
        "moe_zero_memory=level0",
    ),
    "overlap with gradient overlap": (
        MOE,
        {**GROUPED, "moe_fb_overlap": True, "overlap_grad_reduce": True},
        {"expert_model_parallel_size": 2},
        "overlap_grad_reduce",
    ),
    "overlap with plain stages": (
        MOE,
        {**GROUPED, "moe_fb_overlap": True},
        {"expert_model_parallel_size": 2, "pipeline_model_parallel_size": 2},
        "virtual_pipeline_model_parallel_size",
    ),
    "host optimizer, not distributed": (
        QWEN,
        {"swap_optimizer": True},
        {"use_distributed_optimizer": False},
        "use_distributed_optimizer=True",
    ),
    "host optimizer, shared copies": (QWEN, {"swap_optimizer": True, "reuse_fp32_param": True}, {}, "one of them"),
    "averaged weights": (QWEN, {"optimizer_selection": "fused_ema_adamw"}, {}, "fused_torch_adamw"),
    "swiglu without its switch": (
        QWEN,
        {"use_fused_swiglu": True, "bias_activation_fusion": False},
        {},
        "remove bias_activation_fusion",
    ),
    "fp8": (QWEN, {"fp8": "hybrid"}, {}, "compute no fp8"),
    "method without granularity": (QWEN, {"recompute_method": "uniform"}, {}, "recompute_granularity=full"),
    "layers with selective": (
        QWEN,
        {"recompute_granularity": "selective", "recompute_num_layers": 2},
        {},
        "remove recompute_num_layers",
    ),
    "the other bridge with virtual stages": (
        QWEN,
        {},
        {"bridge": "megatron_bridge", "pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
        "bridge=native",
    ),
    "split sequences": (GLM5, {}, CP2, "not built for MindSpeed's attention yet"),
    "recomputed core attention": (GLM5, {"recompute_granularity": "selective"}, {}, "core_attn fails"),
    "recomputed up-projection": (
        GLM5,
        {"recompute_granularity": "selective", "recompute_modules": ["mla_up_proj"]},
        {},
        "mla_up_proj fails",
    ),
    "recomputed norms": (
        QWEN,
        {"recompute_granularity": "selective", "recompute_modules": ["layernorm"]},
        {},
        "layernorm fails",
    ),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_settings_that_work_pass(name):
    hf, overrides, sizes = ACCEPTED[name]
    check(hf, backend(overrides, sizes))


@pytest.mark.parametrize("name", REFUSALS)
def test_settings_that_cannot_work_are_refused_in_three_parts(name):
    hf, overrides, sizes, part = REFUSALS[name]
    with pytest.raises(ValueError) as caught:
        check(hf, backend(overrides, sizes))
    lines = str(caught.value).splitlines()
    assert any(part in line for line in lines), lines
    for line in lines:
        assert line.startswith("got ") and "; expected " in line and line.count("; ") >= 2, line


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_names_that_do_nothing_or_harm_are_refused_with_the_reason(name):
    (problem,) = problems(QWEN, backend({name: True}))
    assert name in problem.got and "because" in problem.expected


def test_a_dead_name_comes_with_its_replacement():
    (problem,) = problems(MOE, backend({"fused_permute_unpermute": True}))
    assert "moe_permute_fusion=True" in problem.fix


def test_adapters_on_modules_that_are_never_called_are_refused():
    for target in ("linear_k_up_proj", "linear_v_up_proj", "core_attention.indexer.linear_wk"):
        (problem,) = problems(GLM5, backend({}), targets=("linear_proj", target))
        assert target in problem.got and target in problem.fix
    assert not problems(GLM5, backend({}), targets=("linear_proj", "linear_q_up_proj", "all-linear"))
    assert not problems(MLA, backend({}), targets=("linear_k_up_proj",))


def test_one_namespace_of_the_configuration_is_divided():
    mcore, own = split({"use_flash_attn": True, "recompute_granularity": "full", "swap_attention": True, "typo": 1})
    assert mcore == {"recompute_granularity": "full", "typo": 1}
    assert own == {"use_flash_attn": True, "swap_attention": True}
    assert not FLAGS & REFUSED.keys()


def test_a_dense_model_tells_mindspeed_only_what_it_needs():
    assert repatch_arguments(QWEN, backend({"use_fused_swiglu": True, "recompute_granularity": None}), "npu") == {
        "use_flash_attn": True,
        "use_fused_swiglu": True,
        "bias_activation_fusion": True,
        "transformer_impl": "transformer_engine",
        "swiglu": True,
        "position_embedding_type": "rope",
        "moe_token_dispatcher_type": "alltoall",
        "variable_seq_lengths": True,
        "use_distributed_optimizer": True,
        "context_parallel_size": 1,
    }


def test_sparse_attention_switches_everything_on_that_belongs_to_it():
    arguments = repatch_arguments(GLM5, backend({"moe_grouped_gemm": True}, CP2), "npu")
    expected = {
        **dict.fromkeys(DSA, True),
        "apply_rope_in_complex": False,
        "experimental_attention_variant": "dsa",
        "multi_latent_attention": True,
        "qk_layernorm": True,
        "dsa_indexer_n_heads": 32,
        "dsa_indexer_head_dim": 128,
        "dsa_indexer_topk": 2048,
        "dsa_indexer_loss_coeff": 0.0,
        "context_parallel_size": 2,
        "context_parallel_algo": "kvallgather_cp_algo",
        "moe_grouped_gemm": True,
    }
    assert {key: arguments[key] for key in expected} == expected
    assert "reset_attention_mask" not in arguments, "it would replace our packed sequences"
    rehearsal = repatch_arguments(GLM5, backend({}), "cpu")
    assert rehearsal["use_dsa_absorb"] and not any(rehearsal[name] for name in FUSED_DSA)


def test_batch_invariant_attention_replaces_flash_attention():
    arguments = repatch_arguments(QWEN, backend({"use_flash_attn_npu_batch_invariant": True}), "npu")
    assert arguments["use_flash_attn"] is False


# A MindSpeed of a few lines. It writes down what happens, in order, to the list in the environment's file.
