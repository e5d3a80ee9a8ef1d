"""The module `solution` as the tests see it: functions, classes and objects that live in another process."""

from __future__ import annotations

import builtins
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from trainer.reward.code.inside.peer import Broken, Peer
from trainer.reward.code.inside.wire import WireError

# Names that a test may not get from the solution unasked: it would take them for the real ones.
PROTECTED = frozenset(dir(builtins)) | sys.stdlib_module_names | {"pytest", "numpy", "np", "pd", "pandas"}


class RemoteFunction:
    """A function of the solution."""

    def __init__(self, peer: Peer, number: int, name: str) -> None:
        self._peer, self._number = peer, number
        self.__name__ = self.__qualname__ = name

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self._peer.request(self._number, "call", *arguments, keywords=keywords)


class Method:
    """A method of an object or class of the solution."""

    def __init__(self, peer: Peer, number: int, name: str) -> None:
        self._peer, self._number = peer, number
        self.__name__ = name

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self._peer.request(self._number, "method", self.__name__, *arguments, keywords=keywords)


def _attribute(peer: Peer, number: int, name: str) -> Any:
    answer = peer.request(number, "getattr", name)
    if type(answer) is not tuple or len(answer) != 2:
        raise Broken("an attribute of another form")
    is_method, value = answer
    return Method(peer, number, name) if is_method is True else value


class RemoteClass(type):
    """A class of the solution: calling it makes an object over there."""

    _peer: Peer
    _number: int

    def __call__(cls, *arguments: Any, **keywords: Any) -> Any:
        return cls._peer.request(cls._number, "call", *arguments, keywords=keywords)

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _attribute(cls._peer, cls._number, name)

    def __iter__(cls) -> Iterator[Any]:  # an enumeration
        return iter(cls._peer.request(cls._number, "list"))

    def __getitem__(cls, key: Any) -> Any:
        return cls._peer.request(cls._number, "getitem", key)

    def __len__(cls) -> int:
        return cls._peer.request(cls._number, "len")

    def __bool__(cls) -> bool:
        return True


class Handle:
    """An object of the solution. Attributes, methods and operators run over there; it equals no plain value."""

    _peer: Peer
    _number: int

    def __getattr__(self, name: str) -> Any:
        return _attribute(self._peer, self._number, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._peer.request(self._number, "setattr", name, value)

    def __delattr__(self, name: str) -> None:
        self._peer.request(self._number, "delattr", name)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Handle) and bool(self._peer.request(self._number, "eq", other))

    def __ne__(self, other: object) -> bool:
        return not isinstance(other, Handle) or bool(self._peer.request(self._number, "ne", other))

    def __iter__(self) -> Iterator[Any]:
        return iter(self._peer.request(self._number, "list"))

    def __reversed__(self) -> Iterator[Any]:
        return iter(self._peer.request(self._number, "reversed"))

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self._peer.request(self._number, "call", *arguments, keywords=keywords)

    def __enter__(self) -> Any:
        return self._peer.request(self._number, "enter")

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        """May swallow an exception as its class says, but never a failed assertion."""
        name = "" if kind is None else nearest_builtin(kind).__name__
        swallow = self._peer.request(self._number, "exit", name, "" if error is None else str(error))
        return swallow is True and isinstance(error, Exception) and not isinstance(error, AssertionError)


def _operator(operation: str) -> Any:
    def method(self: Handle, *arguments: Any) -> Any:
        return self._peer.request(self._number, operation, *arguments)

    return method


_BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "lshift", "rshift", "xor", "and", "or")
for _name in (
    *_BINARY,
    *(f"r{name}" for name in _BINARY),
    *("lt", "le", "gt", "ge", "neg", "pos", "invert", "index", "contains", "getitem", "setitem", "delitem"),
    *("abs", "bool", "len", "str", "repr", "format", "hash", "int", "float", "complex", "bytes"),
    *("round", "next", "divmod", "dir"),
):
    setattr(Handle, f"__{_name}__", _operator(_name))


def nearest_builtin(kind: type) -> type:
    return next(base for base in kind.__mro__ if vars(builtins).get(base.__name__) is base)


