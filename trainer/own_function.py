"""Functions of the user's own, named in the configuration as "module:function"."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any


def load_function(name: str, key: str, known: list[str], signature: str) -> Callable[..., Any]:
    """Import "module:function". ValueError that names the configuration `key`, the `known` built-in names and the
    expected `signature`; call it at start, so that a wrong name does not cost a rollout."""
    module, _, function = name.partition(":")
    if not function:
        raise ValueError(f"got {key}={name!r}; expected one of {known} or 'module:function'; correct the name")
    try:
        loaded = vars(import_module(module))
    except ModuleNotFoundError as error:
        raise ValueError(
            f"got {key}={name!r}, but importing {module!r} failed: {error}; expected an importable module; "
            "correct the name or extend PYTHONPATH (of the workers too: trainer.env.PYTHONPATH)"
        ) from error
    if not callable(loaded.get(function)):
        raise ValueError(
            f"got {key}={name!r}, but module {module!r} has no function {function!r}; expected a function {signature}; "
            "correct the name"
        )
    return loaded[function]
