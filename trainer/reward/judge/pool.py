"""Scorers that wait for others instead of computing: many at once in one thread, none in a process of its own."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Coroutine
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from trainer.prompts.row import Row
from trainer.reward.pool import PoolStats
from trainer.reward.result import RewardResult

Value = TypeVar("Value")


class AsyncScorer(Protocol):
    """All coroutines run in the pool's event loop."""

    async def start(self) -> None: ...

    async def __call__(self, text: str, row: Row, think_open: bool) -> RewardResult: ...

    async def close(self) -> None: ...

    def take_metrics(self) -> dict[str, float]: ...


class AsyncPool:
    """The interface of WorkerPool, with up to `concurrency` answers in scoring at a time.

    The constructor returns when the scorer has started and raises what its `start` raises. It runs no code of others
    and bounds its own waiting, so it needs no process to kill. An exception of the scorer becomes the future's.
    """

    def __init__(self, scorer: AsyncScorer, concurrency: int) -> None:
        self._scorer = scorer
        self._lock = threading.Lock()
        self._closed = False
        self._waiting = 0
        self._stats = PoolStats()
        self._slots = asyncio.Semaphore(concurrency)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="reward-async", daemon=True)
        self._thread.start()
        try:
            self._run(scorer.start())
        except BaseException:
            self.close()
            raise

    def submit(self, text: str, row: Row, think_open: bool) -> Future[RewardResult]:
        with self._lock:
            if self._closed:
                raise RuntimeError("the reward pool is closed")
            self._waiting += 1
            self._stats.queue_max = max(self._stats.queue_max, self._waiting)
            return asyncio.run_coroutine_threadsafe(self._score(text, row, think_open), self._loop)

    def take_stats(self) -> PoolStats:
        with self._lock:
            stats, self._stats = self._stats, PoolStats()
        stats.more = self._scorer.take_metrics()
        return stats

    def close(self) -> None:
        """Cancel what is not scored yet and return when the thread has ended."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._run(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, coroutine: Coroutine[Any, Any, Value]) -> Value:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    async def _score(self, text: str, row: Row, think_open: bool) -> RewardResult:
        async with self._slots:
            with self._lock:
                self._waiting -= 1
            started = time.monotonic()
            result = await self._scorer(text, row, think_open)
        seconds = time.monotonic() - started
        with self._lock:
            self._stats.latencies.append(seconds)
            self._stats.failed += result.failed
        return replace(result, seconds=seconds)

    async def _end(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self._scorer.close()
