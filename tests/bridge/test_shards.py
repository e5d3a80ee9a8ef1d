"""Every family through every layout on disk: each rank's file as the reference, and the checkpoint back bit for bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from bridge.live import global_name
from bridge.offline import OfflineModel
from bridge.predict import Form
from bridge.shards import Manifest, ShardSource, write_shards
from bridge.shards.manifest import file_name
from bridge.source import open_source
from tests.bridge.families import CONFIGS, config_of, expected, plan, random_weights

# layout -> sizes, and the layers of each stage; layer 1 of glm_moe_dsa uses the indexer of layer 0
LAYOUTS = {
    "tp1": {},
    "tp2": {"tp": 2},
    "tp4": {"tp": 4},
    "pp2": {"pp": 2, "layers": [2, 2]},
    "pp3_uneven": {"pp": 3, "layers": [2, 1, 1]},
    "vpp2": {"pp": 2, "vpp": 2, "layers": [2, 1, 1, 0]},
    "ep2": {"ep": 2},
    "ep4": {"ep": 4},
    "tp2_ep2": {"tp": 2, "ep": 2},
    "etp2": {"tp": 2, "etp": 2},
    "tp2_pp2_ep2_etp2": {"tp": 2, "pp": 2, "ep": 2, "etp": 2, "layers": [2, 2]},
    "tp4_ep2": {"tp": 4, "ep": 2},
}
LATENT = ("deepseek_v3", "deepseek_v32", "glm_moe_dsa")
EXPERTS = [family for family in CONFIGS if family not in ("llama", "qwen2", "qwen3")]


def write_source(folder: Path, config: dict, weights: dict[str, Tensor]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def check(folder: Path, model: OfflineModel) -> None:
    """Forward against the reference, and back."""
    hf = random_weights(model)
    source = write_source(folder / "hf", model.config, hf)
    manifest = write_shards(model, open_source(source), folder / "mcore").manifest
    assert len(manifest.ranks) == model.sizes.stage_ranks * model.sizes.pp
    for rank in model.ranks():
        held = load_file(folder / "mcore" / file_name(rank))
        keys = {tensor.key: tensor.placed.live.name for tensor in model.tensors(rank.pp_rank)}
        assert held.keys() == keys.keys()
        for key, name in keys.items():
            want = expected(model, hf, rank, name, model.dtype)
            assert torch.equal(held[key], want), f"{rank}: {name}"
    back = ShardSource(folder / "mcore")
    assert set(back.names()) == hf.keys()
    for name, tensor in hf.items():
        assert back.dtype(name) == tensor.dtype and torch.equal(back.read(name), tensor), name


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        (family, layout)
        for family in CONFIGS
        for layout, sizes in LAYOUTS.items()
        if family in EXPERTS or not {"ep", "etp"} & set(sizes)
    ],
)
def test_every_family_and_layout_round_trips(tmp_path, family, layout):
    sizes, config = LAYOUTS[layout], config_of(family)
    mtp = "num_nextn_predict_layers" in config
    check(tmp_path, plan(config, Form(mtp=mtp, absorb=family in LATENT, vocab_multiple=8), **sizes))


@pytest.mark.parametrize(
    ("family", "form"),
    [
        ("qwen2", Form(fused_norms=True)),
        ("glm4_moe", Form(fused_norms=True, experts="grouped", mtp=True, mtp_inner="mtp_model_layer.")),
        ("deepseek_v3", Form(fused_norms=True, whole_down=True)),
        ("glm_moe_dsa", Form(experts="grouped", whole_down=True, absorb=True)),
    ],
)
def test_other_spellings_round_trip(tmp_path, family, form):
    config = config_of(family, num_nextn_predict_layers=int(form.mtp))
    sizes = {} if family == "qwen2" else {"ep": 2}
    check(tmp_path, plan(config, form, tp=2, **sizes))


def test_latent_attention_without_a_query_latent_round_trips(tmp_path):
    config = config_of("deepseek_v3", q_lora_rank=None)
    for number, form in enumerate((Form(mtp=True), Form(mtp=True, fused_norms=True))):
        model = plan(config, form, tp=2)
        assert not any("q_down" in tensor.key or "q_layernorm" in tensor.key for tensor in model.tensors(0))
        check(tmp_path / str(number), model)


HEADS = st.sampled_from([(4, 4), (4, 2), (4, 1), (8, 2), (6, 3), (2, 1)])


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_dimensions_round_trip(tmp_path_factory, data):
    """Head counts, head sizes with dn below and above dv, odd vocabularies, tied and untied."""
    family = data.draw(st.sampled_from(sorted(CONFIGS)))
    heads, groups = data.draw(HEADS)
    tp = data.draw(st.sampled_from([n for n in (1, 2, 4) if heads % n == 0 and (n % groups == 0 or groups % n == 0)]))
    changes: dict = {
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "vocab_size": data.draw(st.integers(1, 40)),
        "tie_word_embeddings": data.draw(st.booleans()),
        "hidden_size": data.draw(st.sampled_from([4, 12])),
        "intermediate_size": data.draw(st.sampled_from([4, 20])),
        "num_hidden_layers": 2,
        "mlp_only_layers": [],
    }
    if "head_dim" in CONFIGS[family]:
        changes["head_dim"] = data.draw(st.sampled_from([4, 12]))
    if family in LATENT:
        changes |= {
            name: data.draw(st.sampled_from([4, 8, 12]))
            for name in ("qk_nope_head_dim", "v_head_dim", "q_lora_rank", "kv_lora_rank", "qk_rope_head_dim")
        }
    sizes = {"tp": tp, "pp": data.draw(st.sampled_from([1, 2]))}
    if family in EXPERTS:
        changes["moe_intermediate_size"] = data.draw(st.sampled_from([4, 8]))
        sizes |= {"ep": data.draw(st.sampled_from([1, 2, 4])), "etp": data.draw(st.sampled_from([1, 2]))}
    if family == "glm_moe_dsa":
        changes["indexer_types"] = ["full", "full"]
    config = config_of(family, **changes)
    form = Form(
        mtp="num_nextn_predict_layers" in config, absorb=family in LATENT and data.draw(st.booleans()), vocab_multiple=8
    )
    check(tmp_path_factory.mktemp("any"), plan(config, form, **sizes))


def test_expert_e_comes_back_as_e_once_under_any_layout(tmp_path):
    config = config_of("qwen3_moe", mlp_only_layers=[])
    names = {}
    for number, (tp, ep, etp) in enumerate([(1, 1, 1), (1, 2, 1), (1, 4, 1), (2, 2, 1), (2, 1, 2), (2, 4, 2)]):
        model = plan(config, tp=tp, ep=ep, etp=etp)
        hf = random_weights(model)
        for name, tensor in hf.items():
            if ".experts." in name:
                tensor.fill_(int(name.split(".experts.")[1].split(".")[0]))
        source = open_source(write_source(tmp_path / f"{number}", config, hf))
        write_shards(model, source, tmp_path / f"out{number}")
        back = ShardSource(tmp_path / f"out{number}")
        names[number] = [name for name in back.names() if ".experts." in name]
        assert len(names[number]) == len(set(names[number])) == 4 * 8 * 3
        for name in names[number]:
            assert (back.read(name) == int(name.split(".experts.")[1].split(".")[0])).all()


def test_a_13_token_vocabulary_is_padded_to_16_and_comes_back_as_13(tmp_path):
    model = plan(config_of("llama", vocab_size=13), tp=2)
    check(tmp_path, model)
    shards = [load_file(tmp_path / "mcore" / file_name(rank))["output_layer.weight"] for rank in model.ranks()]
    assert [len(shard) for shard in shards] == [8, 8] and (shards[1][5:] == 0).all()
    assert ShardSource(tmp_path / "mcore").shape("lm_head.weight") == (13, 80)


def test_correction_bias_keeps_float32_values_that_bfloat16_merges(tmp_path):
    model = plan(config_of("deepseek_v3"), ep=2)
    hf = random_weights(model)
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    hf[name][:3] = torch.tensor([5.0, 5.003, 5.01])
    write_shards(model, open_source(write_source(tmp_path / "hf", model.config, hf)), tmp_path / "mcore")
    back = ShardSource(tmp_path / "mcore").read(name)
    assert back.dtype == torch.float32 and torch.equal(back, hf[name]) and len(set(back[:3].tolist())) == 3


def test_a_wide_source_is_rounded_once_and_reported(tmp_path):
    model = plan(config_of("qwen3_moe"))
    hf = random_weights(model)
    router = "model.layers.0.mlp.gate.weight"
    hf[router] = hf[router].float()
    hf[router][0, 0] = 1 + 2**-9
    result = write_shards(model, open_source(write_source(tmp_path / "hf", model.config, hf)), tmp_path / "mcore")
    assert result.rounding == (router, 2**-9)
    back = ShardSource(tmp_path / "mcore")
    assert back.dtype(router) == torch.float32 and float(back.read(router)[0, 0]) == 1.0


def test_an_interrupted_conversion_goes_on_and_keeps_finished_files(tmp_path, monkeypatch):
    model = plan(config_of("llama"), tp=2, pp=2)
    hf = random_weights(model)
    source = write_source(tmp_path / "hf", model.config, hf)
    written: list[str] = []
    from bridge.shards import write as module

    real = module._write_file

    def fails_at_third(path, *args):
        if len(written) == 2:
            raise OSError("disk full")
        written.append(path.name)
        return real(path, *args)

    monkeypatch.setattr(module, "_write_file", fails_at_third)
    with pytest.raises(OSError, match="disk full"):
        write_shards(model, open_source(source), tmp_path / "out")
    assert not (tmp_path / "out" / "manifest.json").exists()
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == 2
    with pytest.raises(ValueError, match=r"without manifest\.json"):
        ShardSource(tmp_path / "out")
    monkeypatch.setattr(module, "_write_file", real)
    with pytest.raises(ValueError, match="unfinished conversion of another layout or source"):
        write_shards(plan(config_of("llama"), tp=1, pp=2), open_source(source), tmp_path / "out")
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("*.safetensors")}
    write_shards(model, open_source(source), tmp_path / "out")
    after = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("*.safetensors")}
    assert len(after) == 4 and {name: after[name] for name in before} == before
    assert sorted(path.name for path in (tmp_path / "out").iterdir() if path.name.startswith(".")) == []
    back = ShardSource(tmp_path / "out")
    assert all(torch.equal(back.read(name), tensor) for name, tensor in hf.items())


@pytest.mark.parametrize("damage", ["truncated", "changed", "missing"])
def test_damaged_shards_are_named(tmp_path, damage):
    model = plan(config_of("llama"), tp=2)
    source = write_source(tmp_path / "hf", model.config, random_weights(model))
    write_shards(model, open_source(source), tmp_path / "out")
    victim = tmp_path / "out" / Manifest.read(tmp_path / "out").ranks[1]["file"]
    data = bytearray(victim.read_bytes())
    if damage == "missing":
        victim.unlink()
    else:
        data[-1] ^= 1
        victim.write_bytes(data[:-10] if damage == "truncated" else data)
    with pytest.raises(ValueError, match=victim.name):
        ShardSource(tmp_path / "out")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model.norm.weight": None}, r"model\.norm\.weight: missing"),
        ({"model.extra.weight": torch.zeros(2)}, r"model\.extra\.weight: unknown to this family"),
        ({"model.norm.weight": torch.zeros(81)}, r"model\.norm\.weight: shape \[81\], expected \[80\]"),
        ({"model.norm.weight": torch.zeros(80, dtype=torch.int64)}, r"model\.norm\.weight: dtype torch\.int64"),
        ({"model.norm.weight": torch.full((80,), torch.nan)}, r"decoder\.final_layernorm\.weight: holds NaN"),
    ],
)
def test_a_source_that_does_not_fit_is_an_error_and_leaves_no_file(tmp_path, change, message):
    model = plan(config_of("llama"))
    hf = {name: tensor for name, tensor in (random_weights(model) | change).items() if tensor is not None}
    source = write_source(tmp_path / "hf", model.config, hf)
    with pytest.raises(ValueError, match=message):
        write_shards(model, open_source(source), tmp_path / "out")
    assert not list((tmp_path / "out").glob("[!.]*"))


def test_rank_files_number_layers_as_the_ranks_state_dict_does():
    model = plan(config_of("llama"), pp=2, vpp=2)
    keys = [tensor.key for tensor in model.tensors(1) if "input_layernorm" in tensor.key]
    assert keys == ["model0.decoder.layers.0.input_layernorm.weight", "model1.decoder.layers.0.input_layernorm.weight"]
    assert [chunk.first_layer for chunk in model.stages[1]] == [1, 3]
    assert global_name("decoder.layers.0.x", 3) == "decoder.layers.3.x"
