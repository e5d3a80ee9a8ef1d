"""Hydra composes the tree: the engine is a config group, and values may refer to each other."""

from __future__ import annotations

from typing import Any

from hydra import compose, initialize
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from trainer.config.errors import ConfigError
from trainer.config.legacy import Item
from trainer.config.overrides import Overrides
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


def compose_tree(overrides: Overrides) -> dict[str, Any]:
    """Flat key -> resolved, uncoerced value. Failures of single items are collected in `overrides.errors`."""
    register()
    with initialize(version_base="1.3", config_path=None):
        tree = _compose(overrides)
    OmegaConf.set_struct(tree, False)
    _drop_unresolvable(tree, overrides)
    container = OmegaConf.to_container(tree, resolve=True)
    return {key: _get(container, key) for key in leaves(overrides.engine)}


def _compose(overrides: Overrides) -> DictConfig:
    texts = [text for text in overrides.texts() if not text.startswith("model_engine=")]
    texts.append(f"model_engine={overrides.engine}")
    try:
        return compose("trainer", overrides=texts)
    except (HydraException, OmegaConfBaseException):
        return _compose_one_by_one(overrides)


def _compose_one_by_one(overrides: Overrides) -> DictConfig:
    """Find the items that Hydra cannot merge (a `~key` that is not there, a key below a scalar)."""
    kept: list[Item] = []
    candidates, overrides.items = overrides.items, kept
    tree = compose("trainer", overrides=[f"model_engine={overrides.engine}"])
    for item in candidates:
        kept.append(item)
        try:
            texts = [text for text in overrides.texts() if not text.startswith("model_engine=")]
            tree = compose("trainer", overrides=[*texts, f"model_engine={overrides.engine}"])
        except (HydraException, OmegaConfBaseException) as error:
            kept.pop()
            reason = str(error.__cause__ or error).split("\n")[0]
            sign = "~" if item.delete else ""
            overrides.errors.append(
                ConfigError(
                    "arg.syntax",
                    item.key,
                    f"{sign}{item.key}: {reason}",
                    "a key that can be changed",
                    "remove it",
                    item.position,
                )
            )
    return tree


def _drop_unresolvable(tree: DictConfig, overrides: Overrides) -> None:
    """Report `${...}` that lead nowhere, with the key that holds them, and null them."""
    for item in overrides.items:
        if "${" not in item.text or item.delete:
            continue
        try:
            selected = OmegaConf.select(tree, item.key)
            OmegaConf.to_container(selected, resolve=True) if OmegaConf.is_config(selected) else None
        except OmegaConfBaseException as error:
            reason = str(error).split("\n")[0]
            overrides.errors.append(
                ConfigError(
                    "value.interpolation",
                    item.key,
                    f"{item.text}: {reason}",
                    "a variable or key that exists",
                    f"export the variable, or give a default: '{item.key}=${{oc.env:NAME,default}}'",
                    item.position,
                )
            )
            OmegaConf.update(tree, item.key, None, force_add=True)


def _get(container: dict[str, Any], key: str) -> Any:
    node: Any = container
    for part in key.split("."):
        node = node[part]
    return node
