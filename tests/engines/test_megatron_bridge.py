"""Megatron-Bridge behind our surface: when it is chosen, and that both bridges make the same shards and exports.

What needs the package runs in the environment of scripts/leg_megatron_bridge.sh.
"""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, MistralConfig

from bridge.models import FAMILIES
from engines import build_train_engine
from engines.base import ForwardOptions
from engines.batch import TrainBatch
from engines.megatron import megatron_bridge
from engines.megatron.megatron_bridge import choose_bridge, import_megatron_bridge, installed_version
from engines.spec import MegatronSpec, ModelSpec, TrainEngineSpec
from tests.ranks import run_ranks
from tests.tiny import write_tiny_model

needs_package = pytest.mark.skipif(
    installed_version() is None, reason="needs the package megatron-bridge: scripts/leg_megatron_bridge.sh"
)


@pytest.mark.parametrize(
    "setting, kind, found, expected",
    [
        ("auto", "qwen3", None, "native"),
        ("auto", "qwen3", "0.6.2", "native"),
        ("auto", "mistral", "0.6.2", "megatron_bridge"),
        ("native", "mistral", "0.6.2", "native"),
        ("megatron_bridge", "qwen3", "0.6.0", "megatron_bridge"),
    ],
)
def test_ours_first_the_package_for_other_families(monkeypatch, setting, kind, found, expected):
    monkeypatch.setattr(megatron_bridge, "installed_version", lambda: found)
    assert choose_bridge(setting, {"model_type": kind}) == expected


@pytest.mark.parametrize(
    "setting, kind, found, got",
    [
        ("auto", "mistral", None, "model_type 'mistral' with the package megatron-bridge not installed"),
        ("megatron_bridge", "qwen3", None, "bridge=megatron_bridge with the package megatron-bridge not installed"),
        ("auto", "mistral", "0.3.1", "model_type 'mistral' with megatron-bridge 0.3.1"),
    ],
)
def test_a_missing_package_is_a_clear_error(monkeypatch, setting, kind, found, got):
    monkeypatch.setattr(megatron_bridge, "installed_version", lambda: found)
    with pytest.raises(ValueError, match=rf"got .*{got}; expected megatron-bridge 0\.6\.x.*install it as"):
        choose_bridge(setting, {"model_type": kind})


def _engine(model, bridge: str, **backend):
    spec = MegatronSpec(dtype="float32", bridge=bridge, **backend)
    return build_train_engine(TrainEngineSpec("megatron", "cpu", ModelSpec(str(model)), spec, optim=None))


def _weights(model, bridge: str, **backend) -> tuple[dict, dict]:
    """This rank's live tensors after a load, and what it exports."""
    engine = _engine(model, bridge, **backend)
    engine.load(model)
    shards = {
        f"{number}.{name}": tensor.clone()
        for number, chunk in enumerate(engine.models)
        for name, tensor in chunk.named_parameters()
    }
    exported = {name: tensor.clone() for name, tensor in engine.hf_weights()}
    engine.close()
    return shards, exported


def _equal(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def _write(folder: Path, kind: str) -> Path:
    model = write_tiny_model(folder / kind, kind)
    config = json.loads((model / "config.json").read_text())
    if "n_routed_experts" in config:  # transformers 5.12 writes a default of another name beside it
        config.pop("num_experts", None)
        (model / "config.json").write_text(json.dumps(config))
    return model


def _both_bridges(rank: int, world: int, folder: Path, cases: list[tuple[list[str], dict]]) -> None:
    for kinds, backend in cases:
        for kind in kinds:
            shards, exported = _weights(folder / kind, "megatron_bridge", **backend)
            ours, our_export = _weights(folder / kind, "native", **backend)
            assert len(shards) > 5 and _equal(shards, ours), f"{kind} {backend}: {shards.keys() ^ ours.keys()}"
            assert _equal(exported, our_export), f"{kind} {backend}: {exported.keys() ^ our_export.keys()}"
            assert len(exported) == 0 if rank else _equal(exported, load_file(folder / kind / "model.safetensors"))


DENSE, MOE, LATENT = ["llama", "qwen2", "qwen3_tied"], ["qwen3_moe"], ["deepseek_v3", "glm_moe_dsa"]
TP2, ETP1 = {"tensor_model_parallel_size": 2}, {"expert_tensor_parallel_size": 1}
UNEVEN = {"override_transformer_config": {"num_layers_in_first_pipeline_stage": 1}}
CASES = {  # ranks -> which models in which layouts
    1: [(DENSE + MOE + LATENT, {}), (LATENT, {"mla_absorb": True})],
    2: [
        (DENSE + MOE + LATENT, TP2),
        (MOE, TP2 | ETP1),
        (LATENT, TP2 | ETP1 | {"mla_absorb": True}),
        (MOE + LATENT, ETP1 | {"expert_model_parallel_size": 2}),
        (["interleaved"], {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}),
        (["llama", "qwen3_tied", "deepseek_v3"], UNEVEN | {"pipeline_model_parallel_size": 2}),
    ],
}


@needs_package
@pytest.mark.gloo
@pytest.mark.parametrize("world", CASES)
def test_both_bridges_make_equal_shards_and_exports(tmp_path, world):
    for kind in DENSE + MOE + LATENT:
        _write(tmp_path, kind)
    write_tiny_model(tmp_path / "interleaved", "qwen3_tied", num_hidden_layers=4)
    run_ranks(_both_bridges, world, tmp_path, CASES[world], timeout=280)


SEQUENCES = [[1, 9, 8, 7, 6, 5], [3, 4, 100, 129, 0, 2, 77, 12]]


def _score(rank: int, world: int, model: Path) -> list[list[float]]:
    engine = _engine(model, "auto", **TP2)
    engine.load(model)
    exported = {name: tensor.clone() for name, tensor in engine.hf_weights()}
    assert len(exported) == 0 if rank else _equal(exported, load_file(model / "model.safetensors"))
    batch = TrainBatch.pack(SEQUENCES)
    return batch.rows(engine.log_probs(batch, ForwardOptions(micro_batch_size=2)).log_probs)


@needs_package
@pytest.mark.gloo
def test_a_family_without_our_map_is_served_by_the_package(tmp_path):
    torch.manual_seed(0)
    sizes = dict(vocab_size=130, hidden_size=80, intermediate_size=104, num_hidden_layers=2, head_dim=24)
    config = MistralConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, sliding_window=None)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(tmp_path)
    assert "mistral" not in FAMILIES
    for row, ids in zip(run_ranks(_score, 2, tmp_path, timeout=250)[0], map(torch.tensor, SEQUENCES), strict=True):
        log_probs = model(ids[None]).logits[0].log_softmax(-1)
        expected = log_probs[:-1].gather(1, ids[1:, None])[:, 0]
        torch.testing.assert_close(row[1:], expected, rtol=0, atol=2e-5)


