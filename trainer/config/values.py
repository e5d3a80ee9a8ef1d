"""From a parsed value to the type a key declares; and back to an argument that Hydra parses to the same value."""

from __future__ import annotations

import math
import re
import types
import typing
from collections.abc import Iterator
from typing import Any, Literal

REQUIRED: Any = "???"  # OmegaConf's mark for a value that must be given
UNIONS = (types.UnionType, typing.Union)
INTEGER = re.compile(r"[+-]?\d+")
TRUE, FALSE = ("true", "on", "yes", "y"), ("false", "off", "no", "n")
# Other spellings of a choice, tried only where the value itself is not one of the choices.
ALIASES = {
    "bf16": "bfloat16",
    "fp32": "float32",
    "fp16": "float16",
    "half": "float16",
    "float": "float32",
    "fsdp": "fsdp2",
    "dp": "fsdp",
    "hccl": "nccl",
}


class FrozenDict(dict):
    """A dict that refuses changes and still pickles, copies and dumps as a dict."""

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError("the configuration is frozen after load; copy it with dict(...) to change the copy")

    __setitem__ = __delitem__ = __ior__ = clear = pop = popitem = setdefault = update = _refuse

    def __reduce__(self) -> tuple:
        return FrozenDict, (dict(self),)


def freeze(value: Any) -> Any:
    """Dicts refuse changes at every depth; lists inside passthroughs stay lists, as their consumers expect."""
    if isinstance(value, dict):
        return FrozenDict({key: freeze(item) for key, item in value.items()})
    return [freeze(item) for item in value] if isinstance(value, list) else value


def plain(value: Any) -> Any:
    """Dicts, lists and scalars only: what YAML and JSON know."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value


class BadValue(Exception):
    """A value that does not fit; `expected` completes the error message."""

    def __init__(self, expected: str, id: str = "value.type") -> None:
        super().__init__(expected)
        self.expected, self.id = expected, id


def coerce(value: Any, annotation: Any) -> Any:
    """The value in the declared type. Raises BadValue."""
    if typing.get_origin(annotation) in UNIONS:
        return _union(value, typing.get_args(annotation))
    origin = typing.get_origin(annotation)
    if origin is Literal:
        return _choice(value, typing.get_args(annotation))
    if value is None:
        raise BadValue(f"{describe(annotation)}; null is not allowed")
    if origin is list:
        return _sequence(value, typing.get_args(annotation)[0])
    if origin is dict:
        if not isinstance(value, dict):
            raise BadValue("a dict such as {a:1,b:[1,2]}")
        return freeze(value)
    return SCALARS[annotation](value)


def describe(annotation: Any) -> str:
    """A type for people: `whole number or null`."""
    if typing.get_origin(annotation) in UNIONS:
        return " or ".join(describe(arg) for arg in typing.get_args(annotation))
    origin = typing.get_origin(annotation)
    if origin is Literal:
        return "one of " + ", ".join(map(str, typing.get_args(annotation)))
    if origin is list:
        return f"list of {describe(typing.get_args(annotation)[0])}"
    if origin is dict:
        return "dict"
    return NAMES[annotation]


def _union(value: Any, options: tuple) -> Any:
    if value is None and type(None) in options:
        return None
    options = tuple(option for option in options if option is not type(None))
    if str in options and isinstance(value, str):
        return value
    failure = None
    for option in options:
        try:
            return coerce(value, option)
        except BadValue as error:
            failure = failure or error
    raise BadValue(" or ".join(describe(option) for option in options) + " or null", failure.id)


def _choice(value: Any, choices: tuple) -> Any:
    if isinstance(value, bool):
        value = str(value).lower()
    if isinstance(value, str):
        for spelling in (value, ALIASES.get(value), value.replace("-", "_")):
            if spelling in choices:
                return spelling
    raise BadValue(describe(Literal[choices]), "value.choice")


def _sequence(value: Any, element: Any) -> tuple:
    if isinstance(value, str) and element is str and value != "":
        if "," in value:
            raise BadValue(f"a list; write [{value}]")
        return (value,)
    if not isinstance(value, list | tuple):
        raise BadValue(f"list of {describe(element)}")
    return tuple(coerce(item, element) for item in value)


def _bool(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, int) and value in (0, 1):
        return bool(value)
    if isinstance(value, str) and value.lower() in TRUE + FALSE:
        return value.lower() in TRUE
    raise BadValue("True or False")


def _int(value: Any) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, str) and INTEGER.fullmatch(value):  # ${oc.env:...} yields text
        return int(value)
    raise BadValue("a whole number, written with digits only")


def _float(value: Any) -> float:
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            raise BadValue("a number") from None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BadValue("a number")
    if not math.isfinite(value):
        raise BadValue("a finite number")
    return float(value)


def _str(value: Any) -> str:
    if isinstance(value, list | dict):
        raise BadValue("text; quote it")
    return str(value)


def _any(value: Any) -> Any:
    return freeze(value)


SCALARS = {bool: _bool, int: _int, float: _float, str: _str, Any: _any}
NAMES = {
    bool: "True or False",
    int: "whole number",
    float: "number",
    str: "text",
    Any: "anything",
    type(None): "null",
}


def scalars(value: Any) -> Iterator[Any]:
    """Every scalar inside a parsed value, at any depth."""
    if isinstance(value, dict):
        for item in value.values():
            yield from scalars(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from scalars(item)
    else:
        yield value


def to_text(value: Any) -> str:
    """The right side of an override that Hydra parses back to `value`; for argv without a shell.

    Hydra reads a backslash inside quotes as an escape only where it stands before a quote, so only
    those are doubled.
    """
    if value is None:
        return "null"
    if isinstance(value, bool | int | float):
        return str(value)
    if isinstance(value, dict):
        return "{" + ",".join(f"{_dict_key(key)}:{to_text(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(to_text(item) for item in value) + "]"
    if "\n" in value or "\r" in value:
        raise ValueError(f"got the text {value!r} with a line break; expected one line; put long text into a file")
    escaped = re.sub(r'(\\*)"', lambda match: match.group(1) * 2 + '\\"', value)
    trailing = re.search(r"\\*$", escaped).group()
    return '"' + escaped + trailing + '"'


def _dict_key(key: Any) -> str:
    text = str(key)
    if not re.fullmatch(r"[A-Za-z0-9_.\-/*]+", text):
        raise ValueError(f"got the dict key {text!r}; expected letters, digits and _ . - /; rename it")
    return text
