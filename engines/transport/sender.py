"""The sending end of the protocol in base.py, the same for every medium."""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

from torch import Tensor

from engines.transport.base import Address, Join, SendMedium, Sent, TransportError
from engines.transport.buckets import Bucket, Totals, checksum, pack
from engines.transport.channel import REMEDY, Channel, Door, heard
from engines.transport.delta import DeltaSender


@dataclass
class _Peer:
    channel: Channel
    join: Join


class Sender:
    """One per weight source. A failed update leaves it ready for the next one, with the same or other receivers."""

    def __init__(self, transport: str, medium: SendMedium, reachable: bool, capacity: int, timeout_s: float) -> None:
        self._door = Door(transport, reachable)
        self._medium, self._capacity, self._timeout_s = medium, capacity, timeout_s
        self.delta: DeltaSender | None = None  # set it to switch delta mode on

    @property
    def address(self) -> Address:
        """The same from construction to close."""
        return self._door.address

    def send(self, stream: Iterable[tuple[str, Tensor]], version: int, check: bool, receivers: int) -> Sent:
        """Send every tensor of `stream` to the next `receivers` that ask for `version`; returns when all of them have
        verified it. With `check` each bucket carries a checksum. After a TransportError the stream has been read to
        its end all the same: its producers may be collective."""
        tensors = iter(stream)
        peers: list[_Peer] = []
        try:
            self._welcome(peers, version, receivers)
            return _Update(self._medium, peers, version).run(tensors, self._capacity, check, self.delta)
        except TransportError as error:
            self._give_up(peers, str(error))
            for _ in tensors:
                pass
            raise
        except (ValueError, RuntimeError) as error:
            self._give_up(peers, f"the training rank failed: {error}")
            raise
        finally:
            for peer in peers:
                peer.channel.close()

    def _welcome(self, peers: list[_Peer], version: int, receivers: int) -> None:
        """Let receivers in until all are there. One that asks for another version is told so and sent away."""
        deadline = time.monotonic() + self._timeout_s
        astray = []
        while len(peers) < receivers:
            channel = self._door.accept(deadline)
            if channel is None:
                found = ", ".join(peer.channel.who for peer in peers) or "none"
                raise TransportError(
                    f"got {len(peers)} of {receivers} rollout workers ({found}) for version {version} within "
                    f"{self._timeout_s} s{''.join(astray)}; expected all of them; {REMEDY}"
                )
            try:
                (kind, join) = channel.receive()
                assert kind == "join", f"weight channel out of step: got {kind!r}, expected 'join'"
            except TransportError:
                channel.close()  # gone again: its replacement may follow
                continue
            channel.who = join.name
            channel.wait_at_most(self._timeout_s)
            if join.version == version:
                peers.append(_Peer(channel, join))
                continue
            astray.append(f"; {join.name} asked for version {join.version}")
            text = f"the trainer is sending version {version}; trainer and rollout are out of step"
            _tell_quietly(channel, ("abort", text))
            channel.close()

    def _give_up(self, peers: list[_Peer], text: str) -> None:
        for peer in peers:
            _tell_quietly(peer.channel, ("abort", text))
        self._medium.drop()

    def close(self) -> None:
        self._door.close()
        self._medium.close()


class _Update:
    """One version on its way to `peers`. Buckets take the slots in turn; a slot is filled again once every receiver
    has acknowledged it, so the next bucket is gathered while the last one is read."""

    def __init__(self, medium: SendMedium, peers: list[_Peer], version: int) -> None:
        self._medium, self._peers, self._version = medium, peers, version
        self._where = f" before the first bucket of version {version}"
        self._buckets = self._wire_bytes = 0
        self._slots = len(medium.slots)

    def run(self, tensors: Iterable[tuple[str, Tensor]], capacity: int, check: bool, delta: DeltaSender | None) -> Sent:
        self._begin(delta)
        totals = Totals()

        def next_buffer() -> Tensor:
            return self._free_slot() if delta is None else delta.staging

        for bucket in pack(tensors, next_buffer, capacity, self._medium.flush_bytes, totals):
            crc = checksum(bucket.flat[: bucket.used]) if check or delta else None
            self._publish(bucket, crc, delta)
        self._tell(("end", totals.tensors, totals.nbytes))
        for late in range(max(0, self._buckets - self._slots), self._buckets):
            self._acknowledged(late % self._slots)
        for peer in self._peers:
            self._expect(peer, ("done",))
        if delta is not None:
            delta.finish(self._version)
        return Sent(totals.tensors, totals.nbytes, self._buckets, self._wire_bytes)

    def _begin(self, delta: DeltaSender | None) -> None:
        offers = self._medium.offers([peer.join.holds for peer in self._peers])
        kept = (None, False)
        if delta is not None:
            kept = (delta.identity, delta.begin([peer.join.base for peer in self._peers]))
        for peer, offer in zip(self._peers, offers, strict=True):
            self._send(peer, ("begin", offer, kept))
        try:
            self._medium.start()
        except TransportError as error:
            raise TransportError(f"{error}; in it were {', '.join(peer.channel.who for peer in self._peers)}") from None
        for peer in self._peers:
            self._expect(peer, ("ready",))

    def _free_slot(self) -> Tensor:
        slot = self._buckets % self._slots
        if self._buckets >= self._slots:
            self._acknowledged(slot)
        return self._medium.slots[slot]

    def _publish(self, bucket: Bucket, crc: int | None, delta: DeltaSender | None) -> None:
        used, patch = bucket.used, None
        if delta is not None:
            used, patch = delta.encode(bucket, self._free_slot())
        slot = self._buckets % self._slots
        self._where = f" in version {self._version}, bucket {self._buckets}, which ends with {bucket.records[-1].name}"
        self._medium.publish(slot, used)
        self._tell(("bucket", slot, bucket.records, used, crc, patch))
        self._buckets += 1
        self._wire_bytes += used

    def _acknowledged(self, slot: int) -> None:
        for peer in self._peers:
            self._expect(peer, ("ack", slot))
        self._medium.settle(slot)

    def _tell(self, message: tuple) -> None:
        for peer in self._peers:
            self._send(peer, message)

    def _send(self, peer: _Peer, message: tuple) -> None:
        try:
            peer.channel.send(message, self._where)
        except TransportError:
            while True:  # prefer the reason it left behind, after the acknowledgements nobody read yet
                heard(peer.channel, self._where)

    def _expect(self, peer: _Peer, expected: tuple) -> None:
        message = heard(peer.channel, self._where)
        assert message == expected, f"weight channel out of step: got {message!r}, expected {expected!r}"


def _tell_quietly(channel: Channel, message: tuple) -> None:
    """For a peer that may be gone: the update has failed already and its own error is the one to report."""
    with suppress(TransportError):
        channel.send(message)
