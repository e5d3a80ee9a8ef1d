"""What runs inside a worker process: one training rank, or one rollout replica.

Plain classes without Ray; `trainer/cluster.py` puts them into processes. They own an engine each and
translate calls from the loop into engine calls; no algorithm lives here.
"""

from __future__ import annotations

import logging
import os
import resource
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist

from engines import build_rollout_engine, build_train_engine
from engines.base import ForwardOptions, LossFn, Prompt, Sample, SamplingParams, TrainEngine
from engines.batch import Denominators, PolicyOutput, TrainBatch
from engines.device import get_device
from engines.export import export_hf
from engines.metric import Metrics
from engines.spec import RolloutEngineSpec, TrainEngineSpec
from engines.transport import Address, Sent, Transport
from engines.transport.channel import host_ip
from engines.weight_sync import WeightSender, WeightSource


@dataclass(frozen=True)
class SyncSpec:
    """How weights travel: bucket size, checksums on every n-th update (0: never), time-out of each message."""

    transport: Transport
    bucket_bytes: int
    verify_every: int
    timeout_s: float
    delta: bool = False


@dataclass(frozen=True)
class Scores:
    """What one DP share knows of its tokens, on CPU: under the current weights and, [T] float32, under the reference;
    None where the pass was left out."""

    old: PolicyOutput | None
    ref_log_probs: torch.Tensor | None


class TrainWorker:
    """One training rank: the actor engine and, beside it on the same devices, the frozen reference and the critic.

    Where a method takes a `role`, it acts on that role's engine.
    """

    def __init__(
        self,
        rank: int,
        world: int,
        threads: int,
        actor: TrainEngineSpec,
        reference: TrainEngineSpec | None,
        critic: TrainEngineSpec | None = None,
    ) -> None:
        _start_process(threads, f"train rank {rank}")
        self.rank, self.world = rank, world
        self._specs = (actor, reference)
        self._critic_spec = critic

    def rendezvous(self, several_nodes: bool) -> str:
        """Rank 0's address for init_process_group."""
        host = host_ip() if several_nodes else "127.0.0.1"
        with socket.socket() as probe:
            probe.bind((host, 0))
            return f"tcp://{host}:{probe.getsockname()[1]}"

    def visible_devices(self) -> str:
        """The accelerator that Ray gave this process, as the visibility variable names it."""
        return os.environ[get_device(self._specs[0].device).visibility_variable]

    def build(self, address: str) -> None:
        """Join the process group, build the engines and load their weights."""
        actor, reference = self._specs
        device = get_device(actor.device)
        device.set_index(0)
        dist.init_process_group(
            device.backend,
            init_method=address,
            rank=self.rank,
            world_size=self.world,
            timeout=timedelta(seconds=actor.timeout_s),
        )
        self.engine = build_train_engine(actor)
        self.engine.load(actor.model.path)
        self.reference = None
        if reference is not None:
            self.reference = build_train_engine(reference)
            self.reference.load(reference.model.path)
            self.reference.offload()
        self.critic = None
        if self._critic_spec is not None:
            self.critic = build_train_engine(self._critic_spec)
            self.critic.load(self._critic_spec.model.path)
            self.critic.offload()

    def _engine(self, role: str) -> TrainEngine:
        return {"actor": self.engine, "critic": self.critic}[role]

    def dp_place(self) -> tuple[int, int, bool]:
        """(dp rank, dp size, whether this rank answers for its DP share)."""
        return self.engine.dp_rank, self.engine.dp_size, self.engine.is_output_rank

    def score(
        self, batch: TrainBatch, options: ForwardOptions | None, ref_options: ForwardOptions | None
    ) -> Scores | None:
        """Log-probs under the current weights (with `options`) and under the reference (with `ref_options`)."""
        old = self.engine.log_probs(batch, options) if options is not None else None
        ref = None
        if ref_options is not None:
            self.reference.onload()
            ref = self.reference.log_probs(batch, ref_options)
            self.reference.offload()
        if not self.engine.is_output_rank:
            return None
        return Scores(old, ref.log_probs if ref is not None else None)

    def values(self, batch: TrainBatch, options: ForwardOptions) -> torch.Tensor | None:
        """The critic's values, [T] float32 on CPU."""
        values_T = self.critic.values(batch, options)
        return values_T if self.critic.is_output_rank else None

    def update(
        self, batch: TrainBatch, role: str, loss: LossFn, denominators: Denominators, options: ForwardOptions, step: int
    ) -> Metrics | None:
        metrics = self._engine(role).update(batch, loss, denominators, options, step)
        return metrics if self._engine(role).is_output_rank else None

    def onload(self, role: str = "actor") -> None:
        self._engine(role).onload()

    def offload(self, role: str = "actor") -> None:
        self._engine(role).offload()

    def open_sync(self, spec: SyncSpec) -> Address | None:
        self._sender = WeightSender(
            self.engine.is_weight_source,
            0,
            spec.bucket_bytes,
            spec.timeout_s,
            spec.verify_every,
            spec.transport,
            self._specs[0].device,
            spec.delta,
        )
        return self._sender.address

    def push_weights(self, version: int, receivers: int) -> Sent | None:
        return self._sender.push(self.engine, version, receivers)

    def save(self, directory: str, role: str = "actor") -> None:
        self._engine(role).save(Path(directory))

    def restore(self, directory: str, role: str = "actor") -> None:
        self._engine(role).restore(Path(directory))

    def export_hf(self, directory: str, source: str, role: str = "actor") -> None:
        """Write a Hugging Face model folder: safetensors with index, config, tokenizer files."""
        model = (self._critic_spec if role == "critic" else self._specs[0]).model
        export_hf(self._engine(role), Path(directory), Path(source), dict(model.override_config), model.head)

    def memory_gb(self) -> tuple[float, float]:
        """(peak of the device or process, current resident set of the process) in GiB."""
        return get_device(self._specs[0].device).peak_memory_gb(), _resident_gb()


