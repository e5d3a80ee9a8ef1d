"""The FSDP2 engine on several gloo ranks: the same numbers as plain transformers on one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

import bridge
from engines import build_train_engine
from engines.base import ForwardOptions
from tests.engines.test_fsdp import (
    DENOMINATORS,
    ONE_BY_ONE,
    TEMPERATURE,
    Reference,
    loaded_engine,
    make_batch,
    make_spec,
    policy_loss,
    write_tiny_moe,
)
from tests.ranks import run_ranks
from tests.tiny import write_tiny_model

pytestmark = pytest.mark.gloo

# Rank 0 has three sequences and rank 1 one: rank 1 runs two fillers.
SHARES = {2: [[0, 3, 2], [1]], 3: [[0, 3], [1], [2]]}
VARIANTS = {
    "fsdp": {},
    "zero2": {"reshard_after_forward": False},
    "hsdp": {"fsdp_size": 1},
    "recompute": {"model": {"gradient_checkpointing": True}},
}


def update(engine, rank: int, world: int, step: int, loss=policy_loss) -> dict[str, float]:
    metrics = engine.update(make_batch(SHARES[world][rank]), loss, DENOMINATORS, ONE_BY_ONE, step)
    return {name: metric.value for name, metric in metrics.items()}


def exported(engine) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in engine.hf_weights()}


def train(rank: int, world: int, path: Path, folder: Path) -> dict:
    """Everything the tests below look at, in one start of the ranks."""
    result: dict = {"variants": {}}
    for name, changes in VARIANTS.items():
        engine = loaded_engine(path, **changes)
        scores = engine.log_probs(make_batch(SHARES[world][rank]), ForwardOptions(TEMPERATURE, max_tokens=9))
        steps = [update(engine, rank, world, step) for step in range(5)]
        result["variants"][name] = {"scores": scores.log_probs, "steps": steps, "weights": exported(engine)}
    engine = loaded_engine(path)
    result["loaded"] = exported(engine)
    result["nonfinite"] = skip_on_all(engine, rank, world)
    result["resume"] = resume(engine, rank, world, path, folder)
    result["read"] = bytes_read(path)
    return result


def skip_on_all(engine, rank: int, world: int) -> dict:
    def broken_on_rank_one(output, batch, denominators):
        loss, metrics = policy_loss(output, batch, denominators)
        return loss * (torch.nan if dist.get_rank() == 1 else 1.0), metrics

    before = exported(engine)
    counted = update(engine, rank, world, 0, broken_on_rank_one)["actor/nonfinite_grad_steps"]
    after = exported(engine)
    return {"counted": counted, "unchanged": all(torch.equal(before[name], after[name]) for name in before)}


def resume(engine, rank: int, world: int, path: Path, folder: Path) -> bool:
    update(engine, rank, world, 0)
    engine.save(folder)
    update(engine, rank, world, 1)
    other = build_train_engine(make_spec(path))
    other.restore(folder)
    update(other, rank, world, 1)
    mine, theirs = exported(engine), exported(other)
    return all(torch.equal(mine[name], theirs[name]) for name in mine)


def bytes_read(path: Path) -> tuple[int, int]:
    """(bytes this rank read while loading, bytes of its own rows)"""
    opened = []

    def open_counted(directory):
        opened.append(bridge.open_source(directory))
        return opened[0]

    from engines.fsdp import engine as fsdp_engine

    fsdp_engine.open_source = open_counted
    engine = loaded_engine(path, optim=None)
    return opened[0].bytes_read, sum(p.to_local().nbytes for p in engine.model.parameters())


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"), "qwen3")


@pytest.fixture(scope="module")
def results(path, tmp_path_factory) -> list[dict]:
    return run_ranks(train, 2, path, tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def reference(path) -> dict:
    model = Reference(path)
    with torch.no_grad():
        scores, _ = model.score()
    steps = [model.update(step) for step in range(5)]
    return {"scores": make_batch([0, 1, 2, 3]).rows(scores), "steps": steps, "weights": model.model.state_dict()}


@pytest.mark.parametrize("name", VARIANTS)
def test_two_ranks_equal_plain_transformers(results, reference, name):
    for rank, result in enumerate(results):
        variant, share = result["variants"][name], SHARES[2][rank]
        for row, scores in zip(share, make_batch(share).rows(variant["scores"]), strict=True):
            torch.testing.assert_close(scores, reference["scores"][row], rtol=0, atol=1e-5)
        norms = [step["actor/grad_norm"] for step in variant["steps"]]
        assert norms == pytest.approx([norm for _, norm in reference["steps"]], rel=1e-5)
    losses = [sum(r["variants"][name]["steps"][step]["loss"] for r in results) for step in range(5)]
    assert losses == pytest.approx([loss for loss, _ in reference["steps"]], rel=1e-5)
    for tensor_name, tensor in results[0]["variants"][name]["weights"].items():
        torch.testing.assert_close(tensor, reference["weights"][tensor_name], rtol=1e-4, atol=1e-5)


def test_rank_zero_alone_exports_what_the_file_holds(results, path):
    source = load_file(path / "model.safetensors")
    assert results[0]["loaded"].keys() == source.keys() and results[1]["loaded"] == {}
    assert all(torch.equal(results[0]["loaded"][name], source[name]) for name in source)


def test_each_rank_reads_only_its_own_rows(results):
    for result in results:
        read, owned = result["read"]
        assert read == owned


def test_step_that_is_nonfinite_on_one_rank_is_skipped_on_all_and_counted_once(results):
    assert sum(result["nonfinite"]["counted"] for result in results) == 1
    assert results[0]["nonfinite"]["unchanged"]


def test_two_ranks_resume_bit_identically(results):
    assert results[0]["resume"]


def train_uneven(rank: int, world: int, path: Path) -> tuple[dict, float]:
    engine = loaded_engine(path)
    loaded = exported(engine)
    return loaded, update(engine, rank, world, 0)["actor/grad_norm"]


def test_ranks_without_rows_of_some_tensor(tmp_path):
    """Two experts and odd row counts on three ranks: short pieces, and none at all for the last rank."""
    path = write_tiny_moe(tmp_path, experts=2)
    results = run_ranks(train_uneven, 3, path)
    source = load_file(path / "model.safetensors")
    assert results[0][0].keys() == source.keys()
    assert all(torch.equal(results[0][0][name], source[name]) for name in source)
    _, norm = Reference(path).update(0)
    assert [result[1] for result in results] == pytest.approx([norm] * 3, rel=1e-5)
