"""What runs inside a worker process: one training rank, or one rollout replica.

Plain classes without Ray; `trainer/cluster.py` puts them into processes. They own an engine each and
translate calls from the loop into engine calls; no algorithm lives here.
"""

from __future__ import annotations

import logging
import resource
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from engines import build_rollout_engine, build_train_engine
from engines.base import ForwardOptions, LossFn, Prompt, Sample, SamplingParams
from engines.batch import Denominators, TrainBatch
from engines.device import get_device
from engines.export import export_hf
from engines.metric import Metrics
from engines.spec import RolloutEngineSpec, TrainEngineSpec
from engines.transport.shm import Address, Sent
from engines.weight_sync import WeightReceiver, WeightSender


@dataclass(frozen=True)
class SyncSpec:
    """How weights travel: bucket size, checksums on every n-th update (0: never), time-out of each message."""

    bucket_bytes: int
    verify_every: int
    timeout_s: float


@dataclass(frozen=True)
class Scores:
    """Old and reference log-probs of one DP share, [T] float32 on CPU; entropy, routes [T, layers, K] and reference
    when asked for."""

    log_probs: torch.Tensor
    entropy: torch.Tensor | None
    routes: torch.Tensor | None
    ref_log_probs: torch.Tensor | None


class TrainWorker:
    """One training rank: the actor engine and, beside it on the same devices, the frozen reference."""

    def __init__(
        self, rank: int, world: int, threads: int, actor: TrainEngineSpec, reference: TrainEngineSpec | None
    ) -> None:
        _start_process(threads, f"train rank {rank}")
        self.rank, self.world = rank, world
        self._specs = (actor, reference)

    def rendezvous(self) -> str:
        """Rank 0's address for init_process_group; all ranks are on this machine."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            return f"tcp://127.0.0.1:{probe.getsockname()[1]}"

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

    def dp_place(self) -> tuple[int, int, bool]:
        """(dp rank, dp size, whether this rank answers for its DP share)."""
        return self.engine.dp_rank, self.engine.dp_size, self.engine.is_output_rank

    def score(self, batch: TrainBatch, options: ForwardOptions, ref_options: ForwardOptions | None) -> Scores | None:
        """Log-probs under the current weights and, with `ref_options`, under the reference."""
        old = self.engine.log_probs(batch, options)
        ref = None
        if ref_options is not None:
            self.reference.onload()
            ref = self.reference.log_probs(batch, ref_options)
            self.reference.offload()
        if not self.engine.is_output_rank:
            return None
        return Scores(old.log_probs, old.entropy, old.routes, ref.log_probs if ref is not None else None)

    def update(
        self, batch: TrainBatch, loss: LossFn, denominators: Denominators, options: ForwardOptions, step: int
    ) -> Metrics | None:
        metrics = self.engine.update(batch, loss, denominators, options, step)
        return metrics if self.engine.is_output_rank else None

    def onload(self) -> None:
        self.engine.onload()

    def offload(self) -> None:
        self.engine.offload()

    def open_sync(self, receivers: int, spec: SyncSpec) -> Address | None:
        self._sender = WeightSender(
            self.engine.is_weight_source, receivers, spec.bucket_bytes, spec.timeout_s, spec.verify_every
        )
        return self._sender.address

    def push_weights(self, version: int) -> Sent | None:
        return self._sender.push(self.engine, version)

    def save(self, directory: str) -> None:
        self.engine.save(Path(directory))

    def restore(self, directory: str) -> None:
        self.engine.restore(Path(directory))

    def export_hf(self, directory: str, source: str) -> None:
        """Write a Hugging Face model folder: safetensors with index, config, tokenizer files."""
        export_hf(self.engine, Path(directory), Path(source), dict(self._specs[0].model.override_config))

    def memory_gb(self) -> tuple[float, float]:
        """(peak of the device or process, current resident set of the process) in GiB."""
        return get_device(self._specs[0].device).peak_memory_gb(), _resident_gb()


class RolloutWorker:
    """One rollout replica."""

    def __init__(self, replica: int, threads: int, spec: RolloutEngineSpec, sync: SyncSpec) -> None:
        _start_process(threads, f"rollout replica {replica}")
        self._sync = sync
        self._receiver: WeightReceiver | None = None
        self.engine = build_rollout_engine(spec)

    def ready(self) -> None:
        """Returns once the constructor has."""

    def pull_weights(self, address: Address, version: int) -> float:
        if self._receiver is None:
            self._receiver = WeightReceiver(address, self._sync.timeout_s)
        return self._receiver.pull(self.engine, version)

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

    def wake(self) -> None:
        self.engine.wake()

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
