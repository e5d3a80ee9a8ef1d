"""Shared-memory transport on one node: two slots of one mapped file, a Unix socket for control.

The sender fills slot 0, then slot 1, and reuses a slot once every receiver has acknowledged it, so
gathering the next bucket overlaps with copying the last one. The file is unlinked as soon as all
receivers have mapped it: whatever dies afterwards, nothing is left behind. A dead peer closes its
socket, which both ends notice at once; a silent one runs into the time-out.

    sender                                     receiver
    ("open", file, slot_bytes)          ->     map the file                ->  "mapped"
    per update:
    ("begin", version)                  ->
    ("bucket", slot, records, checksum) ->     read the records            ->  ("ack", slot)
    ("end", tensors, bytes)             ->     the engine has verified     ->  ("done", version)
                                               anything went wrong         ->  ("error", text)
"""

from __future__ import annotations

import mmap
import os
import shutil
import tempfile
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path

import torch
from torch import Tensor

ALIGN = 256  # bytes; a float32 view after an odd bfloat16 tensor needs it


Address = str  # path of the control socket, in a folder that only this user can enter


@dataclass(frozen=True)
class Record:
    """A (piece of a) tensor inside a slot. `start` is the piece's first element in the flat tensor."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int
    nbytes: int
    start: int

    @property
    def is_whole(self) -> bool:
        return self.nbytes == torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True)
class Sent:
    """What one update moved."""

    tensors: int
    nbytes: int
    buckets: int


class TransportError(RuntimeError):
    """The other end died, fell silent, or refused what it got."""


class ShmSender:
    """The writing end. `bucket_bytes` is the size of one slot."""

    def __init__(self, receivers: int, bucket_bytes: int, timeout_s: float) -> None:
        self._folder = tempfile.mkdtemp(prefix="weights_")
        self.address: Address = f"{self._folder}/control"
        self._listener = connection.Listener(self.address, "AF_UNIX", backlog=receivers)
        self._receivers = receivers
        self._slot_bytes = -(-bucket_bytes // ALIGN) * ALIGN
        self._timeout_s = timeout_s
        self._peers: list[connection.Connection] = []
        self._memory: mmap.mmap | None = None

    def accept(self) -> None:
        """Wait until every receiver has connected and mapped the file."""
        self._listener._listener._socket.settimeout(self._timeout_s)  # Listener itself has no time-out
        try:
            self._peers = [self._listener.accept() for _ in range(self._receivers)]
        except TimeoutError:
            raise TransportError(
                f"got no connection from a rollout worker within {self._timeout_s} s; expected {self._receivers}; "
                "see its log, or raise checkpoint_engine.engine_kwargs.timeout_s"
            ) from None
        descriptor, path = tempfile.mkstemp(prefix="weights_", dir=_memory_folder(2 * self._slot_bytes))
        try:
            os.ftruncate(descriptor, 2 * self._slot_bytes)  # pages are allocated when first touched
            self._memory = mmap.mmap(descriptor, 2 * self._slot_bytes)
            for peer in self._peers:
                peer.send(("open", path, self._slot_bytes))
            for peer in self._peers:
                self._expect(peer, "mapped")
        finally:
            os.close(descriptor)
            os.unlink(path)
            self._listener.close()  # everybody is here: nobody else may come, and the folder can go
            shutil.rmtree(self._folder)

    def send(self, stream: Iterable[tuple[str, Tensor]], version: int, checksum: bool) -> Sent:
        """Send every tensor of `stream`; returns when all receivers have verified version `version`."""
        if self._memory is None:
            self.accept()
        self._broadcast(("begin", version))
        flat = torch.frombuffer(self._memory, dtype=torch.uint8)
        tensors = nbytes = buckets = 0
        slot, records, used = 0, [], 0

        def flush() -> None:
            nonlocal slot, records, used, buckets
            start = slot * self._slot_bytes
            crc = zlib.crc32(memoryview(self._memory)[start : start + used]) if checksum else None
            self._broadcast(("bucket", slot, records, crc, used))
            buckets += 1
            slot, records, used = 1 - slot, [], 0
            if buckets >= 2:  # the slot to be filled next was sent one bucket ago
                for peer in self._peers:
                    self._expect(peer, ("ack", slot))

        for name, tensor in stream:
            source = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
            done = 0
            while done < source.numel() or (source.numel() == 0 and done == 0):
                if self._slot_bytes - used < min(source.numel() - done, ALIGN):
                    flush()
                piece = min(source.numel() - done, self._slot_bytes - used)
                if piece < source.numel() - done and used > 0 and source.numel() <= self._slot_bytes:
                    flush()  # keep a tensor whole when it fits into one slot
                    continue
                offset = slot * self._slot_bytes + used
                flat[offset : offset + piece].copy_(source[done : done + piece])
                records.append(
                    Record(name, tuple(tensor.shape), tensor.dtype, offset, piece, done // tensor.dtype.itemsize)
                )
                used = min(self._slot_bytes, -(-(used + piece) // ALIGN) * ALIGN)
                done += max(piece, 1)
            tensors += 1
            nbytes += source.numel()
        if records:
            flush()
        self._broadcast(("end", tensors, nbytes))
        for peer in self._peers:
            if buckets:
                self._expect(peer, ("ack", 1 - slot))
            self._expect(peer, ("done", version))
        return Sent(tensors, nbytes, buckets)

    def _broadcast(self, message: tuple) -> None:
        for peer in self._peers:
            try:
                peer.send(message)
            except OSError:
                self._expect(peer, None)  # prefer the error text it left behind
                raise TransportError("a rollout worker closed the weight channel") from None

    def _expect(self, peer: connection.Connection, expected: object) -> None:
        message = _receive(peer, self._timeout_s, "a rollout worker")
        if isinstance(message, tuple) and message[0] == "error":
            raise TransportError(f"a rollout worker refused the weights: {message[1]}")
        assert message == expected, f"weight channel out of step: got {message!r}, expected {expected!r}"

    def close(self) -> None:
        for peer in self._peers:
            peer.close()
        self._listener.close()
        shutil.rmtree(self._folder, ignore_errors=True)


class ShmReceiver:
    """The reading end."""

    def __init__(self, address: Address, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._sender = connection.Client(address, "AF_UNIX")
        self._memory: mmap.mmap | None = None
        self._slot_bytes = 0

    def receive(self, version: int) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor) of one update; a tensor is valid until the next item is asked for."""
        if self._memory is None:
            self._map()
        kind, *rest = self._next()
        if kind != "begin" or rest[0] != version:
            raise TransportError(
                f"got weights ({kind}, {rest}); expected version {version}; trainer and rollout are out of step"
            )
        flat = torch.frombuffer(self._memory, dtype=torch.uint8)
        seen = seen_bytes = 0
        whole: Tensor | None = None  # a tensor that arrives in pieces
        while True:
            kind, *rest = self._next()
            if kind == "end":
                break
            slot, records, crc, used = rest
            self._verify(slot, used, crc)
            for record in records:
                piece = flat[record.offset : record.offset + record.nbytes].view(record.dtype)
                seen_bytes += record.nbytes
                if record.is_whole:
                    seen += 1
                    yield record.name, piece.view(record.shape)
                    continue
                if record.start == 0:
                    whole = torch.empty(record.shape, dtype=record.dtype)
                whole.view(-1)[record.start : record.start + piece.numel()] = piece
                if record.start + piece.numel() == whole.numel():
                    seen += 1
                    yield record.name, whole
                    whole = None
            self._sender.send(("ack", slot))
        if (seen, seen_bytes) != tuple(rest):
            raise TransportError(f"got {seen} tensors with {seen_bytes} bytes; expected {rest[0]} with {rest[1]}")

    def confirm(self, version: int) -> None:
        self._sender.send(("done", version))

    def refuse(self, text: str) -> None:
        self._sender.send(("error", text))

    def _map(self) -> None:
        kind, path, self._slot_bytes = self._next()
        assert kind == "open", f"weight channel out of step: got {kind!r}, expected 'open'"
        with open(path, "r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 2 * self._slot_bytes)
        self._sender.send("mapped")

    def _verify(self, slot: int, used: int, crc: int | None) -> None:
        start = slot * self._slot_bytes
        if crc is not None and zlib.crc32(memoryview(self._memory)[start : start + used]) != crc:
            raise TransportError(
                f"bucket checksum differs in slot {slot} ({used} bytes): the weights changed on the way"
            )

    def _next(self) -> tuple:
        return _receive(self._sender, self._timeout_s, "the training rank")

    def close(self) -> None:
        self._sender.close()


def _receive(peer: connection.Connection, timeout_s: float, who: str) -> object:
    if not peer.poll(timeout_s):
        raise TransportError(
            f"got nothing from {who} for {timeout_s} s while moving weights; expected the next message; "
            "see its log, or raise checkpoint_engine.engine_kwargs.timeout_s"
        )
    try:
        return peer.recv()
    except (EOFError, ConnectionResetError):
        raise TransportError(f"{who} closed the weight channel (its process probably died; see its log)") from None


def _memory_folder(nbytes: int) -> str:
    """/dev/shm when it can hold both slots, else the temporary folder (slower: backed by a disk)."""
    shm = Path("/dev/shm")
    if shm.is_dir() and shutil.disk_usage(shm).free > nbytes:
        return str(shm)
    return tempfile.gettempdir()
