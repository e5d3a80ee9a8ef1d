"""Config mapping of the mixture-of-experts and latent-attention families, their refusals, and the router's rule."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from engines.megatron.build import read_hf_config, transformer_config
from engines.megatron.layers.moe import top_experts
from engines.megatron.layers.options import AttentionOptions, IndexerOptions
from engines.megatron.rope import inverse_frequencies, latent_rope_fields
from engines.spec import MegatronSpec, ModelSpec
from tests.tiny import MOE_KINDS, tiny_config

YARN = dict(rope_type="yarn", rope_theta=1e4, factor=40.0, original_max_position_embeddings=64)


def _model(tmp_path, kind, without=(), **changes):
    """A folder with the tiny config.json, some keys changed or absent."""
    values = json.loads(tiny_config(kind).to_json_string()) | changes
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in values.items() if k not in without}))
    return ModelSpec(str(tmp_path))


def _config(tmp_path, kind, backend=None, **changes):
    model = _model(tmp_path, kind, **changes)
    return transformer_config(read_hf_config(model), model, backend or MegatronSpec(), "cpu")


def _values(config, names):
    return {name: vars(config)[name] for name in names.split()}


@pytest.mark.parametrize("kind", MOE_KINDS)
def test_nothing_balances_experts_and_nothing_is_left_to_defaults_that_lie(tmp_path, kind):
    config = _config(tmp_path, kind)
    names = "moe_router_load_balancing_type moe_aux_loss_coeff moe_router_bias_update_rate moe_token_dispatcher_type"
    assert list(_values(config, names).values()) == ["none", 0.0, 0.0, "alltoall"]
    assert (config.num_moe_experts, config.moe_ffn_hidden_size, config.ffn_hidden_size) == (8, 44, 104)
    assert (config.normalization, config.gated_linear_unit, config.add_bias_linear) == ("RMSNorm", True, False)
    assert (config.layernorm_epsilon, config.hidden_dropout, config.attention_dropout) == (1e-6, 0.0, 0.0)
    assert config.multi_latent_attention == (kind not in ("qwen3_moe", "glm4_moe"))
    assert config.expert_tensor_parallel_size == 1  # Megatron's default would be the tensor-parallel size


def test_softmax_families(tmp_path):
    names = "moe_router_score_function moe_router_dtype moe_router_pre_softmax moe_router_topk moe_layer_freq"
    config = _config(tmp_path, "qwen3_moe", num_hidden_layers=4, mlp_only_layers=[3], decoder_sparse_step=2)
    assert list(_values(config, names).values()) == ["softmax", None, False, 2, [0, 1, 0, 0]]
    assert config.qk_layernorm and not config.add_qkv_bias and config.kv_channels == 24
    assert not config.moe_router_enable_expert_bias and config.moe_shared_expert_intermediate_size is None
    assert _config(tmp_path, "qwen3_moe", without=["norm_topk_prob"]).moe_router_pre_softmax  # as transformers takes it


def test_sigmoid_families(tmp_path):
    names = "moe_router_score_function moe_router_dtype moe_router_topk moe_router_topk_scaling_factor moe_layer_freq"
    config = _config(tmp_path, "deepseek_v3")
    assert list(_values(config, names).values()) == ["sigmoid", "fp32", 4, 2.5, [0, 1, 1]]
    assert (config.moe_router_num_groups, config.moe_router_group_topk) == (4, 2)
    assert config.moe_router_enable_expert_bias and config.moe_shared_expert_intermediate_size == 44
    ungrouped = _config(tmp_path, "glm4_moe", attention_bias=False, use_qk_norm=None, n_shared_experts=0)
    assert (ungrouped.moe_router_num_groups, ungrouped.moe_router_group_topk) == (None, None)
    assert not ungrouped.add_qkv_bias and not ungrouped.qk_layernorm
    assert ungrouped.moe_shared_expert_intermediate_size is None
    listed = _config(tmp_path, "glm_moe_dsa", mlp_layer_types=["dense", "dense", "sparse"], first_k_dense_replace=2)
    assert listed.moe_layer_freq == [0, 0, 1]


def test_latent_attention_and_indexers(tmp_path):
    config = _config(tmp_path, "deepseek_v3")
    names = "q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim qk_layernorm rotary_interleaved"
    assert list(_values(config, names).values()) == [36, 22, 12, 8, 28, True, False]
    assert config.attention_options == AttentionOptions()
    assert _config(tmp_path, "deepseek_v3", q_lora_rank=None).q_lora_rank is None
    changes = dict(indexer_types=None, index_topk_freq=2, index_skip_topk_offset=2, num_hidden_layers=4)
    backend = MegatronSpec(mla_absorb=True, indexer_loss_coeff=0.5, indexer_k_norm_eps=1e-5)
    changes |= dict(mlp_layer_types=["dense"] + ["sparse"] * 3)
    shared = _config(tmp_path, "glm_moe_dsa", backend, **changes)
    indexer = IndexerOptions(16, 20, 4, True, (True, True, False, True), k_norm_eps=1e-5, loss_coeff=0.5)
    assert shared.attention_options == AttentionOptions(absorb=True, indexer=indexer)


@pytest.mark.parametrize("kind,interleaved", [("glm_moe_dsa", True), ("deepseek_v32", False)])
def test_indexer_pairs_where_the_file_does_not_say(tmp_path, kind, interleaved):
    options = _config(tmp_path, kind, without=["indexer_rope_interleave"]).attention_options
    assert options.indexer.rope_interleaved is interleaved
    assert options.indexer.full_layers == (True, True, True)


@pytest.mark.parametrize(
    "kind,changes,message",
    [
        ("deepseek_v3", {"num_experts": 4}, r"expected one number of experts"),
        ("glm_moe_dsa", {"mlp_layer_types": ["dense", "dense", "sparse"]}, "mlp_layer_types"),
        ("deepseek_v3", {"rope_theta": 8e6}, "expected one value"),
        ("deepseek_v3", {"rope_interleave": False}, "rope_interleave"),
        ("glm4_moe", {"norm_topk_prob": False}, "norm_topk_prob"),
        ("glm4_moe", {"scoring_func": "softmax"}, "scoring_func"),
        ("glm_moe_dsa", {"attention_bias": True}, "attention_bias"),
        ("qwen3_moe", {"attention_bias": True}, "attention_bias"),
        ("deepseek_v32", {"index_topk_freq": 4}, "index_topk_freq"),
        ("deepseek_v3", {"rope_parameters": {**YARN, "attention_factor": 1.5}}, "attention_factor"),
        ("deepseek_v3", {"rope_parameters": {**YARN, "mscale_all_dim": 1.0}}, "mscale wherever"),
        (
            "deepseek_v3",
            {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}},
            "expected one of default, yarn",
        ),
        ("qwen3_moe", {"without": ["num_local_experts", "num_experts"]}, "num_experts or n_routed_experts"),
        ("deepseek_v32", {"without": ["index_topk", "kv_lora_rank"]}, "without kv_lora_rank, index_topk"),
    ],
)
def test_contradictions_and_what_would_be_computed_differently_are_refused(tmp_path, kind, changes, message):
    with pytest.raises(ValueError, match=message):
        _config(tmp_path, kind, **changes)


@pytest.mark.parametrize(
    "kind,backend,message",
    [
        ("qwen3_moe", dict(expert_model_parallel_size=3), "number of experts=8 with expert_model_parallel_size=3"),
        ("glm4_moe", dict(expert_tensor_parallel_size=3), "moe_intermediate_size=44 with expert_tensor_parallel_size"),
        ("deepseek_v3", dict(tensor_model_parallel_size=2, sequence_parallel=False), "set sequence_parallel=true"),
        ("qwen3_moe", dict(override_transformer_config={"moe_aux_loss_coeff": 0.1}), "moe_aux_loss_coeff"),
        ("qwen3_moe", dict(override_transformer_config={"q_lora_rank": 4}), "a field of Megatron's TransformerConfig"),
    ],
)
def test_impossible_splits_and_overrides_name_the_setting(tmp_path, kind, backend, message):
    with pytest.raises(ValueError, match=message):
        _config(tmp_path, kind, MegatronSpec(**backend))


def test_plain_rotary_embeddings_of_latent_attention_do_not_scale_the_softmax():
    """Megatron multiplies by (0.1 mscale_all_dim ln(rotary_scaling_factor) + 1)^2 whatever the rope type."""
    plain = {"rope_type": "default", "rope_theta": 8e6, "mscale_all_dim": 1.0, "factor": 40.0}
    fields = latent_rope_fields({"rope_parameters": plain, "max_position_embeddings": 256})
    assert (fields["rope_type"], fields["rotary_base"], fields["rotary_scaling_factor"]) == ("rope", 8e6, 1.0)
    assert fields["mscale_all_dim"] == 0.0
    yarn = latent_rope_fields(
        {"rope_theta": 1e4, "rope_scaling": {**YARN, "mscale": 0.7}, "max_position_embeddings": 9}
    )
    names = ("rope_type", "rotary_scaling_factor", "original_max_position_embeddings", "beta_fast", "mscale")
    assert [yarn[name] for name in names] == ["yarn", 40.0, 64, 32.0, 1.0]  # mscale counts only with mscale_all_dim


def test_partly_rotated_heads_have_transformers_frequencies(tmp_path):
    hf = read_hf_config(_model(tmp_path, "glm4_moe"))
    expected = AutoModelForCausalLM.from_config(tiny_config("glm4_moe")).model.rotary_emb.inv_freq
    assert expected.shape == (6,)  # half of 24 dimensions, in pairs
    assert torch.equal(inverse_frequencies(hf, 24, share=0.5), expected)


def test_groups_are_ranked_by_their_two_best_experts():
    """Group 0 has the best expert, groups 1 and 2 the best pairs; mcore's rule (K // group_topk = 1) would take 0."""
    ranking = torch.tensor([[0.9, -5.0, 0.5, 0.6, 0.7, 0.65, -1.0, -2.0]])
    values, chosen = top_experts(ranking, topk=3, num_groups=4, group_topk=2)
    assert chosen.tolist() == [[4, 5, 3]] and torch.equal(values, ranking[:, [4, 5, 3]])
    assert top_experts(ranking, topk=3)[1].tolist() == [[0, 4, 5]]


def test_experts_of_dropped_groups_lose_even_to_negative_ones():
    values, chosen = top_experts(torch.tensor([[-3.0, -1.0, -4.0, -5.0]]), topk=2, num_groups=2, group_topk=1)
    assert chosen.tolist() == [[1, 0]] and values.tolist() == [[-1.0, -3.0]]
