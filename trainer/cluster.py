"""Ray owns processes: start or join a cluster, place workers, call them, and fail once and cleanly.

This is the only file that imports ray. Groups of workers are driven by plain method names; whatever
goes wrong in one of them ends as a single `WorkerFailed` that carries that worker's own traceback.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

log = logging.getLogger(__name__)

# After one worker failed its peers usually fail too (a closed connection, a time-out). Waiting this long
# for the others lets the cause be told from the echo.
GRACE_S = 3.0
ECHOES = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "closed the weight channel",
    "Timed out waiting",
)


Call = tuple[str, int, str]  # group, worker index, method


class WorkerFailed(RuntimeError):
    """A worker raised or died; the text is its traceback. `dead` holds (group, index) of processes that are gone."""

    def __init__(self, text: str, dead: frozenset[tuple[str, int]] = frozenset()) -> None:
        super().__init__(text)
        self.dead = dead


@dataclass(frozen=True)
class Lost:
    """In the place of an item: this worker's stream ended because the process died, or was silent for too long."""

    why: str


@dataclass(frozen=True)
class Pool:
    """`count` bundles of `size` devices each; `resource` is CPU, GPU or NPU."""

    count: int
    resource: str
    size: int = 1


class Cluster:
    """Joins the cluster of RAY_ADDRESS, or starts one on this machine that ends with this process."""

    def __init__(self, bundles: int, env: dict[str, str], runtime_env: dict[str, Any] | None = None) -> None:
        worker_env = {**env, **(runtime_env or {}).get("env_vars", {})}
        options: dict[str, Any] = {
            "runtime_env": {**(runtime_env or {}), "env_vars": worker_env},
            "log_to_driver": True,
            "logging_level": logging.ERROR,
        }
        if "RAY_ADDRESS" not in os.environ:
            # Ranks are processes, not cores: more of them than cores is allowed (and warned about earlier).
            options |= {"address": "local", "num_cpus": max(os.cpu_count() or 1, bundles), "include_dashboard": False}
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        ray.init(**options)
        self._groups: list[WorkerGroup] = []

    def place(self, pool: Pool, timeout_s: float = 60.0) -> PlacementGroup:
        """Reserve the pool's bundles; waits until they are free."""
        size = float(pool.size)
        bundles = [{"CPU": size} | ({pool.resource: size} if pool.resource != "CPU" else {}) for _ in range(pool.count)]
        placement = placement_group(bundles, strategy="PACK")
        if not placement.wait(timeout_seconds=timeout_s):
            raise ValueError(
                f"got no place for {pool.count} x {bundles[0]} within {timeout_s:g} s; expected free resources; "
                f"the cluster has {ray.available_resources()}: lower trainer.n_gpus_per_node or trainer.nnodes"
            )
        return placement

    def release(self, placement: PlacementGroup) -> None:
        remove_placement_group(placement)

    def spawn(
        self,
        name: str,
        worker: type,
        placement: PlacementGroup,
        arguments: Sequence[tuple],
        share: float,
        stride: int = 1,
    ) -> WorkerGroup:
        """One process per entry of `arguments`, in every `stride`-th of the placement's bundles; `share` is how many
        devices each takes (colocated groups have a part of one)."""
        device = next((key for key in placement.bundle_specs[0] if key != "CPU"), None)

        def make(index: int) -> Any:
            bundle = index * stride % len(placement.bundle_specs)
            return (
                ray.remote(worker)
                .options(
                    num_cpus=share if device is None else 0,
                    resources={"NPU": share} if device == "NPU" else None,
                    num_gpus=share if device == "GPU" else 0,
                    scheduling_strategy=PlacementGroupSchedulingStrategy(placement, bundle),
                    max_concurrency=1,
                )
                .remote(*arguments[index])
            )

        group = WorkerGroup(name, {index: make(index) for index in range(len(arguments))}, make)
        self._groups.append(group)
        return group

    def shutdown(self) -> None:
        """Kill the workers and leave (or end) the cluster. Safe to call twice."""
        for group in self._groups:
            group.kill()
        self._groups.clear()
        if ray.is_initialized():
            ray.shutdown()


class Pending:
    """Calls under way; `wait` returns their results in worker order."""

    def __init__(self, group: WorkerGroup, method: str, refs: dict[int, ray.ObjectRef]) -> None:
        self.calls = {ref: (group.name, index, method) for index, ref in refs.items()}
        self.refs = list(refs.values())

    def wait(self) -> list[Any]:
        return wait(self)[0]


