"""Families with experts, latent and sparse attention in the FSDP2 engine, against plain transformers."""

from __future__ import annotations

import json
import tempfile
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from engines import sparse_index
from engines.base import ForwardOptions
from engines.export import export_hf
from tests.engines.test_fsdp import (
    DENOMINATORS,
    ONE_BY_ONE,
    SEQUENCES,
    TEMPERATURE,
    Reference,
    loaded_engine,
    make_batch,
    policy_loss,
)
from tests.ranks import run_ranks
from tests.tiny import MOE_KINDS, write_tiny_model

YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 1.0}
CASES = {kind: (kind, {}) for kind in MOE_KINDS} | {
    "shared indexers": ("glm_moe_dsa", {"index_topk_freq": 2, "index_skip_topk_offset": 2}),
    "yarn": ("deepseek_v3", {"rope_parameters": YARN | {"original_max_position_embeddings": 64}}),
    "no query latent": ("deepseek_v3", {"q_lora_rank": None}),
}
SPARSE = ("deepseek_v32", "glm_moe_dsa", "shared indexers")
BIAS = "mlp.gate.e_score_correction_bias"
ALL_AT_ONCE = ForwardOptions(TEMPERATURE, micro_batch_size=4, entropy=True, entropy_grad=True)


@pytest.fixture(scope="module")
def one_rank():
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 1), rank=0, world_size=1)
        yield
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("families")
    return {name: write_tiny_model(folder / name, kind, **changes) for name, (kind, changes) in CASES.items()}


def exported(engine) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in engine.hf_weights()}


def saved(model, folder: Path) -> dict[str, Tensor]:
    """The weights of a transformers model in the names of its file."""
    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("name", CASES)
def test_log_probs_and_entropy_equal_plain_transformers(one_rank, models, name):
    engine = loaded_engine(models[name], optim=None)
    if name in SPARSE:
        assert max(map(len, SEQUENCES)) > engine.model.config.index_topk > min(map(len, SEQUENCES))
    with torch.no_grad():
        log_probs_T, entropy_T = Reference(models[name]).score()
    for cut in ({"micro_batch_size": 1}, {"micro_batch_size": 4}):
        output = engine.log_probs(make_batch([0, 1, 2, 3]), ForwardOptions(TEMPERATURE, entropy=True, **cut))
        torch.testing.assert_close(output.log_probs, log_probs_T, rtol=0, atol=5e-6)
        torch.testing.assert_close(output.entropy, entropy_T, rtol=0, atol=5e-6)


@pytest.mark.parametrize("name", ["deepseek_v3", *SPARSE])
def test_a_sequence_does_not_depend_on_its_neighbours(one_rank, models, name):
    engine = loaded_engine(models[name], optim=None)
    changed = [[3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13], SEQUENCES[1], [50], SEQUENCES[3]]
    options = ForwardOptions(micro_batch_size=4)
    before, after = (
        make_batch([0, 1, 2, 3], rows).rows(engine.log_probs(make_batch([0, 1, 2, 3], rows), options).log_probs)
        for rows in (SEQUENCES, changed)
    )
    for b in (1, 3):
        torch.testing.assert_close(after[b], before[b], rtol=0, atol=2e-6)


