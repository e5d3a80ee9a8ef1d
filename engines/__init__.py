"""How to hold, run and move a model. Engines are looked up by name and imported only when built."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

from engines.base import RolloutEngine, TrainEngine
from engines.spec import RolloutEngineSpec, TrainEngineSpec

# (engine, device) -> "module:class", or a function of the spec. Megatron on npu must call MindSpeed first.
TRAIN_ENGINES = {
    ("fsdp", "cpu"): "engines.fsdp.engine:FsdpEngine",
    ("fsdp", "cuda"): "engines.fsdp.engine:FsdpEngine",
    ("fsdp", "npu"): "engines.fsdp.engine:FsdpEngine",
    ("megatron", "cpu"): "engines.megatron.engine:MegatronEngine",
    ("megatron", "cuda"): "engines.megatron.engine:MegatronEngine",
    ("megatron", "npu"): "engines.megatron.mindspeed:build_engine",
}
ROLLOUT_ENGINES = {
    "hf": "engines.rollout.hf:HfRolloutEngine",
    "vllm": "engines.rollout.vllm.build:build_engine",
}


def build_train_engine(spec: TrainEngineSpec) -> TrainEngine:
    """Build (not load) the engine; `torch.distributed` must be initialised."""
    return _lookup(TRAIN_ENGINES, (spec.engine, spec.device))(spec)


def check_train_engine(spec: TrainEngineSpec) -> None:
    """ValueError for what the engine would refuse when built, as far as config.json tells. Starts nothing."""
    if (spec.engine, spec.device) == ("megatron", "npu"):
        import_module("engines.megatron.mindspeed").check_spec(spec)


def build_rollout_engine(spec: RolloutEngineSpec) -> RolloutEngine:
    return _lookup(ROLLOUT_ENGINES, spec.name)(spec)


def _lookup(table: dict, key: object) -> Callable:
    if key not in table:
        raise ValueError(
            f"got engine {key!r}; expected one of {sorted(map(str, table))}; set model_engine or trainer.device"
        )
    module, name = table[key].split(":")
    return getattr(import_module(module), name)
