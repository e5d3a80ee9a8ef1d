"""How bytes travel from a training rank to rollout processes: one protocol, three media.

base.py      the words of the protocol       channel.py   small messages: secret, time-outs, clear errors
buckets.py   tensors <-> buckets             delta.py     only what changed
sender.py    receiver.py                     the protocol itself
shm.py       ipc.py  broadcast.py            the media: host memory, device handles, process group
"""

from __future__ import annotations

import logging
from typing import Literal

from engines.transport.base import Address, Sent, TransportError
from engines.transport.broadcast import BroadcastReceive, BroadcastSend
from engines.transport.buckets import aligned
from engines.transport.delta import DeltaSender
from engines.transport.ipc import IpcReceive, IpcSend, obstacle
from engines.transport.receiver import Receiver
from engines.transport.sender import Sender
from engines.transport.shm import ShmReceive, ShmSend

log = logging.getLogger(__name__)

Transport = Literal["shm", "ipc", "broadcast"]

# name -> (its sending half, its receiving half), given slot bytes, device kind and time-out
MEDIA = {
    "shm": (lambda nbytes, device, timeout_s: ShmSend(nbytes), lambda device, timeout_s: ShmReceive()),
    "ipc": (lambda nbytes, device, timeout_s: IpcSend(nbytes, device), lambda device, timeout_s: IpcReceive(device)),
    "broadcast": (BroadcastSend, BroadcastReceive),
}


def choose(backend: str, device: str, one_device: bool) -> Transport:
    """The transport of a checkpoint-engine backend: `nccl` is a broadcast (NCCL, HCCL or gloo, by device); `naive`
    is this machine: device handles where they work, else shared memory. `one_device`: all roles share one."""
    if backend == "nccl":
        return "broadcast"
    against = obstacle(device, one_device)
    if against is None:
        return "ipc"
    if device != "cpu":
        log.warning("weights travel through shared host memory: %s", against)
    return "shm"


def open_sender(transport: Transport, device: str, bucket_bytes: int, timeout_s: float, delta: bool = False) -> Sender:
    """`bucket_bytes` bounds a slot of the medium; a larger tensor is cut."""
    capacity = aligned(bucket_bytes)
    medium = MEDIA[transport][0](capacity, device, timeout_s)
    sender = Sender(transport, medium, transport == "broadcast", capacity, timeout_s)
    if delta:
        sender.delta = DeltaSender(capacity)
    return sender


def open_receiver(address: Address, device: str, timeout_s: float, name: str) -> Receiver:
    """`device` is where the rollout engine keeps its weights."""
    return Receiver(MEDIA[address.transport][1](device, timeout_s), address, timeout_s, name)


__all__ = ["Address", "Sent", "Transport", "TransportError", "choose", "open_receiver", "open_sender"]
