"""The configuration on disk: saved with every run, compared on resume."""

from __future__ import annotations

import hashlib
import json
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from trainer.config.load import Loaded
from trainer.config.schema import Config, leaves
from trainer.config.values import plain


def to_dict(node: Any) -> Any:
    """Plain dicts, lists and scalars of a frozen tree, in declaration order."""
    if is_dataclass(node):
        return {item.name: to_dict(vars(node)[item.name]) for item in fields(node)}
    if isinstance(node, dict):
        return {key: to_dict(value) for key, value in node.items()}
    return [to_dict(value) for value in node] if isinstance(node, list | tuple) else node


def to_yaml(config: Config) -> str:
    """The resolved tree; no interpolation is left, and `--config FILE` loads it again."""
    return OmegaConf.to_yaml(OmegaConf.create({"tree": to_dict(config)}, flags={"allow_objects": False}).tree)


def fingerprint(config: Config) -> str:
    """16 hex digits that two equal configurations share."""
    tree = to_dict(config)
    tree.pop("derived")
    return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()[:16]


def flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Every scalar and list by its full key; an empty dict has none."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found


def diff(old_resolved_yaml: Path | str, config: Config) -> list[tuple[str, Any, Any]]:
    """(key, old value, new value) for every difference to a saved resolved.yaml, derived values left out.
    A key that only one side has counts as None on the other."""
    old = plain(OmegaConf.to_container(OmegaConf.load(Path(old_resolved_yaml)), resolve=True))
    new = to_dict(config)
    old.pop("derived", None)
    new.pop("derived")
    before, after = flat(old), flat(new)
    keys = [*after, *(key for key in before if key not in after)]
    return [(key, before.get(key), after.get(key)) for key in keys if before.get(key) != after.get(key)]


def save_config(loaded: Loaded, run_dir: Path) -> Path:
    """Write argv.txt, overrides_effective.txt, resolved.yaml and origin.json into `<run_dir>/config`."""
    folder = Path(run_dir) / "config"
    folder.mkdir(parents=True, exist_ok=True)
    origins = dict(loaded.origins) | {f"derived.{item.name}": "derived" for item in fields(loaded.config.derived)}
    files = {
        "argv.txt": "\n".join(loaded.argv) + "\n",
        "overrides_effective.txt": "\n".join(loaded.overrides) + "\n",
        "resolved.yaml": to_yaml(loaded.config),
        "origin.json": json.dumps(origins, indent=1) + "\n",
    }
    for name, text in files.items():
        temporary = folder / f".{name}"
        temporary.write_text(text, encoding="utf-8")
        temporary.rename(folder / name)
    return folder


def changed(loaded: Loaded) -> list[str]:
    """`key=value (origin)` for every key that is not at its default: what a run prints at its start."""
    values = flat(to_dict(loaded.config))
    lines = []
    for key in leaves(loaded.config.model_engine):
        origin = loaded.origins[key]
        if origin not in ("default", "derived"):
            inside = {name: value for name, value in values.items() if name == key or name.startswith(f"{key}.")}
            lines += [f"{name}={value} ({origin})" for name, value in inside.items()]
    return lines
