"""Calls in both directions over two pipes: one side asks, the other may ask back before it answers.

A message is 4 bytes of length, a kind and values (see wire.py):
    C  target, operation, arguments, keywords
    R  contents of the containers of the call, printed text, result
    X  the same, with an exception instead of the result
    U  what could not cross, as text
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from typing import Any, Protocol

from trainer.reward.code.inside.wire import FRAME_LIMIT, Decoder, Encoder, Table, Uncrossable, WireError

ENDED = "the other side has ended"


class Broken(BaseException):
    """The other side is gone, broke the rules or gave a value that may not cross: no verdict but failure.

    Not an Exception: a test that expects any exception must not take this one for it.
    """


class Owner(Protocol):
    """What a side brings: how its objects cross, and how it does what it is asked."""

    def foreign(self, value: Any) -> tuple[bytes, Any] | None: ...
    def resolve(self, tag: bytes, content: Any) -> Any: ...
    def perform(self, target: int, operation: str, arguments: tuple, keywords: dict[str, Any]) -> Any: ...
    def describe(self, error: BaseException) -> Any: ...
    def rebuild(self, description: Any) -> BaseException: ...
    def take_printed(self) -> tuple[str, str]: ...
    def show_printed(self, printed: Any) -> None: ...


class Peer:
    """One end. `on_broken(text)` learns why the conversation ended before `Broken` is raised."""

    def __init__(self, reader: int, writer: int, owner: Owner, on_broken: Callable[[str], None]) -> None:
        self._reader, self._writer, self._owner, self._on_broken = reader, writer, owner, on_broken

    def request(self, target: int, operation: str, *arguments: Any, keywords: dict[str, Any] | None = None) -> Any:
        """The result of the operation on the other side, or the exception it raised."""
        table = Table()
        try:
            call = self._encode(table, (target, operation, arguments, keywords or {}))
        except (Uncrossable, WireError) as error:
            raise self._broken(f"an argument cannot cross: {error}") from error
        self._send(b"C", call)
        while True:
            kind, data = self._receive()
            if kind == b"C":
                self._answer(data)
            elif kind in (b"R", b"X"):
                printed, result = self._decode(data, table)
                self._owner.show_printed(printed)
                if kind == b"X":
                    raise self._owner.rebuild(result)
                return result
            else:
                raise self._broken(f"the solution's value cannot cross: {data[:200]!r}")

    def serve(self) -> None:
        """Answer until the other side hangs up."""
        while True:
            kind, data = self._receive()
            if kind != b"C":
                raise self._broken("an answer without a question")
            self._answer(data)

    def _answer(self, data: bytes) -> None:
        table = Table()
        call = self._decode(data, table, contents=False)
        if type(call) is not tuple or [type(part) for part in call] != [int, str, tuple, dict]:
            raise self._broken("a call of another form")
        try:
            kind, result = b"R", self._owner.perform(*call)
        except Broken:
            raise
        except BaseException as error:  # whatever it is, the asking side decides about it
            kind, result = b"X", self._owner.describe(error)
        try:
            reply = self._encode(table, (self._owner.take_printed(), result), contents=True)
        except BaseException as error:  # also what a generator inside the result raises
            kind, reply = b"U", str(error).encode("utf-8", "replace")
        self._send(kind, reply)

    def _encode(self, table: Table, value: Any, contents: bool = False) -> bytes:
        encoder = Encoder(table, self._owner.foreign)
        if contents:
            encoder.contents()
        encoder.value(value)
        if len(encoder.out) > FRAME_LIMIT:
            raise WireError(f"a message over {FRAME_LIMIT} bytes")
        return bytes(encoder.out)

    def _decode(self, data: bytes, table: Table, contents: bool = True) -> Any:
        decoder = Decoder(data, table, self._owner.resolve)
        try:
            if contents:
                decoder.contents()
            value = decoder.value()
            decoder.end()
        except WireError as error:
            raise self._broken(str(error)) from error
        if contents and (type(value) is not tuple or len(value) != 2):
            raise self._broken("a reply of another form")
        return value

    def _broken(self, text: str) -> Broken:
        self._on_broken(text)
        return Broken(text)

    def _send(self, kind: bytes, data: bytes) -> None:
        left = memoryview(struct.pack("<I", len(data)) + kind + data)
        try:
            while left:
                left = left[os.write(self._writer, left) :]
        except OSError as error:
            raise self._broken(ENDED) from error

    def _receive(self) -> tuple[bytes, bytes]:
        size, kind = struct.unpack("<Ic", self._read(5))
        if size > FRAME_LIMIT:
            raise self._broken(f"a message of {size} bytes")
        return kind, self._read(size)

    def _read(self, count: int) -> bytes:
        parts = []
        while count:
            part = os.read(self._reader, min(count, 1 << 20))
            if not part:
                raise self._broken(ENDED)
            parts.append(part)
            count -= len(part)
        return b"".join(parts)
