"""What the Megatron engine promises beyond parity: resume, non-finite steps, bf16, recomputation."""

import pickle
import random
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from engines import build_train_engine
from engines.base import ForwardOptions
from engines.batch import Denominators, TrainBatch
from engines.megatron import cpu
from engines.megatron.offload import HostCopy
from engines.metric import Metric
from engines.spec import LrSchedule, MegatronSpec, ModelSpec, OptimSpec, TrainEngineSpec
from tests.ranks import run_ranks
from tests.tiny import write_tiny_model

SEQUENCES = [list(range(20, 39)), [5, 6, 7, 8, 9, 129, 12], [3, 100, 129, 4], [77, 3, 41, 11, 9]]
OPTIONS = ForwardOptions(micro_batch_size=1)
OPTIM = OptimSpec(LrSchedule(1e-3))
FULL_RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def _engine(folder, optim=OPTIM, **backend):
    spec = TrainEngineSpec(
        "megatron", "cpu", ModelSpec(folder), MegatronSpec(**{"dtype": "float32", **backend}), optim, timeout_s=60
    )
    engine = build_train_engine(spec)
    engine.load(folder)
    return engine


def _batch(engine=None):
    whole = TrainBatch.pack(SEQUENCES, loss_mask=[[0] + [1] * (len(ids) - 1) for ids in SEQUENCES])
    return whole if engine is None else whole.select(range(engine.dp_rank, len(whole), engine.dp_size))


def _loss(output, batch, denominators):
    loss = -(output.log_probs * batch.tokens["loss_mask"]).sum() / denominators.tokens
    return loss, {"loss": Metric("partial", loss.item())}


def _update(engine, loss=_loss, step=0):
    return engine.update(_batch(engine), loss, Denominators(31.0, 4.0), OPTIONS, step)


def _weights(engine):
    return {name: value.clone() for model in engine.models for name, value in model.named_parameters()}


def _same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def _resume(rank, world, folder, directory, backends):
    for number, backend in enumerate(backends):
        target = Path(directory) / str(number)
        target.mkdir(exist_ok=True)
        engine = _engine(folder, **backend)
        _update(engine)
        engine.save(target)
        straight = _update(engine, step=1)
        drawn = random.random(), np.random.rand(), torch.rand(1).item()
        weights = _weights(engine)
        engine.close()

        engine = _engine(folder, **backend)
        engine.restore(target)
        resumed = _update(engine, step=1)
        assert resumed == straight, (backend, resumed, straight)
        assert (random.random(), np.random.rand(), torch.rand(1).item()) == drawn
        assert _same(weights, _weights(engine)), backend
        engine.close()

    engine = _engine(
        folder, **{**backends[0], "use_distributed_optimizer": not backends[0]["use_distributed_optimizer"]}
    )
    with pytest.raises(ValueError, match="restore with the saving layout"):
        engine.restore(Path(directory) / "0")
    engine.close()


def _nonfinite(rank, world, folder, backends):
    def poisoned(output, batch, denominators):
        loss, metrics = _loss(output, batch, denominators)
        return loss * (float("nan") if engine.dp_rank == engine.dp_size - 1 else 1.0), metrics

    def infinite(output, batch, denominators):
        """Infinite value, finite gradient: only the loss tells."""
        loss, metrics = _loss(output, batch, denominators)
        return loss + float("inf"), metrics

    for backend in backends:
        engine = _engine(folder, **backend)
        before = _weights(engine)
        for bad in (poisoned, infinite):
            metrics = _update(engine, bad)
            assert metrics["actor/nonfinite_grad_steps"].value == (1.0 if engine.dp_rank == 0 else 0.0)
            assert _same(before, _weights(engine)), backend
        after_skips = _update(engine, step=1)
        skipped = _weights(engine)
        engine.close()

        engine = _engine(folder, **backend)
        straight = _update(engine, step=1)
        assert after_skips == straight and straight["actor/nonfinite_grad_steps"].value == 0.0
        assert _same(skipped, _weights(engine)), backend  # no trace of the skipped steps in Adam's state
        assert not _same(skipped, before)
        engine.close()


def _two_ranks(rank, world, model, tied_model, directory):
    """Two properties in one pair of processes: starting them costs more than tiny models do."""
    sharded, whole = (dict(dtype="bfloat16", use_distributed_optimizer=flag) for flag in (True, False))
    tensor_parallel = dict(use_distributed_optimizer=False, tensor_model_parallel_size=2)
    _resume(rank, world, tied_model, directory, [sharded, tensor_parallel])
    _nonfinite(rank, world, model, [dict(), whole])


