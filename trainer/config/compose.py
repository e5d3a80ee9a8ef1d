"""Hydra composes the tree: the engine is a config group, and values may refer to each other."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

from hydra import compose, initialize
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from trainer.config.errors import ConfigError
from trainer.config.inherit import deep_merge
from trainer.config.legacy import Item
from trainer.config.overrides import Overrides
from trainer.config.patterns import covering
from trainer.config.schema import ENGINES, leaves
from trainer.config.values import plain

ROLES = {"actor": "actor_rollout_ref.actor", "ref": "actor_rollout_ref.ref", "critic": "critic"}


def _nested(flat: dict[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key, value in flat.items():
        *sections, leaf = key.split(".")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
        node[leaf] = plain(value)
    return tree


@cache
def register() -> None:
    """Store the root node and one option per engine and role. Defaults come from the dataclasses."""
    store = ConfigStore.instance()
    defaults: list[Any] = [{"model_engine": "fsdp"}]
    for role, section in ROLES.items():
        defaults.append({f"{role}@{section}": "${model_engine}_" + role})
    shared = leaves(ENGINES[0])
    root = {key: leaf.default for key, leaf in shared.items() if not _in_role(key)}
    store.store(name="trainer", node={"defaults": [*defaults, "_self_"], **_nested(root)})
    for engine in ENGINES:
        store.store(group="model_engine", name=engine, package="_global_", node={"model_engine": engine})
        for role, section in ROLES.items():
            own = {
                key[len(section) + 1 :]: leaf.default
                for key, leaf in leaves(engine).items()
                if key.startswith(section + ".")
            }
            store.store(group=role, name=f"{engine}_{role}", node=_nested(own))


def _in_role(key: str) -> bool:
    return key == "model_engine" or any(key.startswith(section + ".") for section in ROLES.values())


@cache
def defaults(engine: str) -> dict[str, Any]:
    """The tree with this engine and nothing else given, as Hydra composes it. Copy before use."""
    register()
    with initialize(version_base="1.3", config_path=None):
        tree = compose("trainer", overrides=[f"model_engine={engine}"])
    container = OmegaConf.to_container(tree)
    assert isinstance(container, dict)
    return container


def compose_tree(overrides: Overrides) -> dict[str, Any]:
    """Flat key -> resolved, uncoerced value. Items that cannot be applied are dropped with an error.

    Hydra parsed every item and composed the defaults; applying the items here instead of in Hydra tells
    exactly which of them fails, and costs milliseconds instead of a second composition.
    """
    tree = copy.deepcopy(defaults(overrides.engine))
    tree["model_engine"] = overrides.engine
    known, applied = leaves(overrides.engine), []
    for item in overrides.items:
        name = covering(item.key, known)
        try:
            if item.key != "model_engine":
                _apply(tree, item, merge=name is not None and known[name].is_open)
            applied.append(item)
        except (KeyError, TypeError):
            sign = "~" if item.delete else ""
            got = f"{sign}{item.key}: " + ("it is not there" if item.delete else "a part of this key is not a dict")
            overrides.errors.append(
                ConfigError("arg.syntax", item.key, got, "a key that can be changed", "remove it", item.position)
            )
    overrides.items = applied
    if any("${" in item.text for item in applied):
        tree = _resolved(tree, overrides)
    return {key: _get(tree, key) for key in known}


def _apply(tree: dict[str, Any], item: Item, merge: bool) -> None:
    """Set, merge or delete one key. Raises KeyError or TypeError where the path does not lead to a dict."""
    *path, leaf = item.key.split(".")
    node = tree
    for part in path:
        if part not in node and item.delete:
            raise KeyError(part)
        node = node.setdefault(part, {})
        if not isinstance(node, dict):
            raise TypeError(part)
    if item.delete:
        del node[leaf]
    elif merge and isinstance(item.value, dict) and isinstance(node.get(leaf), dict):
        node[leaf] = deep_merge(node[leaf], item.value)
    else:
        node[leaf] = copy.deepcopy(item.value)


def _resolved(tree: dict[str, Any], overrides: Overrides) -> dict[str, Any]:
    """Replace `${...}`; those that lead nowhere are reported with the key that holds them, and dropped."""
    config = OmegaConf.create(tree)
    for item in overrides.items:
        if "${" not in item.text or item.delete:
            continue
        try:
            selected = OmegaConf.select(config, item.key)
            if OmegaConf.is_config(selected):
                OmegaConf.to_container(selected, resolve=True)
        except OmegaConfBaseException as error:
            reason = str(error).split("\n")[0]
            fix = f"export the variable, or give a default: '{item.key}=${{oc.env:NAME,default}}'"
            overrides.errors.append(
                ConfigError(
                    "value.interpolation",
                    item.key,
                    f"{item.text}: {reason}",
                    "a variable or key that exists",
                    fix,
                    item.position,
                )
            )
            default = leaves(overrides.engine).get(item.key)
            OmegaConf.update(config, item.key, plain(default.default) if default is not None else None)
    resolved = OmegaConf.to_container(config, resolve=True)
    assert isinstance(resolved, dict)
    return resolved


def _get(tree: dict[str, Any], key: str) -> Any:
    node: Any = tree
    for part in key.split("."):
        node = node[part]
    return node
