"""How to hold, run and move a model. Engines are looked up by name and imported only when built."""

from __future__ import annotations

from importlib import import_module

from engines.base import RolloutEngine, TrainEngine
from engines.spec import RolloutEngineSpec, TrainEngineSpec

# (engine, device) -> "module:class". Megatron on npu is its own entry: it must call MindSpeed first.
TRAIN_ENGINES = {
    ("fsdp", "cpu"): "engines.fsdp.engine:FsdpEngine",
    ("fsdp", "cuda"): "engines.fsdp.engine:FsdpEngine",
    ("fsdp", "npu"): "engines.fsdp.engine:FsdpEngine",
    ("megatron", "cpu"): "engines.megatron.engine:MegatronEngine",
    ("megatron", "cuda"): "engines.megatron.engine:MegatronEngine",
}
ROLLOUT_ENGINES = {"hf": "engines.rollout.hf:HfRolloutEngine"}


def build_train_engine(spec: TrainEngineSpec) -> TrainEngine:
    """Build (not load) the engine; `torch.distributed` must be initialised."""
    return _lookup(TRAIN_ENGINES, (spec.engine, spec.device))(spec)


def build_rollout_engine(spec: RolloutEngineSpec) -> RolloutEngine:
    return _lookup(ROLLOUT_ENGINES, spec.name)(spec)


def _lookup(table: dict, key: object) -> type:
    if key not in table:
        raise ValueError(
            f"got engine {key!r}; expected one of {sorted(map(str, table))}; set model_engine or trainer.device"
        )
    module, name = table[key].split(":")
    return getattr(import_module(module), name)