@pytest.mark.gloo
def test_resume_is_bit_identical_and_a_non_finite_loss_on_one_rank_changes_nothing_anywhere(tmp_path):
    models = [str(write_tiny_model(tmp_path / kind, kind)) for kind in ("qwen3", "llama_tied")]
    run_ranks(_two_ranks, 2, *models, str(tmp_path))


def _one_rank(rank, world, folder):
    """Several properties in one process, for the same reason."""
    with pytest.raises(ValueError, match=re.escape("1 ranks for TP 2 x PP 1")):
        _engine(folder, tensor_model_parallel_size=2)
    with pytest.raises(ValueError, match=re.escape("1 ranks for TP 1 x PP 1 x CP 2")):
        _engine(folder, context_parallel_size=2)
    exact = _engine(folder)
    reference = _engine(folder, optim=None)  # second engine of the process, forward only
    expected = exact.log_probs(_batch(), OPTIONS).log_probs
    assert torch.equal(reference.log_probs(_batch(), OPTIONS).log_probs, expected)
    with pytest.raises(ValueError, match="same parallel sizes"):
        _engine(folder, tensor_model_parallel_size=2)

    recomputing = _engine(folder, override_transformer_config={**FULL_RECOMPUTE, "softmax_scale": None})
    assert recomputing.config.recompute_granularity == "full"
    want, got = _update(exact), _update(recomputing)
    assert got == want, (got, want)
    updated = exact.log_probs(_batch(), OPTIONS).log_probs
    assert (updated - expected).abs().max() > 1e-3, "the update moved nothing"
    assert torch.equal(reference.log_probs(_batch(), OPTIONS).log_probs, expected), "the reference model moved"

    schedule = LrSchedule(1e-3, warmup_steps=4)
    warming = _engine(folder, optim=OptimSpec(schedule))
    before = _weights(warming)
    assert _update(warming, step=0)["actor/lr"].value == 0.0 and _same(before, _weights(warming))
    assert _update(warming, step=1)["actor/lr"].value == 2.5e-4 and not _same(before, _weights(warming))

    half = _engine(folder, dtype="bfloat16")
    losses = {name: [] for name in ("float32", "bfloat16")}
    full = _engine(folder)
    for step in range(6):
        for engine in (full, half):
            losses[engine.backend.dtype].append(_update(engine, step=step)["loss"].value)
    exported = dict((name, value.dtype) for name, value in half.hf_weights())
    assert set(exported.values()) == {torch.bfloat16}
    return losses


@pytest.mark.gloo
def test_reference_model_recomputation_schedule_and_bfloat16(tmp_path):
    folder = str(write_tiny_model(tmp_path, "qwen3_tied"))
    losses = run_ranks(_one_rank, 1, folder)[0]
    for single, half in zip(losses["float32"], losses["bfloat16"], strict=True):
        assert half == pytest.approx(single, rel=2e-2)
    # The last loss needs the first updates: bf16 weights alone would lose steps of 1e-3 to rounding.
    assert losses["bfloat16"][-1] < losses["bfloat16"][0] - 0.5


def test_torch_itself_is_not_patched():
    before = torch.cuda.current_device, torch.zeros, torch.Tensor.type, torch.Tensor.cuda
    cpu.adapt()
    with cpu.construction():
        assert torch.zeros(1).type() == "torch.cuda.FloatTensor"
    assert before == (torch.cuda.current_device, torch.zeros, torch.Tensor.type, torch.Tensor.cuda)
    assert torch.zeros(1).type() == "torch.FloatTensor"


def test_tensors_pickled_beside_megatron_are_read_without_it():
    assert b"megatron" not in pickle.dumps(torch.zeros(3))
    assert torch.equal(pickle.loads(pickle.dumps(torch.arange(3))), torch.arange(3))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="moves storages between a CUDA device and the host")
def test_offloading_frees_device_memory_and_keeps_every_view():
    buffer = torch.arange(2**20, dtype=torch.float32, device="cuda")
    view, copy, zeros = buffer[5:10].view(5, 1), HostCopy(), HostCopy(keep=False)
    grads = torch.ones(7, device="cuda")
    expected, before = view.cpu(), torch.cuda.memory_allocated()
    copy.offload([buffer, view])
    zeros.offload([grads])
    assert torch.cuda.memory_allocated() <= before - 4 * 2**20
    copy.onload()
    zeros.onload()
    assert torch.equal(view.cpu(), expected) and not grads.any()
