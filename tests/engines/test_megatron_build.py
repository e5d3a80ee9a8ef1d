"""Config mapping: what is read, what is refused, and rotary frequencies equal to transformers'."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from engines.megatron.build import padded_vocab_size, read_hf_config, transformer_config
from engines.megatron.rope import inverse_frequencies, rope_base
from engines.spec import MegatronSpec, ModelSpec
from tests.tiny import tiny_config

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def _spec(tmp_path, kind="llama", **changes):
    values = json.loads(tiny_config(kind).to_json_string()) | changes
    (tmp_path / "config.json").write_text(json.dumps(values))
    return ModelSpec(str(tmp_path))


def _config(tmp_path, backend, **changes):
    model = _spec(tmp_path, **changes)
    return transformer_config(read_hf_config(model), model, backend, "cpu")


def test_sizes_come_from_the_model_and_overrides_win(tmp_path):
    backend = MegatronSpec(
        dtype="float32",
        override_transformer_config={
            "recompute_granularity": "selective",
            "normalization": "RMSNorm",  # repeats what is derived
            "kv_channels": None,
        },
    )
    config = _config(tmp_path, backend, kind="qwen2", num_hidden_layers=4)
    assert (config.num_layers, config.hidden_size, config.ffn_hidden_size) == (4, 80, 104)
    assert (config.num_attention_heads, config.num_query_groups, config.kv_channels) == (4, 2, 20)
    assert config.add_qkv_bias and not config.qk_layernorm and not config.add_bias_linear
    assert config.recompute_granularity == "selective"
    assert not config.sequence_parallel  # asked for, but there is one tensor-parallel rank


@pytest.mark.parametrize(
    "key,value",
    [("calculate_per_token_loss", False), ("layernorm_epsilon", 1e-3), ("hidden_dropout", 0.1), ("num_layers", 2)],
)
def test_what_the_numbers_rest_on_cannot_be_overridden(tmp_path, key, value):
    with pytest.raises(ValueError, match=rf"override_transformer_config\.{key}; expected the value that the engine"):
        _config(tmp_path, MegatronSpec(override_transformer_config={key: value}))


def test_gradient_checkpointing_means_full_recomputation(tmp_path):
    model = ModelSpec(_spec(tmp_path).path, gradient_checkpointing=True)
    config = transformer_config(read_hf_config(model), model, MegatronSpec(), "cpu")
    assert (config.recompute_granularity, config.recompute_method, config.recompute_num_layers) == (
        "full",
        "uniform",
        1,
    )


@pytest.mark.parametrize(
    "tp, divisor, expected",
    [(1, 8, 136), (2, 8, 144), (2, 1, 130), (4, 64, 256)],
)
def test_vocabulary_is_padded_to_divisor_times_tensor_ranks(tmp_path, tp, divisor, expected):
    backend = MegatronSpec(tensor_model_parallel_size=tp, make_vocab_size_divisible_by=divisor)
    assert padded_vocab_size(read_hf_config(_spec(tmp_path)), backend) == expected


@pytest.mark.parametrize(
    "overrides, message",
    [
        ({"recompute_granularty": "full"}, "such as recompute_granularity"),
        ({"sequence_parallel": True}, "set sequence_parallel instead"),
        ({"bf16": False}, "set dtype instead"),
    ],
)
def test_override_keys_are_checked(tmp_path, overrides, message):
    with pytest.raises(ValueError, match=message):
        _config(tmp_path, MegatronSpec(override_transformer_config=overrides))


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"model_type": "gpt2"}, "got model_type 'gpt2'"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"kind": "qwen2", "use_sliding_window": True}, "use_sliding_window"),
        ({"kind": "qwen3", "attention_bias": True}, "attention_bias"),
    ],
)
def test_options_megatron_would_ignore_are_refused(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        read_hf_config(_spec(tmp_path, **changes))


@pytest.mark.parametrize(
    "backend, message",
    [
        (MegatronSpec(tensor_model_parallel_size=3), "num_attention_heads=4 with tensor_model_parallel_size=3"),
        (MegatronSpec(pipeline_model_parallel_size=2), "num_layers_in_first_pipeline_stage"),
        (MegatronSpec(dtype="float16"), "got dtype 'float16'"),
        (MegatronSpec(expert_model_parallel_size=2), "for llama, which has no experts"),
    ],
)
def test_impossible_splits_name_the_setting(tmp_path, backend, message):
    with pytest.raises(ValueError, match=message):
        _config(tmp_path, backend)


@pytest.mark.parametrize("rope", [{"rope_type": "default", "rope_theta": 1e6}, LLAMA3])
def test_frequencies_equal_transformers(rope):
    config = tiny_config("llama", rope_parameters=rope, head_dim=128)
    model = AutoModelForCausalLM.from_config(config)
    hf = json.loads(config.to_json_string())
    assert torch.equal(inverse_frequencies(hf, 128), model.model.rotary_emb.inv_freq)
    flat = {"rope_theta": rope["rope_theta"], "rope_scaling": {k: v for k, v in rope.items() if k != "rope_theta"}}
    assert torch.equal(inverse_frequencies(flat, 128), model.model.rotary_emb.inv_freq)
    assert rope_base(flat) == rope["rope_theta"]


@pytest.mark.parametrize(
    "hf, message",
    [
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}}, "rope type 'yarn'"),
        ({"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 2.0}}, "rope type 'linear'"),
        ({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e6}}, "expected one value"),
        ({"rope_theta": 1e4, "rope_scaling": {"factor": 2.0}, "rope_parameters": {"factor": 4.0}}, "got factor=2.0"),
        ({"rope_parameters": {"rope_theta": 1e6, "partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5"),
        ({"rope_parameters": {"rope_type": "default"}}, "without rope_theta"),
    ],
)
def test_other_rotary_embeddings_are_refused(hf, message):
    with pytest.raises(ValueError, match=message):
        inverse_frequencies(hf, 16)
