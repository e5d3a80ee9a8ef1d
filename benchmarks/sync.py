"""Speed of a weight sync from a training rank to a rollout engine, against a plain memory copy in the same run.

    python3 benchmarks/sync.py                          shared memory, one replica, the transformers rollout
    python3 benchmarks/sync.py --rollout vllm           to vLLM, which repacks every matrix for its kernels
    python3 benchmarks/sync.py --transport broadcast    a gloo group
    python3 benchmarks/sync.py --delta                  a second sync of unchanged weights moves almost nothing

The training side is the bridge over a bare module tree of a 0.3B bf16 model (benchmarks/models.py, TP 1), so a sync is
what it is in a run: un-fusing, buckets, the copy into the live model, the check that everything was written. The memory
copy is one thread, of the same bytes, while the rollout process waits. Rollout processes have a thread each. GB/s
count the bytes of the model once. On a machine with other work on it the wall clock measures the others too, so the
same is said of processor time, of the busier of the two processes. The last line is JSON; each figure is the median of
the rounds after the first.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from torch import nn

from benchmarks.bridge import build
from benchmarks.models import write_dense
from bridge import Bridge, Layout
from engines import build_rollout_engine
from engines.spec import ModelSpec, RolloutEngineSpec
from engines.transport import Address
from engines.weight_sync import WeightSender, WeightSource

TIMEOUT_S = 120.0
CONFIGURED_BYTES = 2048 << 20  # the default of checkpoint_engine.update_weights_bucket_megabytes


class Trainer:
    """A training rank as the sender sees it."""

    is_weight_source = True

    def __init__(self, folder: str) -> None:
        config = json.loads((Path(folder) / "config.json").read_text())
        self.bridge: Bridge
        self.tree: nn.Module
        self.bridge, self.tree = build(config, Layout.at(0, tp=1, ep=1), None)
        self.bridge.load(folder)

    def hf_weights(self) -> Any:
        return self.bridge.hf_weights()


def rollout(name: str, folder: str, address: Address, orders: Connection) -> None:
    """A rollout process: one update per version it is told."""
    torch.set_num_threads(1)
    engine = build_rollout_engine(
        RolloutEngineSpec(name, "cpu", ModelSpec(folder), "bfloat16", max_num_seqs=16, max_model_len=256)
    )
    source = WeightSource(address, TIMEOUT_S, "benchmark", "cpu")
    orders.send("ready")
    while (version := orders.recv()) is not None:
        begin = time.process_time()
        engine.fetch_weights(source, version)
        orders.send(time.process_time() - begin)


def measure(folder: str, args: argparse.Namespace) -> dict[str, list[float]]:
    torch.set_num_threads(1)
    trainer = Trainer(folder)
    sender = WeightSender(
        True, args.replicas, CONFIGURED_BYTES, TIMEOUT_S, args.verify_every, args.transport, delta=args.delta
    )
    held = [parameter.detach() for parameter in trainer.tree.parameters()]
    spare = [torch.zeros_like(tensor) for tensor in held]
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in range(args.replicas)]
    replicas = [context.Process(target=rollout, args=(args.rollout, folder, sender.address, end)) for _, end in pipes]
    for replica in replicas:
        replica.start()
    for pipe, _ in pipes:
        pipe.recv()
    times: dict[str, list[float]] = {name: [] for name in ("memcpy", "memcpy_cpu", "export", "sync", "sync_cpu")}
    for version in range(args.rounds + 1):
        wall, cpu = timed(lambda: [to.copy_(tensor) for to, tensor in zip(spare, held, strict=True)])
        times["memcpy"].append(wall)
        times["memcpy_cpu"].append(cpu)
        times["export"].append(timed(lambda: [tensor.view(-1)[-1].item() for _, tensor in trainer.hf_weights()])[0])
        for pipe, _ in pipes:
            pipe.send(version)
        wall, cpu = timed(lambda version=version: sender.push(trainer, version))
        times["sync"].append(wall)
        times["sync_cpu"].append(max(cpu, *(pipe.recv() for pipe, _ in pipes)))
    for pipe, _ in pipes:
        pipe.send(None)
    for replica in replicas:
        replica.join()
    sender.close()
    return times


def timed(work: Any) -> tuple[float, float]:
    """Seconds by the clock and of this process's processor."""
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - cpu


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rollout", choices=("hf", "vllm"), default="hf")
    parser.add_argument("--transport", choices=("shm", "broadcast"), default="shm")
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--verify-every", type=int, default=0, help="checksums on every n-th sync")
    parser.add_argument("--delta", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_dense(folder)
        total = sum(path.stat().st_size for path in Path(folder).glob("*.safetensors"))
        times = measure(folder, args)
    report: dict[str, Any] = {**vars(args), "model_gb": round(total / 1e9, 3)}
    for name, seconds in times.items():
        report[f"{name}_gbps"] = round(total / statistics.median(seconds[1:]) / 1e9, 2)
    report["first_sync_gbps"] = round(total / times["sync"][0] / 1e9, 2)
    for kind in ("", "_cpu"):
        report[f"sync{kind}_of_memcpy"] = round(report[f"sync{kind}_gbps"] / report[f"memcpy{kind}_gbps"], 2)
    print(f"{os.cpu_count()} CPUs, one thread a process, medians of {args.rounds} rounds")
    print(json.dumps(report))


if __name__ == "__main__":
    main()
