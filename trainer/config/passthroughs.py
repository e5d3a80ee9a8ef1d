"""Passthroughs whose consumer is this code base: their keys are known here, so a typo ends the run at once.

The others (TransformerConfig, Hugging Face config, chat template, own reward function) are checked by
their consumers, which report every key they did not take.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainer.config.errors import ConfigError
from trainer.config.legacy import Item
from trainer.config.nearest import closest
from trainer.config.values import BadValue, coerce, freeze, plain

# passthrough -> key inside it -> type
SHAPES: dict[str, dict[str, Any]] = {
    "reward.reward_kwargs": {
        "max_resp_len": int | None,
        "overlong_buffer_cfg.enable": bool,
        "overlong_buffer_cfg.len": int,
        "overlong_buffer_cfg.penalty_factor": float,
        "overlong_buffer_cfg.log": bool,
    },
    "actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs": {
        "verify_every": int,
        "timeout_s": float,
        "delta": bool,
    },
    "ray_kwargs.ray_init.runtime_env": {"py_executable": str | None, "env_vars": dict[str, Any]},
}


def check(values: dict[str, Any], explicit: Mapping[str, Item]) -> list[ConfigError]:
    """Coerce the content of known passthroughs in place; one error per key that is unknown or does not fit."""
    errors: list[ConfigError] = []
    for section, shape in SHAPES.items():
        typed = plain(values[section])
        _walk(typed, "", section, shape, explicit, errors)
        values[section] = freeze(typed)
    return errors


def _walk(
    node: dict[str, Any],
    prefix: str,
    section: str,
    shape: dict[str, Any],
    explicit: Mapping[str, Item],
    errors: list[ConfigError],
) -> None:
    for name in list(node):
        inside = f"{prefix}{name}"
        key = f"{section}.{inside}"
        position = explicit[key].position if key in explicit else None
        if inside in shape:
            try:
                node[name] = coerce(node[name], shape[inside])
            except BadValue as error:
                got = f"{key}={node.pop(name)}"
                errors.append(ConfigError(error.id, key, got, error.expected, "remove it", position))
        elif isinstance(node[name], dict) and any(known.startswith(f"{inside}.") for known in shape):
            _walk(node[name], f"{inside}.", section, shape, explicit, errors)
        else:
            names = [f"{section}.{known}" for known in closest(inside, shape) or shape]
            value = node.pop(name)
            errors.append(
                ConfigError(
                    "key.unknown",
                    key,
                    f"a key that does not exist; value {value}",
                    f"one of {', '.join(names)}",
                    f"{names[0]}={value}",
                    position,
                )
            )
