"""What can be said about a model before vLLM starts: does it fit the kernels, is it the one the trainer has?"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import AutoConfig

from engines.rollout.vllm.arguments import engine_arguments, served_folder
from engines.rollout.vllm.inventory import Delivery, Inventory
from engines.rollout.vllm.pair import check_pair
from engines.rollout.vllm.platform import check_cpu_sizes, cpu_cache_bytes, platform_of
from engines.spec import ModelSpec, RolloutEngineSpec, VllmSpec
from tests.engines.vllm_bench import CHANGES, LONGEST, weights_of, write_model


def spec(folder: str, **changes) -> RolloutEngineSpec:
    return replace(RolloutEngineSpec("vllm", "cpu", ModelSpec(folder), "float32", 16, LONGEST), **changes)


def served(own: RolloutEngineSpec) -> dict:
    """The configuration that vLLM reads."""
    with served_folder(own) as folder:
        return AutoConfig.from_pretrained(folder).to_dict()


@pytest.mark.parametrize("kind", CHANGES)
def test_what_vllm_is_given_is_what_the_trainer_has(tmp_path, kind):
    """Sparse attention is served as the dense DeepSeek inside it: no field that matters changes on the way."""
    own = spec(write_model(tmp_path, kind))
    check_pair(own, served(own), "float32", LONGEST)


@pytest.mark.parametrize(
    "kind, field, value, message",
    [
        ("qwen3", "rms_norm_eps", 1e-5, r"rms_norm_eps is 1e-06 in training, 1e-05 in vLLM"),
        ("qwen3", "head_dim", 64, r"head_dim is 32 in training, 64 in vLLM"),
        ("qwen3", "tie_word_embeddings", True, r"tie_word_embeddings is False in training, True in vLLM"),
        ("qwen3_moe", "num_experts_per_tok", 4, r"num_experts_per_tok is 2 in training, 4 in vLLM"),
        ("deepseek_v3", "routed_scaling_factor", 1.0, r"routed_scaling_factor is 2.5 in training, 1.0 in vLLM"),
        ("deepseek_v3", "kv_lora_rank", 256, r"kv_lora_rank is 512 in training, 256 in vLLM"),
    ],
)
def test_a_field_that_differs_is_named_with_both_values(tmp_path, kind, field, value, message):
    own = spec(write_model(tmp_path, kind))
    with pytest.raises(ValueError, match=message):
        check_pair(own, served(own) | {field: value}, "float32", LONGEST)


def test_rotary_base_dtype_length_and_end_tokens_are_compared_too(tmp_path):
    own = spec(write_model(tmp_path, "qwen3"))
    theirs = served(own)
    theirs["rope_parameters"] = theirs["rope_parameters"] | {"rope_theta": 5e5}
    with pytest.raises(ValueError, match=r"rope_parameters is \{.*\} in training, \{.*500000.*\} in vLLM") as caught:
        check_pair(own, theirs, "bfloat16", 32)
    assert "rollout.dtype is float32, vLLM's bfloat16" in str(caught.value)
    assert "rollout.max_model_len is 192, vLLM's 32" in str(caught.value)
    ended = spec(own.model.path, model=ModelSpec(own.model.path, override_config={"eos_token_id": [2, 130]}))
    with pytest.raises(ValueError, match="eos_token_id 130 is outside the vocabulary of 130"):
        check_pair(ended, served(own), "float32", LONGEST)


def test_names_that_vllm_writes_into_the_rotary_parameters_are_no_difference(tmp_path):
    yarn = dict(rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=64)
    own = spec(write_model(tmp_path, "deepseek_v3"))
    own = replace(own, model=ModelSpec(own.model.path, override_config={"rope_parameters": yarn}))
    theirs = served(own)
    written = theirs["rope_parameters"] | {"rope_type": "deepseek_yarn", "mscale": 1.0}
    check_pair(own, theirs | {"rope_parameters": written}, "float32", LONGEST)
    with pytest.raises(ValueError, match=r"'factor': 4.0.* in training, .*'factor': 8.0"):
        check_pair(own, theirs | {"rope_parameters": written | {"factor": 8.0}}, "float32", LONGEST)


def test_override_config_reaches_vllm(tmp_path):
    own = spec(write_model(tmp_path, "qwen3"))
    own = replace(own, model=ModelSpec(own.model.path, override_config={"rms_norm_eps": 1e-3}))
    with served_folder(own) as folder:
        assert folder != Path(own.model.path)
        assert json.loads((folder / "config.json").read_text())["rms_norm_eps"] == 1e-3
    assert not folder.exists()
    check_pair(own, served(own), "float32", LONGEST)


def test_sparse_attention_longer_than_its_top_k_is_refused_on_cpu(tmp_path):
    own = spec(write_model(tmp_path, "glm_moe_dsa"), max_model_len=LONGEST + 1)
    with pytest.raises(ValueError, match=r"got index_topk=192 and max_model_len=193.*set rollout.name=hf"):
        served(own)


def test_lengths_are_vllms_to_know(tmp_path):
    own = spec(write_model(tmp_path, "qwen3"), max_model_len=None)
    with pytest.raises(ValueError, match=r"got no max_model_len.*set rollout.max_model_len"):
        engine_arguments(own, Path(own.model.path), platform_of("cpu"))


def test_arguments_that_the_adapter_needs_cannot_be_taken_over(tmp_path):
    own = spec(write_model(tmp_path, "qwen3"), engine_kwargs={"load_format": "auto"})
    with pytest.raises(ValueError, match=r"got engine_kwargs.vllm with \['load_format'\]"):
        engine_arguments(own, Path(own.model.path), platform_of("cpu"))
    own = replace(own, engine_kwargs={"compilation_config": {"level": 1}, "block_size": 32})
    got = engine_arguments(own, Path(own.model.path), platform_of("cpu"))
    assert got["compilation_config"] == {"mode": 0, "level": 1}
    assert got["block_size"] == 32 and got["load_format"] == "dummy"


def test_prompts_are_not_cut_in_pieces_on_cpu(tmp_path):
    """A prompt that is cut turns its random stream back, which a CPU generator cannot."""
    own = spec(write_model(tmp_path, "qwen3"), vllm=VllmSpec(max_num_batched_tokens=100))
    got = engine_arguments(own, Path(own.model.path), platform_of("cpu"))
    assert got["enable_chunked_prefill"] is False and got["max_num_batched_tokens"] == LONGEST
    got = engine_arguments(own, Path(own.model.path), platform_of("cuda"))
    assert got["enable_chunked_prefill"] is True and got["max_num_batched_tokens"] == 100


def test_latent_attention_does_without_the_rotary_kernel_and_others_keep_it(tmp_path):
    for kind, expected in (("deepseek_v3", {"mode": 0, "custom_ops": ["-rotary_embedding"]}), ("qwen3", {"mode": 0})):
        own = spec(write_model(tmp_path / kind, kind))
        got = engine_arguments(own, Path(own.model.path), platform_of("cpu"))
        assert got["compilation_config"] == expected


def test_expert_parallelism_is_refused_on_cpu_only(tmp_path):
    own = spec(write_model(tmp_path, "qwen3_moe"), vllm=VllmSpec(tensor_parallel_size=2, expert_parallel_size=2))
    with pytest.raises(ValueError, match=r"got rollout.expert_parallel_size=2 .* on CPU.*set it to 1"):
        engine_arguments(own, Path(own.model.path), platform_of("cpu"))
    got = engine_arguments(own, Path(own.model.path), platform_of("cuda"))
    assert got["enable_expert_parallel"] is True and got["tensor_parallel_size"] == 2


def test_sizes_that_cpu_kernels_do_not_know_are_refused(tmp_path):
    dense = dict(hidden_size=96, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=2)
    with pytest.raises(ValueError, match="head_dim 24; expected one of"):
        check_cpu_sizes(dense, 1)
    experts = dense | dict(head_dim=32, num_experts_per_tok=2, moe_intermediate_size=96)
    check_cpu_sizes(experts, 1)
    with pytest.raises(ValueError, match=r"moe_intermediate_size / tp 48; expected a multiple of 32"):
        check_cpu_sizes(experts, 2)
    with pytest.raises(ValueError, match=r"kv_lora_rank \+ qk_rope_head_dim = 96; expected 576"):
        check_cpu_sizes(dense | dict(kv_lora_rank=64, qk_rope_head_dim=32), 1)


def test_the_cache_holds_every_sequence_at_its_longest():
    fields = dict(hidden_size=4096, num_attention_heads=32, num_key_value_heads=8, head_dim=128, num_hidden_layers=2)
    own = RolloutEngineSpec("vllm", "cpu", ModelSpec("none"), "bfloat16", 31, 1024, vllm=VllmSpec())
    # 33 blocks of 32 tokens each for 32 sequences; keys and values of 8 heads of 128 in 2 bytes, 2 layers
    assert cpu_cache_bytes(own, fields) == 33 * 32 * 32 * (2 * 8 * 128) * 2 * 2
    halved = replace(own, vllm=VllmSpec(tensor_parallel_size=2))
    assert cpu_cache_bytes(halved, fields | dict(num_hidden_layers=8)) == 2 * cpu_cache_bytes(own, fields)
    assert cpu_cache_bytes(replace(own, max_num_seqs=1), fields) == 2**28
    larger = replace(own, engine_kwargs={"block_size": 128})
    assert cpu_cache_bytes(larger, fields) == 9 * 128 * 32 * (2 * 8 * 128) * 2 * 2


def test_a_delivery_names_what_does_not_fit_and_hands_on_the_rest(tmp_path):
    folder = write_model(tmp_path, "qwen3_tied")
    weights, inventory = weights_of(folder), Inventory(ModelSpec(folder))
    name = "model.layers.2.mlp.up_proj.weight"
    long = weights[name].new_zeros(130, 128)
    stream = [*(weights | {name: long}).items(), ("model.nope", long), (name, weights[name])]
    delivery = Delivery(inventory, stream)
    handed = dict(delivery)
    assert handed.keys() == weights.keys() - {name}
    assert all(handed[n].data_ptr() != t.data_ptr() for n, t in weights.items() if n != name), "a copy, not a view"
    with pytest.raises(ValueError, match=rf"missing \[\], doubled \['{name}'\] and unknown \['model.nope'\]"):
        delivery.check("here")
    delivery = Delivery(inventory, (weights | {name: long}).items())
    delivery.drain()
    with pytest.raises(ValueError, match=rf"unusable tensors \{{'{name}': '\(130, 128\), expected \(128, 128\)'\}}"):
        delivery.check("here")


def test_a_tied_head_may_come_along_when_it_is_the_embedding(tmp_path):
    folder = write_model(tmp_path, "qwen3_tied")
    weights, inventory = weights_of(folder), Inventory(ModelSpec(folder))
    embedding = weights["model.embed_tokens.weight"]
    head = ("lm_head.weight", embedding)
    for stream in ([*weights.items(), head], [head, *weights.items()]):
        delivery = Delivery(inventory, stream)
        assert dict(delivery).keys() == weights.keys()
        delivery.check("here")
    delivery = Delivery(inventory, [*weights.items(), ("lm_head.weight", embedding + 1)])
    delivery.drain()
    with pytest.raises(ValueError, match=r"lm_head.weight': 'not equal to model.embed_tokens.weight"):
        delivery.check("here")
    delivery = Delivery(inventory, [*weights.items(), head, head])
    delivery.drain()
    with pytest.raises(ValueError, match=r"doubled \['lm_head.weight'\]"):
        delivery.check("here")
