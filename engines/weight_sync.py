"""Move the trainer's weights into the rollout engines, versioned and verified.

Source rank:  `WeightSender.push(engine, version)`  drains `engine.hf_weights()` into a transport.
Other ranks:  the same call; they take part in the engine's collectives and send nothing.
Rollout:      `WeightReceiver.pull(engine, version)` hands the stream to `engine.load_weights`, which
              verifies that every parameter was written exactly once; only then is the version stamped.

A push serves the receivers that pull during it. When one dies, the push fails on the source rank (after the other
ranks have finished their part), and so do the pulls that had not been confirmed. Everything stays usable: start a new
replica, and push the same version again to every replica whose `engine.version` is not it (`receivers=` says how many).
"""

from __future__ import annotations

import os
import socket
import time
from dataclasses import dataclass

from engines.base import RolloutEngine, TrainEngine
from engines.transport import Address, Sent, Transport, open_receiver, open_sender


class WeightSender:
    """One per training rank. `verify_every` n: every n-th update carries checksums (0: never). `delta` sends only
    what changed, for one more copy of the weights on both ends (transport/delta.py)."""

    def __init__(
        self,
        is_source: bool,
        receivers: int,
        bucket_bytes: int,
        timeout_s: float,
        verify_every: int,
        transport: Transport = "shm",
        device: str = "cpu",
        delta: bool = False,
    ) -> None:
        self._transport = open_sender(transport, device, bucket_bytes, timeout_s, delta) if is_source else None
        self.receivers = receivers
        self._verify_every = verify_every
        self._updates = 0

    @property
    def address(self) -> Address | None:
        """Where the rollout side connects, the same for every update; None on ranks that send nothing."""
        return self._transport.address if self._transport else None

    def push(self, engine: TrainEngine, version: int, receivers: int | None = None) -> Sent | None:
        """Collective over the training ranks; returns what was sent on the source rank. `receivers` is how many
        take part in this update, all of them by default."""
        checksum = self._verify_every > 0 and self._updates % self._verify_every == 0
        self._updates += 1
        if self._transport is None:
            for _ in engine.hf_weights():
                raise AssertionError("a rank that is no weight source yielded a tensor")
            return None
        count = self.receivers if receivers is None else receivers
        return self._transport.send(engine.hf_weights(), version, checksum, count)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()


@dataclass(frozen=True)
class WeightSource:
    """Where a rollout engine fetches its weights, picklable. `name` is what the trainer's errors call the engine,
    `device` where its weights live."""

    address: Address
    timeout_s: float
    name: str
    device: str

    def receiver(self) -> WeightReceiver:
        return WeightReceiver(self.address, self.timeout_s, self.name, self.device)


class WeightReceiver:
    """One per rollout replica. `name` is what the trainer's errors call it, `device` where its weights live."""

    def __init__(self, address: Address, timeout_s: float, name: str | None = None, device: str = "cpu") -> None:
        name = f"{name or 'a rollout worker'} (pid {os.getpid()} on {socket.gethostname()})"
        self._transport = open_receiver(address, device, timeout_s, name)

    def pull(self, engine: RolloutEngine, version: int) -> float:
        """Load one update; returns seconds. On any error the sender is told and the engine stays unusable until
        the next complete update."""
        if version <= engine.version:
            raise ValueError(
                f"got weight version {version}; expected one newer than the loaded {engine.version}; "
                "versions count training steps and never go back"
            )
        start = time.perf_counter()
        try:
            engine.load_weights(self._transport.receive(version), version)
            self._transport.confirm(version)
        except (ValueError, RuntimeError, LookupError) as error:
            self._transport.refuse(str(error))
            raise
        return time.perf_counter() - start

    def close(self) -> None:
        self._transport.close()
