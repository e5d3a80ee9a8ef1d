"""Is the endpoint there? After many failures in a row scoring pauses and only a probe goes out."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from trainer.reward.judge.endpoint import EndpointError
from trainer.reward.stopped import ScoringStopped

logger = logging.getLogger(__name__)

FAILURES_IN_A_ROW = 20


class Health:
    """The gate in front of all requests. Lives in one event loop.

    It closes after FAILURES_IN_A_ROW failed requests and opens when `probe` succeeds, tried every `probe_s`. The time
    without any successful request is counted from its first failure; after `max_down_s` everybody who waits gets
    ScoringStopped.
    """

    def __init__(self, probe: Callable[[], Awaitable[None]], probe_s: float, max_down_s: float) -> None:
        self._probe, self._probe_s, self._max_down_s = probe, probe_s, max_down_s
        self._open = asyncio.Event()
        self._open.set()
        self._failures = 0
        self._down_since: float | None = None
        self._stopped: str | None = None
        self._prober: asyncio.Task[None] | None = None

    async def wait_until_up(self) -> None:
        await self._open.wait()
        if self._stopped is not None:
            raise ScoringStopped(self._stopped)

    def succeeded(self) -> None:
        self._failures, self._down_since = 0, None

    def failed(self, error: EndpointError) -> bool:
        """Note a failed request. True when scoring pauses: then the request did not count and is to be repeated."""
        if not self._open.is_set():
            return True
        self._failures += 1
        self._down_since = self._down_since or time.monotonic()
        if self._failures < FAILURES_IN_A_ROW:
            return False
        self._open.clear()
        self._prober = asyncio.create_task(self._probe_until_up(error))
        return True

    def close(self) -> None:
        if self._prober is not None:
            self._prober.cancel()

    async def _probe_until_up(self, error: EndpointError) -> None:
        assert self._down_since is not None, "the gate closes after a failure"
        logger.warning("the judge failed %d times in a row (%s); scoring pauses", self._failures, error)
        try:
            while time.monotonic() - self._down_since < self._max_down_s:
                await asyncio.sleep(self._probe_s)
                try:
                    await self._probe()
                except EndpointError as down:
                    error = down
                else:
                    logger.warning("the judge answers again after %.0f s", time.monotonic() - self._down_since)
                    self._failures = 0
                    return
            self._stopped = (
                f"got no answer of the judge for {time.monotonic() - self._down_since:.0f} s, last: {error}; expected "
                f"one within rewards.llm_judge.max_down_s={self._max_down_s:g}; mend the endpoint and resume the run"
            )
        finally:
            self._open.set()  # whatever ends the probing, nobody waits for ever