class StandIn:
    """Owner of the test's side of the conversation (see `Owner` in peer.py).

    `named` are the names that occur in the test: only instances of classes among them may come in.
    """

    def __init__(self, named: frozenset[str]) -> None:
        self._named = named
        self._classes: dict[str, type] = {}
        self._handles: dict[int, Handle] = {}
        self._callables: list[Any] = []
        self.peer: Peer | None = None

    def module(self) -> ModuleType:
        """The stand-in of the module; asks the other side what it defines."""
        module = ModuleType("solution")
        exports = self.peer.request(0, "exports")
        bases = {name: parents for name, kind, _, parents, _ in exports if kind == "class"}
        for name, _, number, _, error in sorted(
            (export for export in exports if export[1] == "class"), key=lambda export: len(bases[export[0]])
        ):
            module.__dict__[name] = self._class(name, number, bases[name], error)
        for name, kind, number, *_ in exports:
            if kind == "function":
                module.__dict__[name] = RemoteFunction(self.peer, number, name)
            elif kind == "value" and name in self._named:
                may_cross, value = self.peer.request(0, "constant", name)
                if may_cross is True:
                    module.__dict__[name] = value
        return module

    def foreign(self, value: Any) -> tuple[bytes, Any] | None:
        if isinstance(value, (RemoteFunction, Handle)) or type(value) is RemoteClass:
            return b"O", object.__getattribute__(value, "_number") if isinstance(value, Handle) else value._number
        if callable(value):
            self._callables.append(value)
            return b"H", len(self._callables) - 1
        return None

    def resolve(self, tag: bytes, content: Any) -> Any:
        if tag == b"O" and type(content) is int and 0 <= content < len(self._callables):
            return self._callables[content]
        if tag != b"H" or type(content) is not tuple or [type(part) for part in content] != [int, tuple, tuple]:
            raise WireError(f"an unknown tag {tag!r}")
        number, labels, (is_plain, value) = content
        label = next((label for label in labels if label in self._named and label in self._classes), None)
        if label is not None:
            return self._handle(number, label)
        if is_plain is True:
            return value
        raise WireError(f"an object of class {labels[0]!s:.80}, which the test does not name")

    def perform(self, target: int, operation: str, arguments: tuple, keywords: dict[str, Any]) -> Any:
        if operation != "call" or not 0 <= target < len(self._callables):
            raise Broken("a call of something that was not given")
        return self._callables[target](*arguments, **keywords)

    def describe(self, error: BaseException) -> tuple[str, str]:
        return nearest_builtin(type(error)).__name__, str(error)

    def rebuild(self, description: Any) -> BaseException:
        """The exception as the stand-in of its class, else as the nearest built-in one."""
        labels, name, arguments, text = description
        kind = next((self._classes[label] for label in labels if label in self._classes), None)
        if kind is None:
            kind = vars(builtins).get(name)
        if not (isinstance(kind, type) and issubclass(kind, BaseException)):
            raise Broken("an exception of no exception class")
        try:
            return kind(*arguments)
        except TypeError:
            return kind(text)

    def take_printed(self) -> tuple[str, str]:
        return "", ""

    def show_printed(self, printed: Any) -> None:
        """Pass text on, so that the test's own capture sees it."""
        out, err = printed
        if out:
            sys.stdout.write(out)
        if err:
            sys.stderr.write(err)

    def _class(self, name: str, number: int, parents: tuple[str, ...], error: str) -> type:
        parent = next((self._classes[parent] for parent in parents if parent in self._classes), None)
        if error:
            kind = type(name, (parent or vars(builtins)[error],), {"__module__": "solution"})
        else:
            kind = type.__new__(RemoteClass, name, (parent or Handle,), {"__module__": "solution"})
            type.__setattr__(kind, "_peer", self.peer)
            type.__setattr__(kind, "_number", number)
        self._classes[name] = kind
        return kind

    def _handle(self, number: int, label: str) -> Handle:
        if number not in self._handles:
            handle = object.__new__(self._classes[label])
            object.__setattr__(handle, "_number", number)
            self._handles[number] = handle
        return self._handles[number]
