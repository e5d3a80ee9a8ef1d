"""Broadcast over a process group of its own: source rank 0, then one rank per rollout replica, on any machine.

The group is made from a store directly (gloo on CPU, NCCL, HCCL), beside whatever default group the two processes
belong to: the trainer's and, in a rollout process, vLLM's. It is made when the first update begins and again when the
set of receivers has changed or an update failed. Metadata travels on the control channel.

NCCL and HCCL are untested on devices; their calls are checked against fakes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from engines.transport.base import ReceiveMedium, SendMedium, TransportError, device_slots
from engines.transport.channel import REMEDY, host_ip

FLUSH_BYTES = 256 << 20  # collectives reach their bandwidth well below this
_PATIENCE = 4  # times our time-out: the group's own, so that its watchdog never ends the process before our error


@dataclass(frozen=True)
class GroupOffer:
    """Where the group meets and this receiver's place in it. `rank` None: keep the group called `name`."""

    name: str
    host: str = ""
    port: int = 0
    rank: int | None = None
    size: int = 0
    slot_bytes: int = 0


def _gloo(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
    return dist.ProcessGroupGloo(store, rank, size, timeout)


def _nccl(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout * _PATIENCE
    return dist.ProcessGroupNCCL(store, rank, size, options)


def _hccl(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
    return dist.ProcessGroupHCCL(store, rank, size, timeout * _PATIENCE)  # put there by torch_npu


# device kind -> the constructor of its group
GROUPS: dict[str, Callable[[dist.Store, int, int, timedelta], Any]] = {"cpu": _gloo, "cuda": _nccl, "npu": _hccl}


class _Group:
    """A process group, two slots on the device, and the broadcasts under way in them."""

    def __init__(self, device: str, slot_bytes: int, timeout_s: float) -> None:
        self._kind, self._timeout = device, timedelta(seconds=timeout_s)
        self.slots = device_slots(device, slot_bytes)
        self._group: Any = None
        self._works: dict[int, Any] = {}

    def join(self, store: dist.Store, rank: int, size: int) -> None:
        """Meet the others; returns once all are there."""
        try:
            self._group = GROUPS[self._kind](store, rank, size, self._timeout)
        except RuntimeError as error:
            raise self._broken(f"the group of {size} for weights was not complete", error) from None

    def broadcast(self, slot: int, used: int) -> None:
        # int8: the one byte type that every collective library lists
        self._works[slot] = self._group.broadcast(self.slots[slot][:used].view(torch.int8), 0)

    def wait(self, slot: int) -> None:
        try:
            self._works.pop(slot).wait(self._timeout)
        except RuntimeError as error:
            raise self._broken("a broadcast of weights did not end", error) from None

    def _broken(self, what: str, error: RuntimeError) -> TransportError:
        reason = str(error).splitlines()[0]
        return TransportError(
            f"got {reason!r} within {self._timeout.total_seconds()} s: {what}; expected every process of the update to "
            f"take part; one probably died or hangs: {REMEDY}"
        )

    def leave(self) -> None:
        """Abort what is under way. The slots stay."""
        if self._group is not None:
            self._group.abort()
        self._works.clear()
        self._group = None


class BroadcastSend(SendMedium):
    def __init__(self, slot_bytes: int, device: str, timeout_s: float) -> None:
        self.flush_bytes = FLUSH_BYTES
        self._slot_bytes, self._timeout = slot_bytes, timedelta(seconds=timeout_s)
        self._group = _Group(device, slot_bytes, timeout_s)
        self.slots = self._group.slots
        self._store: dist.TCPStore | None = None
        self._made = 0
        self._members: tuple[str, int] | None = None  # name and number of receivers of the group that exists
        self._wanted: tuple[str, int] | None = None

    def offers(self, held: list[Any]) -> list[Any]:
        if self._members is not None and held == [self._members[0]] * self._members[1]:
            self._wanted = self._members
            return [GroupOffer(self._members[0])] * len(held)
        if self._store is None:
            self._store = dist.TCPStore(host_ip(), 0, None, True, self._timeout, wait_for_workers=False)
        self.drop()
        self._made += 1
        name = f"weights {time.time_ns()} {self._made}"
        self._wanted = (name, len(held))
        host, size = host_ip(), len(held) + 1
        return [
            GroupOffer(name, host, self._store.port, rank, size, self._slot_bytes) for rank in range(1, len(held) + 1)
        ]

    def start(self) -> None:
        if self._members != self._wanted:
            name, receivers = self._wanted
            self._group.join(dist.PrefixStore(name, self._store), 0, receivers + 1)
            self._members = self._wanted

    def publish(self, slot: int, used: int) -> None:
        self._group.broadcast(slot, used)

    def settle(self, slot: int) -> None:
        self._group.wait(slot)

    def drop(self) -> None:
        self._group.leave()
        self._members = None

    def close(self) -> None:
        self.drop()
        self._store, self.slots = None, []


class BroadcastReceive(ReceiveMedium):
    def __init__(self, device: str, timeout_s: float) -> None:
        self._device, self._timeout_s = device, timeout_s
        self._group: _Group | None = None

    def open(self, offer: GroupOffer) -> None:
        if offer.rank is None:
            assert offer.name == self.holds, f"asked to keep the group {offer.name!r}, holds {self.holds!r}"
            return
        self.drop()
        if self._group is None or len(self._group.slots[0]) != offer.slot_bytes:
            self._group = _Group(self._device, offer.slot_bytes, self._timeout_s)
        try:
            store = dist.TCPStore(
                offer.host, offer.port, None, False, timedelta(seconds=self._timeout_s), wait_for_workers=False
            )
        except RuntimeError as error:  # DistStoreError, DistNetworkError
            raise TransportError(
                f"got {str(error).splitlines()[0]!r} from the training rank's store at {offer.host}:{offer.port}; "
                f"expected it to be reachable from this machine; open the port, or {REMEDY}"
            ) from None
        self._group.join(dist.PrefixStore(offer.name, store), offer.rank, offer.size)
        self.holds = offer.name

    def fetch(self, slot: int, used: int) -> Tensor:
        self._group.broadcast(slot, used)
        self._group.wait(slot)
        return self._group.slots[slot][:used]

    def release(self, slot: int) -> None:
        """The next broadcast into a slot queues behind the reads of it, on the same stream."""

    def drop(self) -> None:
        self.holds = None
        if self._group is not None:
            self._group.leave()

    def close(self) -> None:
        self.drop()
        self._group = None
