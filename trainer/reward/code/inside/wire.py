"""Plain values <-> bytes, between the process that holds the tests and the one that holds the solution.

Not pickle: decoding builds exact built-in types and never calls anything the other side names. A value is
one tag byte and its content; lengths and counts are 4 bytes, little endian.

Lists, dicts, sets and bytearrays are numbered in the order of their appearance, so that one that occurs
twice stays one object, and a reply can say "the second list you gave me". `Table` holds that numbering.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable, Iterator
from typing import Any

FRAME_LIMIT = 8 << 20  # bytes of one message
DEPTH_LIMIT = 100  # containers inside containers

_VIEWS = (type({}.keys()), type({}.values()), type({}.items()))
_MUTABLE = (list, dict, set, bytearray)

Foreign = Callable[[Any], "tuple[bytes, Any] | None"]


class WireError(Exception):
    """Not a message of this format, or over its limits."""


class Uncrossable(TypeError):
    """A value that may not cross."""


class Table(list):
    """The numbered containers of one conversation: a call and its reply."""

    def __init__(self) -> None:
        super().__init__()
        self._numbers: dict[int, int] = {}

    def add(self, container: Any) -> None:
        self._numbers[id(container)] = len(self)
        self.append(container)

    def number(self, container: Any) -> int | None:
        return self._numbers.get(id(container))


class Encoder:
    """Writes values. `foreign(object)` says how an object that is no plain data crosses: (tag, plain value),
    or None when it is plain data or may not cross."""

    def __init__(self, table: Table, foreign: Foreign) -> None:
        self.out = bytearray()
        self._table, self._foreign = table, foreign

    def contents(self) -> None:
        """What is now in the containers known so far: brings the other side's copies up to date."""
        known = list(self._table)
        self._count(b"#", len(known))
        for container in known:
            self._container(container, 0)

    def value(self, value: Any, depth: int = 0) -> None:
        """Append one value. Uncrossable, or WireError when the message grows over its limits."""
        if len(self.out) > FRAME_LIMIT or depth > DEPTH_LIMIT:
            raise WireError(f"a message over {FRAME_LIMIT} bytes or {DEPTH_LIMIT} levels")
        foreign = self._foreign(value)
        if foreign is not None:
            tag, content = foreign
            self.out += tag
            self.value(content, depth + 1)
        elif not (self._scalar(value) or self._text(value)):
            self._collection(value, depth)

    def _count(self, tag: bytes, count: int) -> None:
        self.out += tag + struct.pack("<I", count)

    def _scalar(self, value: Any) -> bool:
        if value is None or value is True or value is False:
            self.out += {None: b"N", True: b"T", False: b"F"}[value]
        elif isinstance(value, int):
            number = int.__index__(value)
            size = number.bit_length() // 8 + 1
            self._bytes(b"i", number.to_bytes(size, "little", signed=True))
        elif isinstance(value, float):
            self.out += b"f" + struct.pack("<d", float.__float__(value))
        elif isinstance(value, complex):
            self.out += b"c" + struct.pack("<dd", value.real, value.imag)
        else:
            return False
        return True

    def _text(self, value: Any) -> bool:
        if isinstance(value, str):
            self._bytes(b"s", str.encode(value, "utf-8", "surrogatepass"))
        elif isinstance(value, bytes):
            self._bytes(b"b", bytes.__getitem__(value, slice(None)))
        else:
            return False
        return True

    def _bytes(self, tag: bytes, content: bytes) -> None:
        if len(content) > FRAME_LIMIT:
            raise WireError(f"a message over {FRAME_LIMIT} bytes")
        self._count(tag, len(content))
        self.out += content

    def _collection(self, value: Any, depth: int) -> None:
        if isinstance(value, _MUTABLE):
            number = self._table.number(value)
            if number is not None:
                self._count(b"@", number)
            else:
                self._table.add(value)
                self._container(value, depth)
        elif isinstance(value, tuple):
            self._items(b"t", list(tuple.__iter__(value)), depth)
        elif isinstance(value, frozenset):
            self._items(b"z", list(frozenset.__iter__(value)), depth)
        elif isinstance(value, range):
            self.out += b"r"
            self.value((value.start, value.stop, value.step), depth + 1)
        elif isinstance(value, (Iterator, *_VIEWS)):  # finite ones, as lists
            items = list(itertools.islice(value, FRAME_LIMIT + 1))
            self._table.add(items)
            self._items(b"l", items, depth)
        else:
            raise Uncrossable(f"a {type(value).__name__} is no plain data")

    def _container(self, value: Any, depth: int) -> None:
        if isinstance(value, list):
            self._items(b"l", list(list.__iter__(value)), depth)
        elif isinstance(value, dict):
            self._items(b"d", list(itertools.chain.from_iterable(dict.items(value))), depth)
        elif isinstance(value, set):
            self._items(b"e", list(set.__iter__(value)), depth)
        else:
            self._bytes(b"y", bytes(value))

    def _items(self, tag: bytes, items: list[Any], depth: int) -> None:
        if len(items) > FRAME_LIMIT:
            raise WireError(f"a message over {FRAME_LIMIT} bytes")
        self._count(tag, len(items))
        for item in items:
            self.value(item, depth + 1)


