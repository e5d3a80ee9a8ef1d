"""What every transport shares: the words of the protocol and the two halves of a medium.

A medium owns two or more slots, flat byte buffers that both ends can reach. Everything else (who takes part, buckets,
acknowledgements, versions, checksums) is the same for all of them: sender.py and receiver.py.

    receiver                                        sender
    ("join", Join)                            ->
                                              <-    ("begin", offer, kept)        how to reach the slots; delta mode
    ("ready",)                                ->
                                              <-    ("bucket", slot, records, used, checksum, patch)
    ("ack", slot)                             ->
                                              <-    ("end", tensors, bytes)
    ("done",)      the engine has verified    ->
    ("error", text)  anything went wrong      ->
                                              <-    ("abort", text)               likewise, at any moment

The channel lives for one update. Whoever connects takes part, so a replaced rollout worker just joins the next one,
and what went wrong in one update cannot disturb another. The slots, costly to make, live on between updates.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from engines.device import get_device

ALIGN = 256  # bytes; a float32 view after an odd bfloat16 tensor needs it


class TransportError(RuntimeError):
    """The other end died, fell silent, or refused what it got."""


@dataclass(frozen=True)
class Address:
    """Where rollout workers find the sender, and the secret that lets them in. Picklable."""

    transport: str
    host: str
    port: int
    key: bytes = field(repr=False)


@dataclass(frozen=True)
class Join:
    """What a receiver says of itself. `holds` names the slots it can already reach, `base` the update whose bytes it
    kept for delta mode; None when there are none."""

    name: str
    version: int
    holds: Any
    base: Any


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
    """What one update moved. `wire_bytes` are those that went through the slots: fewer than `nbytes` in delta mode,
    a little more elsewhere (alignment)."""

    tensors: int
    nbytes: int
    buckets: int
    wire_bytes: int = 0


def device_slots(device: str, slot_bytes: int) -> list[Tensor]:
    """Two slots on this process's present device."""
    module = get_device(device).module
    place = torch.device("cpu") if module is None else torch.device(device, module.current_device())
    return [torch.empty(slot_bytes, dtype=torch.uint8, device=place) for _ in range(2)]


class SendMedium(ABC):
    """The writing half. `slots` are two or more flat uint8 tensors of one size, a multiple of ALIGN.
    A bucket is sent off once it holds `flush_bytes`: small enough that filling, moving and reading overlap."""

    slots: list[Tensor]
    flush_bytes: int

    @abstractmethod
    def offers(self, held: list[Any]) -> list[Any]:
        """One per receiver, in the order of `held`, what they said they hold: how to reach the slots. Picklable."""

    @abstractmethod
    def start(self) -> None:
        """The offers are out: make the slots ready. May wait for the receivers."""

    @abstractmethod
    def publish(self, slot: int, used: int) -> None:
        """The first `used` bytes of a slot are complete; the receivers are told right after this."""

    @abstractmethod
    def settle(self, slot: int) -> None:
        """All receivers have acknowledged a published slot: it may be written again after this."""

    @abstractmethod
    def drop(self) -> None:
        """An update failed: forget what depends on the receivers that took part."""

    @abstractmethod
    def close(self) -> None:
        """Free the slots."""


class ReceiveMedium(ABC):
    """The reading half."""

    holds: Any = None  # what the offer called the slots

    @abstractmethod
    def open(self, offer: Any) -> None:
        """Reach the slots."""

    @abstractmethod
    def fetch(self, slot: int, used: int) -> Tensor:
        """The first `used` bytes of a published slot, [used] uint8, unchanged until `release`."""

    @abstractmethod
    def release(self, slot: int) -> None:
        """All reads of the slot are over, also those still queued on a device, once this returns."""

    @abstractmethod
    def drop(self) -> None:
        """As SendMedium.drop."""

    @abstractmethod
    def close(self) -> None:
        """As SendMedium.close."""
