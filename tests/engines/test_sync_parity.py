"""After every update the rollout scores like the trainer: engine -> shared memory -> rollout engine, for real."""

import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from engines import build_rollout_engine, build_train_engine
from engines.base import ForwardOptions, Prompt, SamplingParams
from engines.batch import Denominators, TrainBatch
from engines.spec import FsdpSpec, LrSchedule, MegatronSpec, ModelSpec, OptimSpec, RolloutEngineSpec, TrainEngineSpec
from engines.weight_sync import WeightReceiver, WeightSender
from tests.ranks import run_ranks
from tests.tiny import write_tiny_model

pytestmark = pytest.mark.gloo

SEQUENCES = [[1, 9, 8, 7, 6, 5], [3, 4, 100, 129, 0, 2, 77, 12], [50, 60, 70]]
DENSE = {
    "fsdp": FsdpSpec(param_dtype="float32"),
    "tp2": MegatronSpec(dtype="float32", tensor_model_parallel_size=2),
    "pp2": MegatronSpec(
        dtype="float32",
        pipeline_model_parallel_size=2,
        override_transformer_config={"num_layers_in_first_pipeline_stage": 1},
    ),
    "dp2": MegatronSpec(dtype="float32"),
}
EXPERTS = {
    "fsdp": FsdpSpec(param_dtype="float32"),
    "ep2": MegatronSpec(dtype="float32", expert_model_parallel_size=2),
    "tp2 ep2": MegatronSpec(dtype="float32", tensor_model_parallel_size=2, expert_model_parallel_size=2),
}
BACKENDS = {"qwen3": DENSE, "llama_tied": DENSE, "qwen3_moe": EXPERTS, "glm_moe_dsa": EXPERTS}


def _push_everything_up(output, batch: TrainBatch, denominators: Denominators):
    return -(output.log_probs * batch.tokens["loss_mask"]).sum() / denominators.tokens, {}


def _train_and_sync(rank: int, world: int, model: str, kind: str) -> dict[str, list[float]]:
    """Largest difference of log-probs per sync, three updates with every layout."""
    differences: dict[str, list[float]] = {}
    for name, backend in BACKENDS[kind].items():
        spec = TrainEngineSpec(
            engine="fsdp" if name == "fsdp" else "megatron",
            device="cpu",
            model=ModelSpec(model),
            backend=backend,
            optim=OptimSpec(LrSchedule(lr=5e-3)),
        )
        engine = build_train_engine(spec)
        engine.load(model)
        sender = WeightSender(engine.is_weight_source, 1, bucket_bytes=20_000, timeout_s=30, verify_every=1)
        receiver = rollout = None
        if rank == 0:
            rollout = build_rollout_engine(RolloutEngineSpec("hf", "cpu", ModelSpec(model), dtype="float32"))
            with pytest.raises(RuntimeError):  # nothing was loaded yet
                next(rollout.generate([Prompt("p", (1, 2))], SamplingParams()))
            receiver = WeightReceiver(sender.address, timeout_s=30)
        batch = TrainBatch.pack(SEQUENCES, loss_mask=[[0.0] + [1.0] * (len(row) - 1) for row in SEQUENCES])
        options = ForwardOptions(micro_batch_size=2, temperature=0.7)
        differences[name] = []
        for version in range(4):
            if version:
                engine.update(batch, _push_everything_up, Denominators(14 * engine.dp_size, 3), options, version)
            puller = threading.Thread(target=receiver.pull, args=(rollout, version)) if rank == 0 else None
            if puller:
                puller.start()
            sender.push(engine, version)
            ours = engine.log_probs(batch, options).log_probs
            # every rank that is not the answering one sends what it has; the last pipeline stage has the truth
            owner = max(r for r, flag in enumerate(_gather(engine.is_output_rank)) if flag)
            dist.broadcast(ours, owner)
            if puller:
                puller.join()
                assert rollout.version == version
                theirs = torch.cat([torch.tensor(row) for row in rollout.score(SEQUENCES, 0.7)])
                differences[name].append(float((ours - theirs).abs().max()))
        if rank == 0:
            with pytest.raises(ValueError, match="newer than the loaded 3"):
                receiver.pull(rollout, 3)
            moved = (torch.cat([torch.tensor(row) for row in rollout.score(SEQUENCES, 0.7)])).sum()
            assert moved > -20, f"three updates should have made the sequences likely, got {moved}"
            receiver.close()
        sender.close()
        engine.close()
    return differences


def _gather(flag: bool) -> list[bool]:
    flags: list[bool] = [False] * dist.get_world_size()
    dist.all_gather_object(flags, flag)
    return flags


MINUTES = {"qwen3_moe", "glm_moe_dsa"}


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.slow if kind in MINUTES else ()) for kind in BACKENDS]
)
def test_rollout_log_probs_equal_the_trainers_after_every_sync(tmp_path: Path, kind: str):
    model = write_tiny_model(tmp_path / "model", kind)
    differences = run_ranks(_train_and_sync, 2, str(model), kind)[0]
    assert {name: len(values) for name, values in differences.items()} == dict.fromkeys(BACKENDS[kind], 4)
    assert all(value < 1e-5 for values in differences.values() for value in values), differences
