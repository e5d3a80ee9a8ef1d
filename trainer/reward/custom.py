"""The user's own reward function: `f(data_source, solution_str, ground_truth, extra_info, **kwargs)`.

It may be plain or async and returns a number, a bool, or a dict with `score` (and perhaps `acc`,
`pred` and more).
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from trainer.prompts.row import Row
from trainer.reward.result import RewardResult
from trainer.reward.spec import CustomSpec

ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
KEY = "reward.custom_reward_function"


def load_custom(spec: CustomSpec) -> Callable[..., Any]:
    """Import the function. ValueError naming file and line when it cannot be called as promised."""
    path = Path(spec.path)
    if not path.is_file():
        raise ValueError(f"got {KEY}.path={spec.path}; expected an existing python file; correct the path")
    module_spec = importlib.util.spec_from_file_location(f"custom_reward_{path.stem}", path)
    if module_spec is None:
        raise ValueError(f"got {KEY}.path={spec.path}; expected a file ending in .py; rename it")
    module = importlib.util.module_from_spec(module_spec)
    module_spec.loader.exec_module(module)
    function = vars(module).get(spec.name)
    if function is None:
        defined = sorted(name for name, value in vars(module).items() if inspect.isfunction(value))
        raise ValueError(
            f"got {KEY}.name={spec.name}, which {path} does not define; expected one of {defined}; correct the name"
        )
    if not callable(function):
        raise ValueError(
            f"got {KEY}.name={spec.name} in {path}, a {type(function).__name__}; expected a function; correct the name"
        )
    try:
        inspect.signature(function).bind(**dict.fromkeys(ARGUMENTS), **spec.reward_kwargs)
    except TypeError as error:
        line = function.__code__.co_firstlineno if inspect.isfunction(function) else 1
        raise ValueError(
            f"got {path}:{line} {spec.name}{inspect.signature(function)} ({error}); expected it to take "
            f"{', '.join((*ARGUMENTS, *spec.reward_kwargs))} by name; change its parameters or {KEY}.reward_kwargs"
        ) from error
    return function


class CustomScorer:
    """Calls the user's function on one answer and gives its return value the common form."""

    def __init__(self, spec: CustomSpec) -> None:
        self.function, self.kwargs = load_custom(spec), dict(spec.reward_kwargs)

    async def __call__(self, text: str, row: Row, think_open: bool = False) -> RewardResult:
        value = self.function(
            data_source=row.tag,
            solution_str=text,
            ground_truth=row.ground_truth,
            extra_info=row.extra.get("extra_info", {}),
            **self.kwargs,
        )
        return as_result(await value if inspect.isawaitable(value) else value)


def as_result(value: Any) -> RewardResult:
    """Number, bool or dict with `score` -> RewardResult. ValueError for anything else, NaN and infinity.

    Without an own `acc` a score inside [0, 1] is the accuracy; any other score has none.
    """
    fields = dict(value) if isinstance(value, Mapping) else {"score": value}
    if "score" not in fields:
        raise ValueError(f"got a dict with {sorted(fields)}; expected the key 'score'; return it from the function")
    score = _number("score", fields.pop("score"))
    acc = _number("acc", fields.pop("acc")) if fields.get("acc") is not None else None
    if acc is None and 0 <= score <= 1:
        acc = score
    fields.pop("acc", None)
    pred = fields.pop("pred", None)
    extra = json.loads(json.dumps(fields, default=_scalar))  # plain values: the reader has no user classes
    return RewardResult(score, acc, None if pred is None else str(pred), "custom", extra)


def _scalar(value: Any) -> float | str:
    """A number where it is one (numpy, one-element tensors), else its text."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return str(value)


def _number(name: str, value: Any) -> float:
    try:
        number = float(value)  # also numpy scalars and one-element tensors
    except (TypeError, ValueError):
        number = math.nan
    if isinstance(value, str) or not math.isfinite(number):
        raise ValueError(f"got {name} {value!r}; expected a finite number; change what the function returns")
    return number
