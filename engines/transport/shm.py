"""Shared memory on one machine: all slots in one mapping of memory that has no name.

On Linux the memory is a memfd, which other processes of the same user open through the sender's entry in /proc. It
needs no room in /dev/shm (64 MB in a default container), and whatever dies when, nothing is left behind. Elsewhere it
is a file in the temporary folder, removed on close.
"""

from __future__ import annotations

import mmap
import os
import secrets
import tempfile
from typing import Any

import torch
from torch import Tensor

from engines.transport.base import ReceiveMedium, SendMedium, TransportError

# Small enough that a bucket is read while it still lies in the processor's cache, large enough that messages are rare.
FLUSH_BYTES = 8 << 20
SLOTS = 8  # either side may be held up for a moment without the other having to wait


class ShmSend(SendMedium):
    """Pages are taken when first touched: eight slots of 2 GiB cost what the buckets in them really hold."""

    def __init__(self, slot_bytes: int) -> None:
        self.flush_bytes = FLUSH_BYTES
        self._file, self._path, self._is_named = _anonymous_file()
        os.ftruncate(self._file, SLOTS * slot_bytes)
        self._offer = (secrets.token_hex(8), self._path, slot_bytes)
        self.slots = _map(self._file, slot_bytes)

    def offers(self, held: list[Any]) -> list[Any]:
        return [self._offer] * len(held)

    def start(self) -> None:
        """The memory is there from the beginning."""

    def publish(self, slot: int, used: int) -> None:
        """Receivers see what was written."""

    def settle(self, slot: int) -> None:
        """An acknowledged slot has been read."""

    def drop(self) -> None:
        """The memory depends on nobody."""

    def close(self) -> None:
        if self.slots:
            self.slots = []
            os.close(self._file)
            if self._is_named:
                os.unlink(self._path)


class ShmReceive(ReceiveMedium):
    """Keeps its mapping while the sender offers the same memory."""

    def __init__(self) -> None:
        self._slots: list[Tensor] = []

    def open(self, offer: Any) -> None:
        name, path, slot_bytes = offer
        if name == self.holds:
            return
        try:
            file = os.open(path, os.O_RDWR)
        except OSError as error:
            raise TransportError(
                f"got {error!r} for the shared memory of the training rank; expected both processes on one machine, "
                "in one container, of one user; or set checkpoint_engine.backend=nccl"
            ) from None
        self._slots, self.holds = _map(file, slot_bytes), name
        os.close(file)

    def fetch(self, slot: int, used: int) -> Tensor:
        return self._slots[slot][:used]

    def release(self, slot: int) -> None:
        """Reads of host memory are over when they return."""

    def drop(self) -> None:
        """The mapping depends on nobody."""

    def close(self) -> None:
        self._slots, self.holds = [], None


def _anonymous_file() -> tuple[int, str, bool]:
    """(descriptor, path under which other processes open it, whether that path must be removed)."""
    if hasattr(os, "memfd_create"):
        file = os.memfd_create("weights")
        return file, f"/proc/{os.getpid()}/fd/{file}", False
    file, path = tempfile.mkstemp(prefix="weights_")
    return file, path, True


def _map(file: int, slot_bytes: int) -> list[Tensor]:
    memory = mmap.mmap(file, 0)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)  # 512 times fewer page faults in the first update
    return list(torch.frombuffer(memory, dtype=torch.uint8).split(slot_bytes))