class RolloutWorker:
    """One rollout replica. `devices` are the accelerators it may see (a variable and their ids) where it does not get
    them from Ray."""

    def __init__(
        self, replica: int, threads: int, spec: RolloutEngineSpec, sync: SyncSpec, devices: tuple[str, str] | None
    ) -> None:
        _start_process(threads, f"rollout replica {replica}")
        if devices is not None:
            os.environ[devices[0]] = devices[1]
        self._spec, self._sync, self._name = spec, sync, f"rollout replica {replica}"
        self.engine = build_rollout_engine(spec)

    def receivers(self) -> int:
        """Processes that fetch weights; answers once the constructor is through."""
        return self.engine.receivers

    def pull_weights(self, address: Address, version: int) -> None:
        self.engine.fetch_weights(WeightSource(address, self._sync.timeout_s, self._name, self._spec.device), version)

    def weight_version(self) -> int:
        return self.engine.version

    def generate(self, prompts: list[Prompt], sampling: SamplingParams, version: int) -> Iterator[Sample]:
        """Samples as they finish. The caller names the weight version it expects."""
        if self.engine.version != version:
            raise RuntimeError(
                f"got a request for weight version {version}; expected the loaded version {self.engine.version}; "
                "the rollout is stale: every update must be followed by a weight sync"
            )
        if prompts:
            yield from self.engine.generate(prompts, sampling)

    def score(self, sequences: list[list[int]], temperature: float) -> list[list[float]]:
        return self.engine.score(sequences, temperature)

    def sleep(self) -> None:
        self.engine.sleep()

    def wake(self, part: Literal["all", "weights", "cache"]) -> None:
        self.engine.wake(part)

    def memory_gb(self) -> tuple[float, float]:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, _resident_gb()


def _start_process(threads: int, name: str) -> None:
    torch.set_num_threads(threads)
    logging.basicConfig(
        stream=sys.stderr, level=logging.WARNING, format=f"[{name}] %(levelname)s %(name)s: %(message)s", force=True
    )


def _resident_gb() -> float:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() / 2**30
