"""The solution process of `assert` and `pytest` cases: imports the solution and does what it is asked.

It never sees a test. The checking process sends the index of an object, an operation and arguments; 0 is
the solution module itself.
"""

from __future__ import annotations

import builtins
import importlib.util
import io
import itertools
import operator
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

from trainer.reward.code.inside.peer import Broken, Peer
from trainer.reward.code.inside.wire import FRAME_LIMIT, Encoder, Table, Uncrossable, WireError

PRINT_LIMIT = 1 << 20  # characters between two answers


def _reflected(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda value, other: function(other, value)


_ARITHMETIC = "add sub mul truediv floordiv mod pow matmul lshift rshift xor"
_BINARY = {
    **{name: vars(operator)[name] for name in _ARITHMETIC.split()},
    "and": operator.and_,
    "or": operator.or_,
}
OPERATIONS: dict[str, Callable[..., Any]] = {
    **_BINARY,
    **{f"r{name}": _reflected(function) for name, function in _BINARY.items()},
    **{name: vars(operator)[name] for name in ("eq", "ne", "lt", "le", "gt", "ge", "neg", "pos", "invert", "index")},
    **{name: vars(operator)[name] for name in ("contains", "getitem", "setitem", "delitem")},
    **{f.__name__: f for f in (abs, bool, len, str, repr, format, hash, int, float, complex, bytes)},
    **{f.__name__: f for f in (round, list, next, divmod, setattr, delattr, dir)},
    "reversed": lambda value: list(reversed(value)),
    "call": lambda function, *arguments, **keywords: function(*arguments, **keywords),
    "method": lambda value, name, *arguments, **keywords: getattr(value, name)(*arguments, **keywords),
    "enter": lambda value: type(value).__enter__(value),
    "exit": lambda value, kind, text: bool(type(value).__exit__(value, *_exception(kind, text))),
}
# plain type -> an instance of a subclass as the exact type, whatever the subclass overrides
_STRIP: dict[type, Callable[[Any], Any]] = {
    **{int: int.__index__, float: float.__float__, complex: complex.__complex__, str: str.__str__},
    bytes: lambda value: bytes.__getitem__(value, slice(None)),
    **{kind: lambda value, kind=kind: kind(kind.__iter__(value)) for kind in (list, tuple, set, frozenset)},
    dict: lambda value: dict(dict.items(value)),
}


class Printed(io.TextIOBase):
    """A stdout or stderr whose text travels with the next answer."""

    def __init__(self) -> None:
        super().__init__()
        self._parts: list[str] = []
        self._size = 0

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self._size += len(text)
        if self._size > PRINT_LIMIT:
            os._exit(1)  # the output limit ends a case
        self._parts.append(str(text))
        return len(text)

    def take(self) -> str:
        text = "".join(self._parts)
        self._parts.clear()
        self._size = 0
        return text


class Solution:
    """Owner of the objects of the solution module (see `Owner` in peer.py)."""

    def __init__(self) -> None:
        self._objects: list[Any] = []
        self._numbers: dict[int, int] = {}
        self._module_name = "solution"
        self._printed = Printed(), Printed()
        self.peer: Peer | None = None

    def load(self, path: str) -> Any:
        """Import the solution; its exceptions are the caller's."""
        sys.stdout, sys.stderr = self._printed
        spec = importlib.util.spec_from_file_location(self._module_name, path)
        module = importlib.util.module_from_spec(spec)
        sys.modules[self._module_name] = module
        self._number(module)
        spec.loader.exec_module(module)
        return module

    def exports(self) -> list[tuple[str, str, int, tuple[str, ...], str]]:
        """Per name of the module: (name, kind, object number, names of its exported bases, built-in exception)."""
        found = []
        for name, value in list(vars(self._objects[0]).items()):
            if name.startswith("__"):
                continue
            if isinstance(value, type) and self._is_own(value):
                bases = tuple(base for base in self._labels(value) if base != value.__name__)
                error = _builtin_exception(value) if issubclass(value, BaseException) else ""
                found.append((name, "class", self._number(value), bases, error))
            elif callable(value):
                found.append((name, "function", self._number(value), (), ""))
            else:
                found.append((name, "value", 0, (), ""))
        return found

    def perform(self, target: int, operation: str, arguments: tuple, keywords: dict[str, Any]) -> Any:
        value = self._objects[target]
        if operation == "exports":
            return self.exports()
        if operation == "constant":
            return self._constant(arguments[0])
        if operation == "getattr":
            found = getattr(value, arguments[0])
            is_method = callable(found) and not self._is_instance(found)
            return (True, None) if is_method else (False, found)
        result = OPERATIONS[operation](value, *arguments, **keywords)
        if isinstance(result, Iterator) and not self._is_instance(result):
            result = list(itertools.islice(result, FRAME_LIMIT + 1))  # here, where its exceptions cross
        return result

    def foreign(self, value: Any) -> tuple[bytes, Any] | None:
        """Instances of the solution's classes cross as a number with their class names, and with their plain
        value if they have one: the checking side decides which of the two counts."""
        if isinstance(value, Callback):
            return b"O", value.number
        number = self._numbers.get(id(value))
        if number == 0 or (number is not None and isinstance(value, type)):
            raise Uncrossable("the solution's module or class is no value")
        if not self._is_instance(value):
            return None
        return b"H", (self._number(value), tuple(self._labels(type(value))), self._plain(value))

    def resolve(self, tag: bytes, content: Any) -> Any:
        if tag == b"O":
            return self._objects[content]
        if tag == b"H":
            return Callback(self, content)
        raise WireError(f"an unknown tag {tag!r}")

    def describe(self, error: BaseException) -> Any:
        """(names of its exported classes, nearest built-in class, arguments, text)."""
        text = _text(error)
        try:
            Encoder(Table(), self.foreign).value(error.args)
            arguments = error.args
        except (Uncrossable, WireError):
            arguments = (text,)
        return tuple(self._labels(type(error))), _builtin_exception(type(error)), arguments, text

    def rebuild(self, description: Any) -> BaseException:
        kind, text = description
        return vars(builtins)[kind](text)

    def take_printed(self) -> tuple[str, str]:
        return self._printed[0].take(), self._printed[1].take()

    def show_printed(self, printed: Any) -> None:
        """What a callback printed stays where it printed it."""

    def _constant(self, name: str) -> tuple[bool, Any]:
        """(whether it may cross, value) of a name of the module."""
        value = vars(self._objects[0])[name]
        try:
            Encoder(Table(), self.foreign).value(value)
        except (Uncrossable, WireError):
            return False, None
        return True, value

    def _plain(self, value: Any) -> tuple[bool, Any]:
        """(whether it is of a subclass of plain data, its value as the plain type)."""
        return next(((True, strip(value)) for kind, strip in _STRIP.items() if isinstance(value, kind)), (False, None))

    def _number(self, value: Any) -> int:
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self._objects)
            self._objects.append(value)
        return self._numbers[id(value)]

    def _is_own(self, kind: type) -> bool:
        return vars(kind).get("__module__") == self._module_name

    def _is_instance(self, value: Any) -> bool:
        return not isinstance(value, type) and bool(self._labels(type(value)))

    def _labels(self, kind: type) -> list[str]:
        """Names of the classes of the solution that `kind` is or inherits from, nearest first."""
        return [base.__name__ for base in type.mro(kind) if self._is_own(base)]


