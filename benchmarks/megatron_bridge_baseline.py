"""Megatron-Bridge against our bridge, in turns in the same processes, on the same live Megatron-Core model in bf16.

    python benchmarks/megatron_bridge_baseline.py --tp 2

Runs in the environment of scripts/leg_megatron_bridge.sh. The package is called directly, without the checks of our
adapter, and opening the checkpoint is not counted for it; ours is measured through the engine. GB/s count the
bytes of the whole model once. The last line is JSON; each figure is the median of the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from benchmarks.bridge import timed, touch
from benchmarks.models import write_dense
from engines import build_train_engine
from engines.megatron.megatron_bridge import import_megatron_bridge, installed_version
from engines.spec import MegatronSpec, ModelSpec, TrainEngineSpec
from tests.ranks import run_ranks


def measure(rank: int, world: int, folder: str, tp: int, rounds: int) -> dict[str, Any]:
    backend = MegatronSpec(tensor_model_parallel_size=tp, bridge="native")
    engine = build_train_engine(TrainEngineSpec("megatron", "cpu", ModelSpec(folder), backend, optim=None))
    import_megatron_bridge("cpu")
    from megatron.bridge import AutoBridge

    auto = AutoBridge.from_hf_pretrained(folder)
    held = [parameter.detach() for model in engine.models for parameter in model.parameters()]
    spare = [torch.zeros_like(tensor) for tensor in held]
    auto.load_hf_weights(engine.models)  # warms the page cache
    work = {
        "memcpy": lambda: [to.copy_(tensor) for to, tensor in zip(spare, held, strict=True)],
        "load": lambda: auto.load_hf_weights(engine.models),
        "our_load": lambda: engine.load(folder),
        "export": lambda: [touch(item.weight) for item in auto.export_hf_weights(engine.models)],
        "our_export": lambda: [touch(tensor) for _, tensor in engine.hf_weights()],
    }
    times = {name: [] for name in work}
    for _ in range(rounds):
        for name, call in work.items():
            times[name].append(timed(world, call))
    return {"times": times, "bytes": sum(tensor.nbytes for tensor in held)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_dense(folder)
        total = sum(path.stat().st_size for path in Path(folder).glob("*.safetensors"))
        ranks = run_ranks(measure, args.tp, folder, args.tp, args.rounds, timeout=600)
    medians = {name: statistics.median(values) for name, values in ranks[0]["times"].items()}
    report = {
        "package": f"megatron-bridge {installed_version()}",
        "tp": args.tp,
        "model_gb": round(total / 1e9, 3),
        **{f"{name}_gbps": round(total / medians[name] / 1e9, 2) for name in medians if name != "memcpy"},
        "memcpy_gbps": round(sum(result["bytes"] for result in ranks) / medians["memcpy"] / 1e9, 2),
        **{f"{name}_speedup": round(medians[name] / medians[f"our_{name}"], 2) for name in ("load", "export")},
    }
    print(f"{os.cpu_count()} CPUs, medians of {args.rounds} rounds")
    print(json.dumps(report))


if __name__ == "__main__":
    main()
