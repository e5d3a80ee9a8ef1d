"""The equivalence class of test_equivalence.py for experts, latent and sparse attention: one trajectory over five
optimizer steps for both engines, every layout, recompute, offload and the absorbed form."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from engines import build_train_engine
from engines.base import ForwardOptions
from engines.batch import Denominators
from engines.metric import merge
from engines.spec import FsdpSpec, MegatronSpec, ModelSpec, TrainEngineSpec
from tests.engines.test_equivalence import ALL, BUDGET, BY_ONE, BY_TWO, OPTIM, STEPS, _batch, _loss
from tests.ranks import run_ranks
from tests.tiny import write_tiny_model

KINDS = ("qwen3_moe", "deepseek_v3", "glm_moe_dsa")
TP2, EP2, PP2 = ({f"{axis}_model_parallel_size": 2} for axis in ("tensor", "expert", "pipeline"))


@dataclass(frozen=True)
class Case:
    options: ForwardOptions
    backend: dict | None  # Megatron sizes; None is FSDP
    recompute: bool = False
    offload: bool = False


REFERENCE = Case(ALL, None)
ONE = {"megatron": Case(BY_TWO, {}), "recompute": Case(BUDGET, {}, recompute=True)}
TWO = {
    "fsdp": Case(BY_TWO, None),
    "tp2": Case(BY_TWO, TP2),
    "ep2": Case(BY_ONE, EP2),
    "pp2": Case(BY_ONE, PP2),
    "tp2 ep2, etp1": Case(BY_TWO, TP2 | EP2),
    "pp2 vpp2": Case(BY_ONE, PP2 | {"virtual_pipeline_model_parallel_size": 2}),
    "cp2": Case(BY_TWO, {"context_parallel_size": 2}),
    "tp2 recompute": Case(BUDGET, TP2, recompute=True),
    "ep2 sharded, offload": Case(BY_TWO, EP2 | {"use_distributed_optimizer": True}, offload=True),
}
ABSORBED = {"absorbed tp2": Case(BY_TWO, TP2 | {"mla_absorb": True})}


def spec_of(folder: str, case: Case) -> TrainEngineSpec:
    switches = {f"{kind}_offload": case.offload for kind in ("param", "optimizer")}
    if case.backend is None:
        engine, backend = "fsdp", FsdpSpec(param_dtype="float32", **switches)
    else:
        engine, plain = "megatron", {"dtype": "float32", "use_distributed_optimizer": False}
        backend = MegatronSpec(**{**plain, **switches, "grad_offload": case.offload, **case.backend})
    return TrainEngineSpec(engine, "cpu", ModelSpec(folder, gradient_checkpointing=case.recompute), backend, OPTIM)


def trajectories(rank: int, world: int, cases: list[tuple[str, Case]]) -> list[list[dict]]:
    """Per (folder, case) one metric dict a step; empty on ranks whose metrics do not count."""
    return [trajectory(folder, case) for folder, case in cases]


def trajectory(folder: str, case: Case) -> list[dict]:
    engine = build_train_engine(spec_of(folder, case))
    engine.load(folder)
    options = ForwardOptions(**{**vars(case.options), "entropy": True, "entropy_grad": True})
    steps = []
    for step in range(STEPS):
        batch = _batch(step)
        denominators = Denominators(float(batch.tokens["loss_mask"].sum()), 6.0)
        share = batch.select(range(engine.dp_rank, 6, engine.dp_size))
        if case.offload:
            engine.offload()
            engine.onload()
        metrics = engine.update(share, _loss, denominators, options, step)
        steps.append(metrics if engine.is_output_rank else {})
    engine.close()
    return steps


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Four layers: enough for two stages of two chunks."""
    return {kind: str(write_tiny_model(tmp_path_factory.mktemp(kind), kind, num_hidden_layers=4)) for kind in KINDS}


@pytest.fixture(scope="module")
def reference(folders: dict[str, str]) -> dict[str, list[dict]]:
    """FSDP on one rank with the whole batch at once."""
    found = run_ranks(trajectories, 1, [(folder, REFERENCE) for folder in folders.values()], timeout=240)[0]
    for steps in found:
        assert len({round(step["loss"].value, 3) for step in steps}) == STEPS, "a trajectory that does not move"
    return dict(zip(folders, found, strict=True))


def check(folders: dict[str, str], reference: dict[str, list[dict]], world: int, cases: dict[str, Case]) -> None:
    named = [(kind, name, case) for kind in folders for name, case in cases.items()]
    ranks = run_ranks(trajectories, world, [(folders[kind], case) for kind, _, case in named], timeout=900)
    for (kind, name, _), *parts in zip(named, *ranks, strict=True):
        for step, (want, *got) in enumerate(zip(reference[kind], *parts, strict=True)):
            merged = merge(got)
            for key in ("loss", "actor/grad_norm", "actor/lr"):
                assert merged[key].value == pytest.approx(want[key].value, rel=1e-4), (kind, name, step, key)


@pytest.mark.gloo
@pytest.mark.slow
def test_one_rank(folders, reference):
    check(folders, reference, 1, ONE)


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.timeout(1000)
def test_two_ranks_in_every_layout(folders, reference):
    check(folders, reference, 2, TWO)
    latent = {kind: folder for kind, folder in folders.items() if kind != "qwen3_moe"}
    check(latent, reference, 2, ABSORBED)
