"""One rank: files written by transformers in, tensors equal to the reference, the same files out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from bridge import Bridge, Groups, HfWriter, Layout
from tests.bridge.fake import dense_config, live_reference, module_tree, random_weights, write_folder
from tests.bridge.reference import logits
from tests.tiny import KINDS, write_tiny_model


def single(config: dict, chunk: torch.nn.Module, **options: int) -> Bridge:
    return Bridge(config, [chunk], Layout(), Groups(), [0], **options)


def fake_model(config: dict, hf: dict[str, Tensor], fused_norms: bool = False, dtype: torch.dtype | None = None):
    reference = live_reference(config, hf, fused_norms=fused_norms)
    return module_tree(reference, dtype), reference


def tiny(folder: Path, kind: str, **changes: object) -> tuple[dict, dict[str, Tensor]]:
    """config.json and tensors of a model saved by transformers."""
    write_tiny_model(folder, kind, **changes)
    config = json.loads((folder / "config.json").read_text())
    config.setdefault("head_dim", config["hidden_size"] // config["num_attention_heads"])
    return config, load_file(folder / "model.safetensors")


def export(bridge: Bridge) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in bridge.hf_weights()}


def assert_same(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    assert [name for name in got if not torch.equal(got[name], want[name])] == []


@pytest.mark.parametrize("fused_norms", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_transformers_file_round_trips_bit_equal(tmp_path, kind, fused_norms):
    config, hf = tiny(tmp_path, kind)
    chunk, reference = fake_model(config, hf, fused_norms)
    bridge = single(config, chunk)
    report = bridge.load(tmp_path)
    assert_same(dict(chunk.named_parameters()), reference)
    assert report.bytes_read == sum(tensor.numel() * 4 for tensor in hf.values())
    assert report.rounding is None
    assert_same(export(bridge), hf)


@pytest.mark.parametrize("square", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_logits_equal_transformers(tmp_path, kind, square):
    """Square matrices too: there a transposed weight has a legal shape."""
    sizes = {"hidden_size": 96, "intermediate_size": 96} if square else {}
    config, hf = tiny(tmp_path, kind, **sizes)
    chunk, _ = fake_model(config, hf)
    single(config, chunk).load(tmp_path)
    tokens = torch.randint(0, 130, (24,), generator=torch.Generator().manual_seed(1))
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.no_grad():
        want = model(tokens[None]).logits[0]
        got = logits(dict(chunk.named_parameters()), config, tokens)
    assert want.abs().max() > 0.5
    assert (got - want).abs().max() < 1e-5


@pytest.mark.parametrize("kind", ["llama", "qwen3_tied"])
def test_exported_folder_loads_without_missing_or_unexpected_keys(tmp_path, kind):
    config, hf = tiny(tmp_path / "source", kind)
    chunk, _ = fake_model(config, hf, dtype=torch.bfloat16)
    bridge = single(config, chunk)
    bridge.load(tmp_path / "source")
    with HfWriter(tmp_path / "out", tmp_path / "source", max_shard_bytes=200_000) as writer:
        for name, tensor in bridge.hf_weights():
            writer.add(name, tensor)
    assert (tmp_path / "out" / "model.safetensors.index.json").is_file()
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    assert model.config.vocab_size == 130 == model.get_output_embeddings().weight.shape[0]
    state = model.state_dict()
    assert all(torch.equal(state[name], tensor.bfloat16().float()) for name, tensor in hf.items())


def test_tied_file_may_repeat_its_head_but_not_bring_another(tmp_path):
    config = dense_config(tied=True)
    hf = random_weights(config)
    chunk, reference = fake_model(config, hf)
    bridge = single(config, chunk)
    head = hf["model.embed_tokens.weight"].clone()
    bridge.load(write_folder(tmp_path, config, {**hf, "lm_head.weight": head}))
    assert_same(dict(chunk.named_parameters()), reference)
    assert_same(export(bridge), hf)  # the embedding once, no head
    head[129, 79] += 1
    with pytest.raises(ValueError, match=r"lm_head\.weight different from model\.embed_tokens\.weight"):
        bridge.load(write_folder(tmp_path, config, {**hf, "lm_head.weight": head}))


def test_virtual_stages_and_wrappers_use_global_layer_numbers(tmp_path):
    config = dense_config(num_hidden_layers=5)
    hf = random_weights(config)
    write_folder(tmp_path, config, hf)
    first = live_reference(config, hf, layers=range(2), last=False)
    second = live_reference(config, hf, layers=range(2, 5), first=False)
    chunks = [torch.nn.Sequential(), torch.nn.Sequential()]
    for wrapper, reference in zip(chunks, (first, second), strict=True):
        wrapper.module = torch.nn.Sequential()
        wrapper.module.module = module_tree(reference)
        wrapper.module.module.register_buffer("rotary_pos_emb_cache", torch.ones(3))
    bridge = Bridge(config, chunks, Layout(vpp=2), Groups(), [0, 2])
    bridge.load(tmp_path)
    for wrapper, reference in zip(chunks, (first, second), strict=True):
        assert_same(dict(wrapper.module.module.named_parameters()), reference)
        assert wrapper.module.module.rotary_pos_emb_cache.tolist() == [1, 1, 1]
    assert_same(export(bridge), hf)


def test_loading_casts_to_the_live_dtype_and_reports_the_largest_rounding(tmp_path):
    config = dense_config()
    hf = {name: tensor.bfloat16().float() for name, tensor in random_weights(config).items()}
    hf["model.layers.1.mlp.up_proj.weight"][3, 5] = 1 + 2**-9  # bf16 has 8 bits: rounds to 1
    chunk, reference = fake_model(config, hf, dtype=torch.bfloat16)
    report = single(config, chunk).load(write_folder(tmp_path, config, hf))
    assert report.rounding == ("model.layers.1.mlp.up_proj.weight", 2**-9)
    assert_same(dict(chunk.named_parameters()), {name: tensor.bfloat16() for name, tensor in reference.items()})


def test_a_nan_in_the_file_is_named_and_leaves_the_model_unusable(tmp_path):
    config = dense_config()
    hf = random_weights(config)
    good = write_folder(tmp_path / "good", config, hf)
    chunk, _ = fake_model(config, hf)
    bridge = single(config, chunk)
    bad = {**hf, "model.norm.weight": torch.full((80,), float("nan"))}
    with pytest.raises(ValueError, match=r"decoder\.final_layernorm\.weight: holds NaN"):
        bridge.load(write_folder(tmp_path / "bad", config, bad))
    with pytest.raises(ValueError, match="incomplete"):
        next(bridge.hf_weights())
    bridge.load(good)
    assert_same(export(bridge), hf)


def test_nothing_is_written_when_the_folder_does_not_fit(tmp_path):
    config = dense_config()
    hf = random_weights(config)
    chunk, reference = fake_model(config, hf)
    bridge = single(config, chunk)
    bridge.load(write_folder(tmp_path / "good", config, hf))
    other = random_weights(dense_config(intermediate_size=112), seed=1)
    with pytest.raises(
        ValueError, match=r"9 problem\(s\)[^$]*down_proj\.weight: shape \[80, 112\], expected \[80, 104\]"
    ):
        bridge.load(write_folder(tmp_path / "bad", config, other))
    assert_same(dict(chunk.named_parameters()), reference)


def test_a_model_changed_after_planning_is_refused(tmp_path):
    config = dense_config()
    chunk, _ = fake_model(config, random_weights(config))
    bridge = single(config, chunk)
    chunk.to(torch.bfloat16)
    with pytest.raises(ValueError, match=r"changed live tensors .*linear_qkv\.weight"):
        next(bridge.hf_weights())


def test_one_rank_exports_by_reference_where_it_can(tmp_path):
    config = dense_config()
    hf = random_weights(config)
    chunk, _ = fake_model(config, hf)
    bridge = single(config, chunk)
    bridge.load(write_folder(tmp_path, config, hf))
    storages = {p.untyped_storage().data_ptr() for p in chunk.parameters()}
    copied = {n.split(".")[-2] for n, t in bridge.hf_weights() if t.untyped_storage().data_ptr() not in storages}
    assert copied == {"q_proj", "k_proj", "v_proj"}  # the only sources that do not lie in one piece


def test_export_of_changed_weights_follows_the_live_model(tmp_path):
    config = dense_config("qwen2")
    hf = random_weights(config)
    chunk, _ = fake_model(config, hf)
    bridge = single(config, chunk)
    bridge.load(write_folder(tmp_path, config, hf))
    assert_same(export(bridge), hf)
    with torch.no_grad():
        for parameter in chunk.parameters():
            parameter.mul_(2)
    assert_same(export(bridge), {name: tensor * 2 for name, tensor in hf.items()})
