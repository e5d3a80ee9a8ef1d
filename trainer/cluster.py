"""Ray owns processes: start or join a cluster, place workers, call them, and fail once and cleanly.

This is the only file that imports ray. Groups of workers are driven by plain method names; whatever
goes wrong in one of them ends as a single `WorkerFailed` that carries that worker's own traceback.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Sequence
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


class WorkerFailed(RuntimeError):
    """A worker raised or died; the text is its traceback."""


@dataclass(frozen=True)
class Pool:
    """`count` devices, one bundle each; `resource` is CPU, GPU or NPU."""

    count: int
    resource: str


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
        bundles = [{"CPU": 1.0} | ({pool.resource: 1.0} if pool.resource != "CPU" else {}) for _ in range(pool.count)]
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
        self, name: str, worker: type, placement: PlacementGroup, arguments: Sequence[tuple], share: float
    ) -> WorkerGroup:
        """One process per entry of `arguments`, in the placement's bundles in order; `share` is the part of a
        device each takes (colocated groups share)."""
        device = next((key for key in placement.bundle_specs[0] if key != "CPU"), None)
        handles = [
            ray.remote(worker)
            .options(
                name=f"{name}_{index}",
                num_cpus=share if device is None else 0,
                resources={"NPU": share} if device == "NPU" else None,
                num_gpus=share if device == "GPU" else 0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(placement, index % len(placement.bundle_specs)),
                max_concurrency=1,
            )
            .remote(*each)
            for index, each in enumerate(arguments)
        ]
        group = WorkerGroup(name, handles)
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

    def __init__(self, group: WorkerGroup, method: str, refs: list[ray.ObjectRef]) -> None:
        self.labels = {ref: f"{group.name} {index} in {method}()" for index, ref in enumerate(refs)}
        self.refs = refs

    def wait(self) -> list[Any]:
        return wait(self)[0]


class WorkerGroup:
    """The workers of one role."""

    def __init__(self, name: str, handles: list[Any]) -> None:
        self.name = name
        self.handles = handles

    def __len__(self) -> int:
        return len(self.handles)

    def start(self, method: str, *args: Any) -> Pending:
        """Call every worker with the same arguments."""
        return self.start_each(method, [args] * len(self))

    def start_each(self, method: str, arguments: Sequence[tuple]) -> Pending:
        """Call worker i with arguments[i]."""
        assert len(arguments) == len(self.handles), f"{len(arguments)} argument tuples for {len(self.handles)} workers"
        return Pending(
            self, method, [getattr(h, method).remote(*each) for h, each in zip(self.handles, arguments, strict=True)]
        )

    def call(self, method: str, *args: Any) -> list[Any]:
        return self.start(method, *args).wait()

    def call_each(self, method: str, arguments: Sequence[tuple]) -> list[Any]:
        return self.start_each(method, arguments).wait()

    def stream(self, method: str, arguments: Sequence[tuple]) -> Iterator[Any]:
        """Items of the workers' generators as they come, from all workers at once."""
        streams = {
            getattr(handle, method).options(num_returns="streaming").remote(*each): index
            for index, (handle, each) in enumerate(zip(self.handles, arguments, strict=True))
        }
        while streams:
            ready, _ = ray.wait(list(streams), num_returns=1)
            stream = ready[0]
            label = f"{self.name} {streams[stream]} in {method}()"
            try:
                yield ray.get(next(stream))
            except StopIteration:
                del streams[stream]
            except (RayTaskError, RayActorError) as error:
                raise _failure([(label, error)]) from None

    def kill(self) -> None:
        for handle in self.handles:
            ray.kill(handle)


def put(value: Any) -> ray.ObjectRef:
    """Ship a value once when several workers need it."""
    return ray.put(value)


def wait(*pending: Pending) -> list[list[Any]]:
    """Results of several groups of calls that run side by side. The first failure ends the wait."""
    labels = {ref: label for each in pending for ref, label in each.labels.items()}
    open_refs = list(labels)
    failures: list[tuple[str, Exception]] = []
    deadline = float("inf")
    while open_refs and time.monotonic() < deadline:
        ready, open_refs = ray.wait(open_refs, num_returns=1, timeout=None if not failures else 0.1)
        for ref in ready:
            try:
                ray.get(ref)
            except (RayTaskError, RayActorError) as error:
                failures.append((labels[ref], error))
                deadline = min(deadline, time.monotonic() + GRACE_S)
    if failures:
        raise _failure(failures)
    return [ray.get(each.refs) for each in pending]


def _failure(failures: list[tuple[str, Exception]]) -> WorkerFailed:
    """The cause among several failures: a death first, then an error of its own, then an echo of a peer's."""

    def rank(failure: tuple[str, Exception]) -> int:
        error = failure[1]
        if isinstance(error, RayActorError):
            return 0
        return 2 if any(echo in str(error) for echo in ECHOES) else 1

    label, error = min(failures, key=rank)
    if isinstance(error, RayActorError):
        return WorkerFailed(f"{label}: the process died.\n{error}")
    return WorkerFailed(f"{label} failed:\n{error}")
