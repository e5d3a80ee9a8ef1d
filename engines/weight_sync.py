"""Move the trainer's weights into the rollout engines, versioned and verified.

Source rank:  `WeightSender.push(engine, version)`  drains `engine.hf_weights()` into a transport.
Other ranks:  the same call; they take part in the engine's collectives and send nothing.
Rollout:      `WeightReceiver.pull(engine, version)` hands the stream to `engine.load_weights`, which
              verifies that every parameter was written exactly once; only then is the version stamped.
"""

from __future__ import annotations

import time

from engines.base import RolloutEngine, TrainEngine
from engines.transport.shm import Address, Sent, ShmReceiver, ShmSender


class WeightSender:
    """One per training rank. `verify_every` n: every n-th update carries checksums (0: never)."""

    def __init__(self, is_source: bool, receivers: int, bucket_bytes: int, timeout_s: float, verify_every: int) -> None:
        self._transport = ShmSender(receivers, bucket_bytes, timeout_s) if is_source else None
        self._verify_every = verify_every
        self._updates = 0

    @property
    def address(self) -> Address | None:
        """Where the rollout side connects; None on ranks that send nothing."""
        return self._transport.address if self._transport else None

    def push(self, engine: TrainEngine, version: int) -> Sent | None:
        """Collective over the training ranks; returns what was sent on the source rank."""
        checksum = self._verify_every > 0 and self._updates % self._verify_every == 0
        self._updates += 1
        if self._transport is None:
            for _ in engine.hf_weights():
                raise AssertionError("a rank that is no weight source yielded a tensor")
            return None
        return self._transport.send(engine.hf_weights(), version, checksum)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()


class WeightReceiver:
    """One per rollout replica."""

    def __init__(self, address: Address, timeout_s: float) -> None:
        self._transport = ShmReceiver(address, timeout_s)

    def pull(self, engine: RolloutEngine, version: int) -> float:
        """Load one update; returns seconds. On any error the sender is told and the engine stays unusable."""
        if version <= engine.version:
            raise ValueError(
                f"got weight version {version}; expected one newer than the loaded {engine.version}; "
                "versions count training steps and never go back"
            )
        start = time.perf_counter()
        try:
            engine.load_weights(self._transport.receive(version), version)
        except (ValueError, RuntimeError) as error:
            self._transport.refuse(str(error))
            raise
        self._transport.confirm(version)
        return time.perf_counter() - start

    def close(self) -> None:
        self._transport.close()
