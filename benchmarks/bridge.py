"""Speed of the weight bridge on gloo ranks against a plain memory copy in the same run.

    python3 benchmarks/bridge.py --tp 2            a dense model of 0.3B parameters in bf16
    python3 benchmarks/bridge.py --ep 2 --model moe   16 x 64 small experts, the same bytes

Ranks hold bare module trees with the shapes Megatron-Core would have (planned from the config), so nothing but
the bridge is measured. GB/s count the bytes of the whole model once. The memory copy is one thread a rank, all
ranks at once, of the bytes each of them holds. The last line is JSON; each figure is the median of the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.models import write_dense, write_moe
from bridge import Bridge, Groups, Layout
from bridge.offline import OfflineModel
from bridge.pipeline import stage_layers
from bridge.predict import Form
from tests.bridge.fake import module_tree
from tests.ranks import run_ranks

BUCKET_BYTES = 64 << 20


def build(config: dict[str, Any], layout: Layout, group: dist.ProcessGroup | None) -> tuple[Bridge, nn.Module]:
    """The bridge over this rank's share of the model, one pipeline stage."""
    stages = stage_layers(config["num_hidden_layers"], 1)
    model = OfflineModel.make(config, Form(), layout, stages, torch.bfloat16)
    tree = module_tree({live.name: torch.empty(live.shape, dtype=live.dtype) for live in model.stages[0][0].live})
    groups = Groups(tp=group if layout.tp > 1 else None, expert=group if layout.axes["expert"] > 1 else None)
    return Bridge(config, [tree], layout, groups, [0], bucket_bytes=BUCKET_BYTES), tree


def measure(rank: int, world: int, folder: str, sizes: dict[str, int], rounds: int) -> dict[str, Any]:
    config = json.loads((Path(folder) / "config.json").read_text())
    bridge, tree = build(config, Layout.at(rank, **sizes), dist.group.WORLD if world > 1 else None)
    held = [parameter.detach() for parameter in tree.parameters()]
    spare = [torch.zeros_like(tensor) for tensor in held]
    bridge.load(folder)  # warms the page cache
    times: dict[str, list[float]] = {"load": [], "export": [], "memcpy": []}
    peak = 0
    for _ in range(rounds):
        times["memcpy"].append(timed(world, lambda: [to.copy_(tensor) for to, tensor in zip(spare, held, strict=True)]))
        times["load"].append(timed(world, lambda: bridge.load(folder)))
        before = resident()
        times["export"].append(timed(world, lambda: [touch(tensor) for _, tensor in bridge.hf_weights()]))
        peak = max(peak, highest() - before)
    return {"times": times, "bytes": sum(tensor.nbytes for tensor in held), "peak_extra": peak}


def touch(tensor: torch.Tensor) -> None:
    """A consumer that looks at one element: the bridge's own work is measured."""
    tensor.view(-1)[-1].item()


def timed(world: int, work: Any) -> float:
    if world > 1:
        dist.barrier()
    start = time.perf_counter()
    work()
    if world > 1:
        dist.barrier()
    return time.perf_counter() - start


def resident() -> int:
    """Anonymous memory of this process now, and start a new high-water mark."""
    Path("/proc/self/clear_refs").write_text("5")
    return status("RssAnon")


def highest() -> int:
    """High-water mark, less what is mapped from files: pages of the checkpoint are not ours."""
    return status("VmHWM") - status("RssFile") - status("RssShmem")


def status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--ep", type=int, default=1)
    parser.add_argument("--model", choices=("dense", "moe"), default="dense")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    sizes = {"tp": args.tp, "ep": args.ep}
    with tempfile.TemporaryDirectory() as folder:
        (write_dense if args.model == "dense" else write_moe)(folder)
        total = sum(path.stat().st_size for path in Path(folder).glob("*.safetensors"))
        ranks = run_ranks(measure, Layout.at(0, **sizes).stage_ranks, folder, sizes, args.rounds, timeout=600)
    medians = {name: statistics.median(ranks[0]["times"][name]) for name in ("load", "export", "memcpy")}
    copied = sum(result["bytes"] for result in ranks)
    report = {
        "model": args.model,
        **sizes,
        "model_gb": round(total / 1e9, 3),
        "load_gbps": round(total / medians["load"] / 1e9, 2),
        "export_gbps": round(total / medians["export"] / 1e9, 2),
        "memcpy_gbps": round(copied / medians["memcpy"] / 1e9, 2),
        "peak_extra_mb": round(max(result["peak_extra"] for result in ranks) / 1e6),
    }
    for name in ("load", "export"):
        report[f"{name}_of_memcpy"] = round(report[f"{name}_gbps"] / report["memcpy_gbps"], 2)
    print(f"{os.cpu_count()} CPUs, buckets of {BUCKET_BYTES >> 20} MB, medians of {args.rounds} rounds")
    print(json.dumps(report))


if __name__ == "__main__":
    main()
