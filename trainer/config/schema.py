"""The root of the tree, and how a dataclass tree is seen as flat keys.

Dataclass fields are the one source of defaults. A *leaf* is a field that is not itself a section; a leaf
of type dict is an open passthrough whose content is checked by its consumer.
"""

from __future__ import annotations

import typing
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from functools import cache
from typing import Any, Literal

from trainer.config.derived import Derived
from trainer.config.schema_actor import (
    Actor,
    Critic,
    FsdpActor,
    FsdpCritic,
    FsdpRef,
    MegatronActor,
    MegatronCritic,
    MegatronRef,
    Ref,
)
from trainer.config.schema_algorithm import Algorithm
from trainer.config.schema_data import Data
from trainer.config.schema_model import Model
from trainer.config.schema_reward import Reward, RewardDomain
from trainer.config.schema_rollout import Rollout
from trainer.config.schema_trainer import GlobalProfiler, RayKwargs, Skip, Trainer
from trainer.config.values import REQUIRED, coerce

ENGINES = ("fsdp", "megatron")
BY_ENGINE: dict[type, dict[str, type]] = {
    Actor: {"fsdp": FsdpActor, "megatron": MegatronActor},
    Ref: {"fsdp": FsdpRef, "megatron": MegatronRef},
    Critic: {"fsdp": FsdpCritic, "megatron": MegatronCritic},
}


@dataclass(frozen=True)
class ActorRolloutRef:
    hybrid_engine: bool = True  # False = rollout on its own devices; needs rollout.nnodes > 0
    nccl_timeout: int = 600  # seconds, time-out of every process group
    model: Model = field(default_factory=Model)
    actor: Actor = field(default_factory=Actor)
    ref: Ref = field(default_factory=Ref)
    rollout: Rollout = field(default_factory=Rollout)


@dataclass(frozen=True)
class Config:
    """The frozen configuration of one run. `derived` is computed, never set."""

    model_engine: Literal["fsdp", "megatron"] = "fsdp"  # training engine
    data: Data = field(default_factory=Data)
    actor_rollout_ref: ActorRolloutRef = field(default_factory=ActorRolloutRef)
    critic: Critic = field(default_factory=Critic)
    reward: Reward = field(default_factory=Reward)
    rewards: dict[str, RewardDomain] = field(default_factory=dict)
    algorithm: Algorithm = field(default_factory=Algorithm)
    trainer: Trainer = field(default_factory=Trainer)
    ray_kwargs: RayKwargs = field(default_factory=RayKwargs)
    global_profiler: GlobalProfiler = field(default_factory=GlobalProfiler)
    skip: Skip = field(default_factory=Skip)
    derived: Derived | None = None


@dataclass(frozen=True)
class Leaf:
    """One settable key: its full name, type annotation, default, and the class that declares it."""

    key: str
    type: Any
    default: Any
    owner: type

    @property
    def typed_default(self) -> Any:
        """The default as a loaded tree holds it (lists are tuples); REQUIRED stays as it is."""
        return REQUIRED if self.default == REQUIRED else coerce(self.default, self.type)

    @property
    def is_open(self) -> bool:
        return typing.get_origin(self.type) is dict


@cache
def hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def section_class(annotation: Any, engine: str) -> type | None:
    """The dataclass behind a field's annotation; None for a leaf."""
    if not is_dataclass(annotation):
        return None
    return BY_ENGINE[annotation][engine] if annotation in BY_ENGINE else annotation


@cache
def leaves(engine: str) -> dict[str, Leaf]:
    """Every settable key of the tree with this engine, in declaration order; `rewards` is one open leaf."""
    return {leaf.key: leaf for leaf in _walk(Config, "", engine)}


@cache
def domain_leaves() -> dict[str, Leaf]:
    """Keys of one `rewards.<domain>` section."""
    return {leaf.key: leaf for leaf in _walk(RewardDomain, "", ENGINES[0])}


@cache
def sections(engine: str) -> frozenset[str]:
    """Every prefix of a key that is not itself a key."""
    return frozenset(key.rsplit(".", depth)[0] for key in leaves(engine) for depth in range(1, key.count(".") + 1))


def _walk(cls: type, prefix: str, engine: str) -> typing.Iterator[Leaf]:
    for item in fields(cls):
        if item.name == "derived":
            continue
        annotation = hints(cls)[item.name]
        inner = section_class(annotation, engine)
        if inner is not None:
            yield from _walk(inner, f"{prefix}{item.name}.", engine)
        else:
            yield Leaf(prefix + item.name, annotation, default_of(item), cls)


def default_of(item: Field) -> Any:
    assert item.default is not MISSING or item.default_factory is not MISSING, f"{item.name} has no default"
    return item.default_factory() if item.default is MISSING else item.default


def construct(cls: type, values: dict[str, Any], engine: str, prefix: str = "") -> Any:
    """Build the frozen tree from coerced flat values."""
    arguments = {}
    for item in fields(cls):
        if item.name == "derived":
            continue
        inner = section_class(hints(cls)[item.name], engine)
        key = prefix + item.name
        arguments[item.name] = construct(inner, values, engine, f"{key}.") if inner is not None else values[key]
    return cls(**arguments)