class Decoder:
    """Reads values. `resolve(tag, plain value)` turns what the other side's `foreign` wrote into an object."""

    def __init__(self, data: bytes, table: Table, resolve: Callable[[bytes, Any], Any]) -> None:
        self._data, self._at, self._table, self._resolve = data, 0, table, resolve

    def contents(self) -> None:
        """Bring the containers known so far up to date, each keeping its identity."""
        if self._take(1) != b"#" or self._number() != len(self._table):
            raise WireError("the containers of a reply do not match those of its call")
        known = list(self._table)
        fresh = [self._collection(self._take(1), 0, register=False) for _ in known]
        for container, content in zip(known, fresh, strict=True):
            if type(content) is not _kind(container):
                raise WireError("a container changed its type")
            _replace(container, content)

    def value(self, depth: int = 0) -> Any:
        """The next value. WireError when the bytes are not of this format."""
        if depth > DEPTH_LIMIT:
            raise WireError(f"a message deeper than {DEPTH_LIMIT} levels")
        tag = self._take(1)
        if tag in b"NTF":
            return {b"N": None, b"T": True, b"F": False}[tag]
        if tag == b"i":
            return int.from_bytes(self._take(self._number()), "little", signed=True)
        if tag == b"f":
            return struct.unpack("<d", self._take(8))[0]
        if tag == b"c":
            return complex(*struct.unpack("<dd", self._take(16)))
        if tag == b"s":
            return self._decode_text(self._take(self._number()))
        if tag == b"b":
            return self._take(self._number())
        return self._collection(tag, depth, register=True)

    def end(self) -> None:
        if self._at != len(self._data):
            raise WireError("bytes after the end of a message")

    def _collection(self, tag: bytes, depth: int, register: bool) -> Any:
        if tag == b"@":
            number = self._number()
            if number >= len(self._table):
                raise WireError("a reference to an unknown container")
            return self._table[number]
        if tag in (b"l", b"d", b"e", b"y"):
            return self._mutable(tag, depth, register)
        if tag == b"t":
            return tuple(self._values(depth))
        if tag == b"z":
            return self._hashed(frozenset, self._values(depth))
        if tag == b"r":
            bounds = self.value(depth + 1)
            if type(bounds) is not tuple or [type(n) for n in bounds] != [int] * 3 or bounds[2] == 0:
                raise WireError("not the bounds of a range")
            return range(*bounds)
        return self._resolve(tag, self.value(depth + 1))

    def _mutable(self, tag: bytes, depth: int, register: bool) -> Any:
        container: Any = {b"l": list, b"d": dict, b"e": set, b"y": bytearray}[tag]()
        if register:  # before its items: it may contain itself
            self._table.add(container)
        if tag == b"y":
            container += self._take(self._number())
        elif tag == b"l":
            container += self._values(depth)
        else:
            values = self._values(depth)
            pairs = dict if tag == b"d" else set
            if tag == b"d" and len(values) % 2:
                raise WireError("a dict with a key that has no value")
            items = zip(values[::2], values[1::2], strict=True) if tag == b"d" else values
            container.update(self._hashed(pairs, items))
        return container

    def _values(self, depth: int) -> list[Any]:
        return [self.value(depth + 1) for _ in range(self._number())]

    def _hashed(self, kind: Callable[[Any], Any], items: Any) -> Any:
        try:
            return kind(items)
        except TypeError as error:
            raise WireError(f"{error} in a set or as a key") from error

    def _decode_text(self, content: bytes) -> str:
        try:
            return content.decode("utf-8", "surrogatepass")
        except UnicodeDecodeError as error:
            raise WireError("text that is not UTF-8") from error

    def _number(self) -> int:
        return struct.unpack("<I", self._take(4))[0]

    def _take(self, count: int) -> bytes:
        start, self._at = self._at, self._at + count
        if self._at > len(self._data):
            raise WireError("a message that ends too early")
        return self._data[start : self._at]


def _kind(container: Any) -> type:
    """The built-in type of a container that may be of a subclass."""
    return next(kind for kind in _MUTABLE if isinstance(container, kind))


def _replace(container: Any, content: Any) -> None:
    if isinstance(container, (list, bytearray)):
        container[:] = content
    else:
        container.clear()
        container.update(content)
