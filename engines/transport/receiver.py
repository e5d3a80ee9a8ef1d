"""The receiving end of the protocol in base.py, the same for every medium."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import NoReturn

from torch import Tensor

from engines.transport.base import Address, Join, ReceiveMedium, TransportError
from engines.transport.buckets import Unpacker, checksum
from engines.transport.channel import Channel, connect
from engines.transport.delta import DeltaReceiver

# A hanging replica is known to the sender only: its time-out ends first, and the others hear whose fault it is.
_PATIENCE = 1.5


class Receiver:
    """One per rollout replica. `name` is what the sender's errors call it."""

    def __init__(self, medium: ReceiveMedium, address: Address, timeout_s: float, name: str) -> None:
        self._medium, self._address, self._timeout_s, self._name = medium, address, _PATIENCE * timeout_s, name
        self._delta = DeltaReceiver()
        self._channel: Channel | None = None
        self._stamp: object = None
        self._where = ""
        self._complete = False

    def receive(self, version: int) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor) of one update; a tensor is valid until the next item is asked for. `confirm` or
        `refuse` must follow."""
        self._complete, self._where = False, f" before the first bucket of version {version}"
        self._channel = connect(self._address, self._timeout_s)
        self._say(("join", Join(self._name, version, self._medium.holds, self._delta.stamp)))
        _, offer, (identity, patching) = self._hear("begin")
        self._medium.open(offer)
        self._delta.begin(patching)
        self._say(("ready",))
        unpacker, bucket = Unpacker(), 0
        while (message := self._hear("bucket", "end"))[0] == "bucket":
            _, slot, records, used, crc, patch = message
            self._where = f" in version {version}, bucket {bucket}, after {unpacker.last}"
            flat = self._fetch(slot, used)
            if patch is not None:
                flat = self._delta.decode(flat, patch, crc)
            elif crc is not None and checksum(flat) != crc:
                raise TransportError(
                    f"got bucket {bucket} ({used} bytes, {records[0].name} to {records[-1].name}) with another "
                    "checksum; expected the sender's: the weights changed on the way; run the update again"
                )
            yield from unpacker.read(flat, records)
            self._medium.release(slot)
            self._where = f" in version {version}, bucket {bucket}, after {unpacker.last}"
            self._say(("ack", slot))
            bucket += 1
        seen = (unpacker.totals.tensors, unpacker.totals.nbytes)
        if seen != message[1:]:
            raise TransportError(f"got {seen} tensors and bytes; expected {message[1:]}; run the update again")
        self._complete, self._stamp = True, (identity, version)

    def _hear(self, *wanted: str) -> tuple:
        """The next message, which is of a wanted kind."""
        message = self._channel.receive(self._where)
        if message[0] == "abort":
            raise TransportError(f"{self._channel.who} gave the update up{self._where}: {message[1]}")
        assert message[0] in wanted, f"weight channel out of step: got {message[0]!r}, expected {wanted}"
        return message

    def _say(self, message: tuple) -> None:
        try:
            self._channel.send(message, self._where)
        except TransportError:
            self._raise_reason()

    def _fetch(self, slot: int, used: int) -> Tensor:
        try:
            return self._medium.fetch(slot, used)
        except TransportError:
            self._raise_reason()

    def _raise_reason(self) -> NoReturn:
        """A broken connection says little: prefer what the sender said last, or that it is dead or silent."""
        while True:
            self._hear("bucket", "end")

    def confirm(self, version: int) -> None:
        """The model holds this version: nothing was missing, doubled or unknown."""
        assert self._complete, f"version {version} was confirmed before its stream was read to the end"
        self._delta.finish(self._stamp)
        self._say(("done",))
        self._hang_up()

    def refuse(self, text: str) -> None:
        """Tell the sender why this update failed, when it can still be reached."""
        self._medium.drop()
        if self._channel is not None:
            with suppress(TransportError):  # gone: then its end is what failed, and the caller raises that already
                self._channel.send(("error", text))
        self._hang_up()

    def _hang_up(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def close(self) -> None:
        self._hang_up()
        self._medium.close()
