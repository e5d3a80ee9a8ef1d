"""Scoring processes that may hang or die without harm: each has a thread that watches and replaces it.

A time limit inside a process cannot be trusted: some inputs keep the interpreter in one C call where
no signal handler runs. So the watching thread waits with a limit and kills the process (SIGKILL).
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import queue
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from multiprocessing import connection
from pathlib import Path
from typing import Any

from trainer.reward.result import RewardResult

logger = logging.getLogger(__name__)

START_SECONDS = 300.0  # a process imports sympy (or the user's module) before it is ready
ROOT = Path(__file__).resolve().parents[2]
HIDDEN = {"CUDA_VISIBLE_DEVICES": "", "ASCEND_RT_VISIBLE_DEVICES": ""}  # scorers never touch an accelerator


class ScorerError(Exception):
    """The scorer raised; the text is its traceback."""


class WorkerDied(Exception):
    """The process ended without an answer."""


@dataclass(frozen=True)
class Target:
    """The scorer to build in each process: `module.name(**arguments)`."""

    module: str
    name: str
    arguments: dict[str, Any]


@dataclass
class PoolStats:
    """Since they were last taken. `latencies` are seconds per answer, waiting excluded; `more` is the scorer's own."""

    latencies: list[float] = field(default_factory=list)
    queue_max: int = 0
    timeouts: int = 0
    failed: int = 0
    more: dict[str, float] = field(default_factory=dict)


@dataclass
class _Job:
    message: bytes  # pickled in the caller's thread, where a mistake can be raised
    future: Future[RewardResult]


class WorkerPool:
    """`size` scoring processes. `submit` never blocks and may be called from any thread.

    A job over `timeout_s` seconds gives score 0 with reason `timeout`. A process that dies is replaced
    and its job repeated once; after a second death the result is `failed` with reason `worker_died`.
    An exception of the scorer becomes the future's ScorerError.
    """

    def __init__(self, target: Target, size: int, timeout_s: float) -> None:
        self._setup = pickle.dumps((target.module, target.name, target.arguments))
        self._timeout_s = timeout_s
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._closed = False
        self._stats = PoolStats()
        self._children: set[_Child] = set()
        self._threads = [
            threading.Thread(target=self._watch, name=f"reward-{target.name}-{i}", daemon=True) for i in range(size)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, *arguments: Any) -> Future[RewardResult]:
        job = _Job(pickle.dumps(arguments), Future())
        with self._lock:
            if self._closed:
                raise RuntimeError("the reward pool is closed")
            self._jobs.put(job)
            self._stats.queue_max = max(self._stats.queue_max, self._jobs.qsize())
        return job.future

    def take_stats(self) -> PoolStats:
        with self._lock:
            stats, self._stats = self._stats, PoolStats()
        return stats

    def close(self) -> None:
        """Cancel what waits, kill every process, and return when all are gone."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for child in self._children:
                child.process.kill()
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()

    def _watch(self) -> None:
        """Body of one watching thread: owns at most one process at any time."""
        child = self._start()
        while (job := self._jobs.get()) is not None:
            if self._closed:
                job.future.cancel()
            elif job.future.set_running_or_notify_cancel():
                child = self._serve(child, job)
        self._stop(child)

    def _serve(self, child: _Child | None, job: _Job) -> _Child | None:
        """Answer one job and return the process to go on with."""
        started = time.monotonic()
        for attempt in range(2):
            try:
                child = child or self._start()
                if child is None:
                    raise WorkerDied
                child.wait_until_ready()
                started = time.monotonic()
                reply = child.ask(job.message, self._timeout_s)
                break
            except TimeoutError:
                reply = RewardResult(0.0, 0.0, None, "timeout")
                self._stop(child)
                child = None
                break
            except WorkerDied:
                reply = RewardResult(0.0, None, None, "worker_died", failed=True)
                self._stop(child)
                child = None
                if self._closed:
                    break
                logger.warning("a scoring process died%s", "; its job is repeated once" if attempt == 0 else " again")
        self._finish(job, reply, time.monotonic() - started)
        return child or self._start()

    def _finish(self, job: _Job, reply: RewardResult | str, seconds: float) -> None:
        failed = isinstance(reply, str) or reply.failed
        with self._lock:
            self._stats.latencies.append(seconds)
            self._stats.timeouts += not failed and reply.reason == "timeout"
            self._stats.failed += failed
        if isinstance(reply, str):
            job.future.set_exception(ScorerError(reply))
        else:
            job.future.set_result(replace(reply, seconds=seconds))

    def _start(self) -> _Child | None:
        with self._lock:
            if self._closed:
                return None
            try:
                child = _Child(self._setup)
            except OSError as error:  # no memory or too many processes: the next job tries again
                logger.error("a scoring process could not start: %s", error)
                return None
            self._children.add(child)
            return child

    def _stop(self, child: _Child | None) -> None:
        if child is not None:
            child.kill()
            with self._lock:
                self._children.discard(child)


class _Child:
    """One scoring process and the connection to it."""

    def __init__(self, setup: bytes) -> None:
        self._ready = False
        self._connection, theirs = connection.Pipe()
        path = os.pathsep.join(part for part in (str(ROOT), os.environ.get("PYTHONPATH", "")) if part)
        # The fixed hash seed makes the order inside sympy's sets, and so every verdict, repeatable.
        environment = {**os.environ, **HIDDEN, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "trainer.reward.worker", str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env=environment,
            )
        with contextlib.suppress(OSError):  # a process that is dead already shows when its answer is awaited
            self._connection.send_bytes(setup)

    def wait_until_ready(self) -> None:
        """Block until the scorer is built. WorkerDied when that fails."""
        if not self._ready:
            if not self._connection.poll(START_SECONDS):
                raise WorkerDied
            self._receive()
            self._ready = True

    def ask(self, message: bytes, timeout_s: float) -> RewardResult | str:
        """One answer. TimeoutError or WorkerDied."""
        try:
            self._connection.send_bytes(message)
        except OSError as error:
            raise WorkerDied from error
        if not self._connection.poll(timeout_s):
            raise TimeoutError
        return self._receive()

    def _receive(self) -> Any:
        try:
            return self._connection.recv()
        except (EOFError, OSError) as error:
            raise WorkerDied from error

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self._connection.close()