def test_the_sparse_choice_decides(one_rank, models):
    """Guards the tests above: a model that attended to every key would be told apart."""
    dense = {"override_config": {"index_topk": 64}}
    scores = [
        loaded_engine(models["glm_moe_dsa"], optim=None, model=model).log_probs(make_batch([1]), ONE_BY_ONE).log_probs
        for model in ({}, dense)
    ]
    assert (scores[0] - scores[1])[:5].abs().max() < 1e-6, "the first tokens see at most index_topk keys anyway"
    assert (scores[0] - scores[1])[5:].abs().max() > 0.01


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v32", "shared indexers"])
def test_updates_equal_plain_transformers_and_move_nothing_frozen(one_rank, models, name, tmp_path):
    engine, reference = loaded_engine(models[name]), Reference(models[name])
    recomputing = loaded_engine(models[name], model={"gradient_checkpointing": True})
    before = exported(engine)
    for step in range(3):
        metrics = engine.update(make_batch([0, 1, 2, 3]), policy_loss, DENOMINATORS, ALL_AT_ONCE, step)
        recomputing.update(make_batch([0, 1, 2, 3]), policy_loss, DENOMINATORS, ONE_BY_ONE, step)
        loss, norm = reference.update(step)
        assert metrics["loss"].value == pytest.approx(loss, rel=1e-5)
        assert metrics["actor/grad_norm"].value == pytest.approx(norm, rel=1e-5)
    expected = saved(reference.model, tmp_path)
    for again in (exported(engine), exported(recomputing)):
        assert again.keys() == expected.keys()
        for tensor_name, tensor in again.items():
            torch.testing.assert_close(
                tensor, expected[tensor_name], rtol=1e-4, atol=1e-5, msg=lambda m, n=tensor_name: f"{n}: {m}"
            )
    after = exported(engine)
    frozen = {n for n in after if torch.equal(after[n], before[n])}
    assert frozen == {n for n in after if ".indexer." in n or n.endswith(BIAS)}


@pytest.mark.parametrize("name", CASES)
def test_export_equals_the_file_and_keeps_correction_biases_whole(one_rank, models, name, tmp_path):
    """5.0, 5.003 and 5.01 are one number in bfloat16."""
    source = load_file(models[name] / "model.safetensors")
    biases = [n for n in source if n.endswith(BIAS)]
    assert bool(biases) == (name != "qwen3_moe")
    for bias in biases:
        source[bias][:3] = torch.tensor([5.0, 5.003, 5.01])
    copy(models[name], tmp_path, source)
    for dtype in ("float32", "bfloat16"):
        weights = exported(loaded_engine(tmp_path, optim=None, model_dtype=dtype, param_dtype=dtype))
        assert weights.keys() == source.keys()
        for tensor_name, tensor in weights.items():
            kept = torch.float32 if tensor_name in biases else getattr(torch, dtype)
            assert tensor.dtype == kept and torch.equal(tensor, source[tensor_name].to(kept)), tensor_name


@pytest.mark.parametrize("name", ["qwen3_moe", "glm4_moe", "deepseek_v3"])
def test_bfloat16_scores_are_those_of_transformers_in_bfloat16(one_rank, models, name):
    engine = loaded_engine(models[name], optim=None, param_dtype="bfloat16")
    exact = Reference(models[name])
    rounded = AutoModelForCausalLM.from_pretrained(
        models[name], dtype=torch.bfloat16, experts_implementation="eager"
    )  # its default takes no rows of these sizes
    ours_T = engine.log_probs(make_batch([0, 1, 2, 3]), ONE_BY_ONE).log_probs
    with torch.no_grad():
        exact_T, _ = exact.score()
        exact.model = rounded
        rounded_T, _ = exact.score()
    assert (ours_T - exact_T).abs().mean() < 2 * (rounded_T.float() - exact_T).abs().mean()


def test_a_trained_model_is_read_by_transformers(one_rank, models, tmp_path):
    engine = loaded_engine(models["shared indexers"])
    engine.update(make_batch([0, 1, 2, 3]), policy_loss, DENOMINATORS, ONE_BY_ONE, 3)
    export_hf(engine, tmp_path / "export", models["shared indexers"], {})
    with torch.no_grad():
        expected_T, _ = Reference(tmp_path / "export").score()
    scores_T = engine.log_probs(make_batch([0, 1, 2, 3]), ONE_BY_ONE).log_probs
    torch.testing.assert_close(scores_T, expected_T, rtol=0, atol=5e-6)


def copy(source: Path, target: Path, tensors: dict[str, Tensor]) -> None:
    (target / "config.json").write_text((source / "config.json").read_text())
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})


