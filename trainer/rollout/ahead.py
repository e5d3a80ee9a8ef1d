"""Who waits for whom: the next step's samples, generated when asked for, or while the last step still trains.

`InTurn` is the synchronous loop. `Ahead` is one-step-off (with `steps` 1): the rollout owns its devices, so batch k+1
is generated with the weights of batch k's start while batch k trains. Both hand out the same batches in the same order.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from queue import Empty, SimpleQueue
from typing import Any

from trainer.rollout.collect import Collected


class InTurn:
    """Collects when asked."""

    def __init__(self, collect: Callable[[], Collected]) -> None:
        self._collect = collect

    def take(self) -> Collected:
        return self._collect()

    def refill(self) -> None:
        pass

    @contextmanager
    def paused(self) -> Iterator[None]:
        yield

    def on_trainer(self, function: Callable[[], Any]) -> Any:
        return function()

    def close(self) -> None:
        pass


class Ahead:
    """Collects up to `steps` batches before they are asked for, one at a time, in a thread.

    A batch is finished under the weights it was begun with: `paused` waits for that. What only the trainer's thread
    may do (calls to the training ranks are collective, so their order matters) the collecting thread hands over by
    `on_trainer`; it is done as soon as the trainer waits.
    """

    def __init__(self, collect: Callable[[], Collected], steps: int) -> None:
        self._collect, self._steps = collect, steps
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rollout-ahead")
        self._batches: deque[Future[Collected]] = deque()
        self._turn = threading.Lock()
        self._errands: SimpleQueue[tuple[Callable[[], Any], Future]] = SimpleQueue()
        self._closed = False

    def _collect_in_turn(self) -> Collected:
        with self._turn:
            if self._closed:
                raise RuntimeError("the run has ended")
            return self._collect()

    def refill(self) -> None:
        """Begin what may be begun under the weights that the rollout holds now."""
        while len(self._batches) < self._steps:
            self._batches.append(self._thread.submit(self._collect_in_turn))

    def take(self) -> Collected:
        """The next batch; raises what went wrong while it was collected."""
        self.refill()
        batch = self._batches.popleft()
        self._serve_until(batch.done)
        return batch.result()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Nothing is being generated inside: weights may change."""
        self._serve_until(lambda: self._turn.acquire(timeout=0.01))
        try:
            yield
        finally:
            self._turn.release()

    def on_trainer(self, function: Callable[[], Any]) -> Any:
        if threading.current_thread() is threading.main_thread():
            return function()
        if self._closed:
            raise RuntimeError("the run has ended")
        done: Future = Future()
        self._errands.put((function, done))
        return done.result()

    def _serve_until(self, ready: Callable[[], bool]) -> None:
        """Wait, and meanwhile do what the collecting thread needs done here."""
        while not ready():
            try:
                function, done = self._errands.get(timeout=0.01)
            except Empty:
                continue
            try:
                done.set_result(function())
            except (RuntimeError, ValueError) as error:
                done.set_exception(error)

    def close(self) -> None:
        """Give up what was not begun; what is being generated ends with its workers."""
        self._closed = True
        for batch in self._batches:
            batch.cancel()
        while not self._errands.empty():
            self._errands.get()[1].set_exception(RuntimeError("the run has ended"))
        self._thread.shutdown(wait=False)