class WorkerGroup:
    """The workers of one role, or some of them. `make` starts the process with a given index."""

    def __init__(self, name: str, handles: dict[int, Any], make: Callable[[int], Any]) -> None:
        self.name = name
        self._handles, self._make = handles, make

    def __len__(self) -> int:
        return len(self._handles)

    @property
    def indices(self) -> list[int]:
        return list(self._handles)

    def only(self, indices: Sequence[int]) -> WorkerGroup:
        """The same workers, fewer of them."""
        return WorkerGroup(self.name, {index: self._handles[index] for index in indices}, self._make)

    def respawn(self, index: int) -> None:
        """A fresh process in the place of one that died or hangs; returns before it is ready."""
        ray.kill(self._handles[index])
        self._handles[index] = self._make(index)

    def start(self, method: str, *args: Any) -> Pending:
        """Call every worker with the same arguments."""
        return self.start_each(method, [args] * len(self))

    def start_each(self, method: str, arguments: Sequence[tuple]) -> Pending:
        """Call the workers in order, each with its own arguments."""
        assert len(arguments) == len(self), f"{len(arguments)} argument tuples for {len(self)} workers"
        calls = zip(self._handles.items(), arguments, strict=True)
        return Pending(self, method, {index: getattr(h, method).remote(*each) for (index, h), each in calls})

    def call(self, method: str, *args: Any) -> list[Any]:
        return self.start(method, *args).wait()

    def call_each(self, method: str, arguments: Sequence[tuple]) -> list[Any]:
        return self.start_each(method, arguments).wait()

    def streams(self, method: str, idle_s: float) -> Streams:
        return Streams(self, method, idle_s)

    def handle(self, index: int) -> Any:
        return self._handles[index]

    def kill(self) -> None:
        for handle in self._handles.values():
            ray.kill(handle)


class Streams:
    """Items of the workers' generators as they come, from all of them at once: (worker index, item).

    A worker that dies, or gives nothing for `idle_s` seconds, ends with a `Lost` in the place of an item; a worker
    that raises ends the iteration with WorkerFailed. Streams may be opened while the iteration goes on.
    """

    def __init__(self, group: WorkerGroup, method: str, idle_s: float) -> None:
        self._group, self._method, self._idle_s = group, method, idle_s
        self._open: dict[Any, int] = {}
        self._heard: dict[int, float] = {}

    def open(self, index: int, *args: Any) -> None:
        call = getattr(self._group.handle(index), self._method).options(num_returns="streaming")
        self._open[call.remote(*args)] = index
        self._heard[index] = time.monotonic()

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        while self._open:
            ready, _ = ray.wait(list(self._open), num_returns=1, timeout=1.0)
            for stream in ready:
                index = self._open[stream]
                self._heard[index] = time.monotonic()
                try:
                    item = ray.get(next(stream))
                except StopIteration:
                    del self._open[stream]
                    continue
                except RayActorError as error:
                    del self._open[stream]
                    item = Lost(f"{self._group.name} {index} died in {self._method}(): {error}")
                except RayTaskError as error:
                    raise _failure([((self._group.name, index, self._method), error)]) from None
                yield index, item
            yield from self._silent()

    def _silent(self) -> Iterator[tuple[int, Lost]]:
        for stream, index in list(self._open.items()):
            if time.monotonic() - self._heard[index] > self._idle_s:
                del self._open[stream]
                yield (
                    index,
                    Lost(f"{self._group.name} {index} gave nothing for {self._idle_s:g} s in {self._method}()"),
                )


def put(value: Any) -> ray.ObjectRef:
    """Ship a value once when several workers need it."""
    return ray.put(value)


def wait(*pending: Pending) -> list[list[Any]]:
    """Results of several groups of calls that run side by side. The first failure ends the wait."""
    calls = {ref: call for each in pending for ref, call in each.calls.items()}
    open_refs = list(calls)
    failures: list[tuple[Call, Exception]] = []
    deadline = float("inf")
    while open_refs and time.monotonic() < deadline:
        ready, open_refs = ray.wait(open_refs, num_returns=1, timeout=None if not failures else 0.1)
        for ref in ready:
            try:
                ray.get(ref)
            except (RayTaskError, RayActorError) as error:
                failures.append((calls[ref], error))
                deadline = min(deadline, time.monotonic() + GRACE_S)
    if failures:
        raise _failure(failures)
    return [ray.get(each.refs) for each in pending]


def _failure(failures: list[tuple[Call, Exception]]) -> WorkerFailed:
    """The cause among several failures: a death first, then an error of its own, then an echo of a peer's."""

    def rank(failure: tuple[Call, Exception]) -> int:
        error = failure[1]
        if isinstance(error, RayActorError):
            return 0
        return 2 if any(echo in str(error) for echo in ECHOES) else 1

    (name, index, method), error = min(failures, key=rank)
    dead = frozenset(call[:2] for call, each in failures if isinstance(each, RayActorError))
    if dead:
        return WorkerFailed(f"{name} {index} in {method}(): the process died.\n{error}", dead)
    return WorkerFailed(f"{name} {index} in {method}() failed:\n{error}")