def test_surplus_layers_and_indexers_are_left_out_and_others_refused(one_rank, models, tmp_path, caplog):
    path = write_tiny_model(tmp_path / "model", CASES["shared indexers"][0], mtp=1, **CASES["shared indexers"][1])
    tensors = load_file(path / "model.safetensors")
    extra = sum(name.startswith("model.layers.3.") for name in tensors)
    own = {n: t for n, t in tensors.items() if "layers.0.self_attn.indexer" in n}
    indexers = {n.replace("layers.0", "layers.2"): t.clone() for n, t in own.items()}
    assert extra > 10 and len(indexers) == 5 and not indexers.keys() & tensors.keys()
    save_file(tensors | indexers, path / "model.safetensors", metadata={"format": "pt"})
    caplog.set_level("INFO")
    engine = loaded_engine(path, optim=None)
    assert f"{extra + 5} tensors have no place in this model" in caplog.text
    assert exported(engine).keys() == load_file(models["shared indexers"] / "model.safetensors").keys()
    stray = {n.replace("layers.3", "layers.4"): t.clone() for n, t in tensors.items() if "layers.3.enorm" in n}
    save_file(tensors | stray, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"unknown \['model.layers.4.enorm.weight'\]"):
        loaded_engine(path, optim=None)


@pytest.mark.parametrize("name, refused", [("glm_moe_dsa", True), ("deepseek_v32", True), ("deepseek_v3", False)])
def test_sparse_families_need_a_transformers_that_computes_them(one_rank, models, name, refused, monkeypatch):
    monkeypatch.setattr(sparse_index, "version", lambda _: "5.12.1")
    message = rf"{name} model and transformers 5.12.1.*expected transformers 5.13"
    with pytest.raises(ValueError, match=message) if refused else nullcontext():
        loaded_engine(models[name], optim=None)


def train(rank: int, world: int, paths: dict[str, Path]) -> dict[str, dict]:
    """One score and two updates of each model; rank 1 has one token and a masked filler, so most experts idle."""
    share = {2: [[0, 3, 2, 1], [0]], 3: [[1, 3], [0], [2]]}[world][rank]
    results = {}
    for name, path in paths.items():
        engine = loaded_engine(path, model={"gradient_checkpointing": rank_count_is_odd(world)})
        scores = engine.log_probs(make_batch(share), ONE_BY_ONE).log_probs
        norms = [
            engine.update(make_batch(share), policy_loss, DENOMINATORS, ONE_BY_ONE, step)["actor/grad_norm"].value
            for step in range(2)
        ]
        results[name] = {"share": share, "scores": scores, "norms": norms, "weights": exported(engine)}
    return results


def rank_count_is_odd(world: int) -> bool:
    """Recompute on three ranks, not on two: both are covered by two starts."""
    return world % 2 == 1


@pytest.mark.gloo
@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_ranks_equal_plain_transformers(models, world, tmp_path):
    """Eight experts on three ranks are pieces of 3, 3 and 2."""
    names = ("qwen3_moe", "shared indexers") if world == 2 else ("glm4_moe", "deepseek_v3", "deepseek_v32")
    results = run_ranks(train, world, {name: models[name] for name in names})
    for name in names:
        reference = Reference(models[name])
        with torch.no_grad():
            expected = make_batch([0, 1, 2, 3]).rows(reference.score()[0])
        for result in (rank[name] for rank in results):
            for row, scores in zip(result["share"], make_batch(result["share"]).rows(result["scores"]), strict=True):
                torch.testing.assert_close(scores, expected[row], rtol=0, atol=5e-6)
        reference_norms = [reference.update(step)[1] for step in range(2)]
        if world == 2:  # row 0 is one token without prediction: given twice, it counts nothing
            assert results[0][name]["norms"] == pytest.approx(reference_norms, rel=1e-5)
        weights = saved(reference.model, tmp_path / json.dumps(name))
        for tensor_name, tensor in results[0][name]["weights"].items():
            torch.testing.assert_close(tensor, weights[tensor_name], rtol=1e-4, atol=1e-5)