def _not_skipped(rank: int, world: int, model: Path) -> None:
    engine = _engine(model, "megatron_bridge")
    file = model / "model.safetensors"
    weights = load_file(file)
    save_file(weights | {"model.layers.0.extra.weight": torch.ones(2)}, file, {"format": "pt"})
    engine.load(model)
    with pytest.raises(ValueError, match=r"no live weight for 1 tensors.*model\.layers\.0\.extra\.weight"):
        list(engine.hf_weights())
    save_file({name: weights[name] for name in weights if "q_norm" not in name}, file, {"format": "pt"})
    with pytest.raises(ValueError, match=r"for 3 weights.*layers\.0\.self_attention\.q_layernorm\.weight"):
        engine.load(model)
    save_file(weights, file, {"format": "pt"})
    engine.models[0].decoder.layers[1].extra = nn.Linear(2, 1, bias=False)
    with pytest.raises(ValueError, match=r"1 live weights .*cannot place, here decoder\.layers\.1\.extra\.weight"):
        engine.load(model)


@needs_package
@pytest.mark.gloo
def test_what_the_package_would_skip_with_a_warning_is_an_error(tmp_path):
    run_ranks(_not_skipped, 1, write_tiny_model(tmp_path / "model", "qwen3"), timeout=250)


HALVES = {  # two heads of two key rows and one value row: rows of kv_b_proj by tensor-parallel rank
    1: {"k": [[0, 1, 3, 4]], "v": [[2, 5]]},
    2: {"k": [[0, 1], [3, 4]], "v": [[2], [5]]},
}


def _kv_split(rank: int, world: int) -> None:
    import_megatron_bridge("cpu")
    from megatron.bridge import AutoBridge
    from megatron.core import parallel_state
    from transformers import DeepseekV3Config, GlmMoeDsaConfig

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world)
    full = torch.arange(6.0)[:, None].expand(6, 4).contiguous()
    for config in (
        DeepseekV3Config(qk_nope_head_dim=2, v_head_dim=1, architectures=["DeepseekV3ForCausalLM"]),
        GlmMoeDsaConfig(qk_nope_head_dim=2, v_head_dim=1, architectures=["GlmMoeDsaForCausalLM"]),
    ):
        config.num_hidden_layers, config.num_nextn_predict_layers = 3, 1
        registry = AutoBridge.from_hf_config(config)._model_bridge.mapping_registry()
        for place, layer in (("decoder.layers.1", 1), ("mtp.layers.0.transformer_layer", 3)):
            exported = {}
            for half in ("v", "k"):
                mapping = registry.megatron_to_hf_lookup(f"{place}.self_attention.linear_{half}_up_proj.weight")
                rows = HALVES[world][half][rank]
                module = nn.Linear(4, len(rows), bias=False)
                live = mapping.hf_to_megatron(full, module)
                assert live[:, 0].tolist() == rows, (half, live)
                exported |= mapping.megatron_to_hf(live.contiguous(), module)
            assert exported.keys() == {f"model.layers.{layer}.self_attn.kv_b_proj.weight"}
            assert torch.equal(exported.popitem()[1], full)
        plain = registry.megatron_to_hf_lookup("decoder.layers.1.self_attention.linear_kv_up_proj.weight")
        assert plain.hf_param == "model.layers.1.self_attn.kv_b_proj.weight"


@needs_package
@pytest.mark.gloo
@pytest.mark.parametrize("world", [1, 2])
def test_kv_b_proj_is_split_by_head(world):
    run_ranks(_kv_split, world, timeout=250)
