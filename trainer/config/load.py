"""argv -> frozen configuration: parse, rename, compose, coerce, inherit, check, derive, freeze."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from trainer.config import (
    bounds,
    checks_algorithm,
    checks_batch,
    checks_credit,
    checks_critic,
    checks_data,
    checks_loss,
    checks_parallel,
    checks_reward,
    checks_rollout,
    checks_run,
    model_config,
    not_built,
    passthroughs,
)
from trainer.config.commandline import parse
from trainer.config.compose import compose_tree
from trainer.config.derived import derive
from trainer.config.errors import ConfigError, ConfigErrors
from trainer.config.explain import explain
from trainer.config.inherit import inherit
from trainer.config.inspection import Inspection
from trainer.config.legacy import Item
from trainer.config.model_config import ModelFacts
from trainer.config.overrides import Overrides, rewrite
from trainer.config.schema import Config, Leaf, construct, domain_leaves, leaves
from trainer.config.schema_reward import RewardDomain
from trainer.config.values import REQUIRED, BadValue, FrozenDict, coerce, describe, to_text

ROUTE_RETURN = "actor_rollout_ref.rollout.enable_rollout_routing_replay"
ROUTE_MODE = "actor_rollout_ref.actor.router_replay.mode"
LOSS_MODE = "actor_rollout_ref.actor.policy_loss.loss_mode"
CHECKS = (
    checks_batch,
    checks_parallel,
    checks_rollout,
    checks_algorithm,
    checks_credit,
    checks_critic,
    checks_loss,
    checks_data,
    checks_reward,
    checks_run,
)


@dataclass(frozen=True)
class Loaded:
    """The configuration and everything worth saying about it.

    notices      one line each, in the order found
    action       run, dry-run, check-data, cfg (print the resolved tree) or explain (print `text`)
    text         the answer to --explain, else empty
    argv         the command line as typed
    overrides    effective arguments after renaming, as Hydra got them
    origins      key -> default | argv n | preset | file | legacy of ... | derived
    model        sizes from the model's config.json; None for a hub id
    """

    config: Config | None
    notices: list[str]
    action: Literal["run", "dry-run", "check-data", "cfg", "explain"]
    text: str = ""
    argv: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()
    origins: Mapping[str, str] | None = None
    model: ModelFacts | None = None


def load_config(argv: list[str]) -> Loaded:
    """Read one command line. Raises ConfigErrors with every problem found; touches no device."""
    line = parse(argv)
    overrides = rewrite(line)
    if line.action == "explain" and not overrides.errors:
        return Loaded(None, overrides.notices, "explain", explain(line.explain_key or ""), tuple(argv))
    errors = overrides.errors
    raw = compose_tree(overrides)
    explicit = overrides.explicit
    values, bad = coerce_all(raw, overrides)
    errors += passthroughs.check(values, explicit)
    if values[ROUTE_MODE] == "R3" and ROUTE_RETURN not in explicit:
        values[ROUTE_RETURN] = True
        overrides.notices.append(f"{ROUTE_RETURN}=True: router_replay.mode=R3 needs the routes")
    usual = not_built.baseline(values, overrides.engine)
    inherit(
        usual,
        {key: item for key, item in explicit.items() if key in usual and not_built.is_built(key)},
        overrides.engine,
    )
    overrides.notices += inherit(values, explicit, overrides.engine)
    errors += not_built.refuse(values, usual, explicit, overrides.engine)
    overrides.notices += not_built.notices(values, explicit, overrides.engine)
    out_of_range = bounds.check(values, explicit)
    errors += out_of_range
    bad |= {error.key for error in out_of_range}

    config = construct(Config, values, overrides.engine)
    model = None
    if values["actor_rollout_ref.model.path"] != "":
        model, problem = model_config.read(
            values["actor_rollout_ref.model.path"], values["actor_rollout_ref.model.override_config"]
        )
        errors += [problem] if problem is not None else []
    if not out_of_range:
        config = replace(config, derived=derive(config, resolve_device(config.trainer.device)))
        view = Inspection(config, explicit, model)
        for room in CHECKS:
            room.check(view)
        errors += [error for error in view.errors if error.key not in bad]
        overrides.notices += view.notices
    if errors:
        raise ConfigErrors(errors)
    return Loaded(
        config,
        overrides.notices,
        line.action,
        argv=tuple(argv),
        overrides=tuple(overrides.texts()),
        origins=origins(values, overrides),
        model=model,
    )


def coerce_all(raw: dict[str, Any], overrides: Overrides) -> tuple[dict[str, Any], set[str]]:
    """Typed values, and the keys that had none: those get their default so that the other checks can go on."""
    explicit, values, bad = overrides.explicit, {}, set()
    for key, leaf in leaves(overrides.engine).items():
        item = explicit.get(key)
        position = item.position if item is not None else None
        try:
            values[key] = _rewards(raw[key], overrides) if key == "rewards" else _typed(raw[key], leaf)
        except BadValue as error:
            bad.add(key)
            values[key] = _placeholder(leaf)
            got = "no value" if raw[key] == REQUIRED else f"{key}={item.text if item is not None else raw[key]}"
            fix = f"{key}={_example(leaf)}"
            overrides.errors.append(ConfigError(error.id, key, got, error.expected, fix, position))
    return values, bad


def _typed(value: Any, leaf: Leaf) -> Any:
    if value == REQUIRED:
        raise BadValue(f"{describe(leaf.type)}: there is no default", "value.required")
    if leaf.key == "algorithm.adv_estimator" and isinstance(value, str):
        value = value.removesuffix("_vectorized")
    if leaf.key == LOSS_MODE and isinstance(value, str) and ":" not in value:
        value = value.replace("-", "_")
    if value == "" and leaf.type not in (str, str | None):
        raise BadValue(describe(leaf.type))
    return coerce(value, leaf.type)


def _placeholder(leaf: Leaf) -> Any:
    if leaf.default != REQUIRED:
        return leaf.typed_default
    return "" if leaf.type is str else ()


def _example(leaf: Leaf) -> str:
    if leaf.default == REQUIRED:
        return "VALUE"
    return leaf.default if isinstance(leaf.default, str) else to_text(leaf.default)


def _rewards(raw: dict[str, Any], overrides: Overrides) -> FrozenDict:
    """`rewards.<domain>` sections as RewardDomain."""
    domains = {}
    for name, section in raw.items():
        arguments = {}
        for key, leaf in domain_leaves().items():
            value = section.get(key, leaf.default)
            try:
                arguments[key] = coerce(value, leaf.type)
            except BadValue as error:
                full = f"rewards.{name}.{key}"
                item = overrides.explicit.get(full)
                position = item.position if item is not None else None
                overrides.errors.append(
                    ConfigError(error.id, full, f"{full}={value}", error.expected, f"{full}={_example(leaf)}", position)
                )
                arguments[key] = leaf.default
        domains[name] = RewardDomain(**arguments)
    return FrozenDict(domains)


def resolve_device(name: str) -> str:
    """auto (and verl's cuda) is npu if there is an Ascend device, else cuda if there is a GPU, else cpu.
    Told from device files, because torch is not imported here; engines check again."""
    if name in ("npu", "cpu"):
        return name
    if name == "auto" and Path("/dev/davinci_manager").exists():
        return "npu"
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    return "cuda" if Path("/dev/nvidiactl").exists() and not hidden else "cpu"


def origins(values: Mapping[str, Any], overrides: Overrides) -> dict[str, str]:
    """Where every value came from."""
    explicit: dict[str, Item] = overrides.explicit
    found = {}
    for key, leaf in leaves(overrides.engine).items():
        below = [item for name, item in explicit.items() if name == key or name.startswith(f"{key}.")]
        if below:
            found[key] = ", ".join(dict.fromkeys(item.origin for item in below))
        else:
            found[key] = "default" if values[key] == leaf.typed_default else "derived"
    return found