class Callback:
    """A function of the test that was given as an argument: calling it asks the checking process."""

    def __init__(self, solution: Solution, number: int) -> None:
        self.number, self._solution = number, solution

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self._solution.peer.request(self.number, "call", *arguments, keywords=keywords)


def _builtin_exception(kind: type) -> str:
    """Name of the nearest built-in class; groups are left out, they hold exceptions that cannot cross."""
    return next(
        base.__name__
        for base in type.mro(kind)
        if vars(builtins).get(base.__name__) is base and not issubclass(base, BaseExceptionGroup)
    )


def _exception(kind: str, text: str) -> tuple[Any, Any, None]:
    if not kind:
        return None, None, None
    error = vars(builtins)[kind](text)
    return type(error), error, None


def _text(error: BaseException) -> str:
    try:
        return str.__str__(str(error))
    except BaseException:  # the solution's own __str__
        return ""


def main(path: str, reader: int, writer: int) -> None:
    """Answer calls on `reader` until it closes. A first message says whether the solution could be loaded."""
    solution = Solution()
    solution.peer = Peer(reader, writer, solution, on_broken=lambda text: None)
    try:
        solution.load(path)
    except BaseException as error:
        sys.__stderr__.write(f"{type(error).__name__}: {_text(error)}\n")
        sys.__stderr__.flush()
        os._exit(1)
    try:
        solution.peer.serve()
    except Broken:
        os._exit(0)
