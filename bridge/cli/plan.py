"""`plan`: does the layout fit, and what does each rank hold?"""

from __future__ import annotations

import argparse
import json
import math
import resource
import time
from pathlib import Path
from typing import Any

from bridge.cli.options import add_model_options, dtype_of, form_of, layers_of, layout_of, positive, read_config
from bridge.models import Config
from bridge.offline import OfflineModel
from bridge.safetensors_io import INDEX, SINGLE
from bridge.source import SCALE, open_source
from bridge.source_check import check_names, check_source

GRADIENT, OPTIMIZER = 4, 12  # bytes a parameter: fp32 gradient; fp32 master weight and two Adam moments


def add_command(commands: Any) -> None:
    parser = commands.add_parser("plan", help="prove a layout on meta tensors and count parameters and bytes per rank")
    parser.add_argument("--hf", type=Path, required=True, help="Hugging Face folder, or its config.json")
    add_model_options(parser)
    parser.add_argument("--world", type=positive, help="ranks in all, for the optimizer state of a rank")
    parser.add_argument("--json", type=Path, help="write the plan's numbers to this file")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    start = time.perf_counter()
    config = read_config(args.hf)
    layers, note = layers_of(args, config)
    model = OfflineModel.make(config, form_of(args), layout_of(args), layers, dtype_of(args, config))
    checked = check_files(args.hf, config, model) if args.hf.is_dir() else None
    report = summarise(model, args.world) | {"checked_against": checked, "note": note}
    report["seconds"] = round(time.perf_counter() - start, 2)
    report["peak_mb"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n")
    print(render(report))


def check_files(folder: Path, config: Config, model: OfflineModel) -> str | None:
    """Compare with the tensors of a folder: their headers if the files are there, else the names of the index."""
    index = folder / INDEX
    names: dict[str, str] = json.loads(index.read_text())["weight_map"] if index.is_file() else {}
    files = set(names.values()) or {SINGLE}
    if all((folder / file).is_file() for file in files):
        check_source(model.plan, open_source(folder), model.extras, str(folder))
        return "weight files"
    if not names:
        return None
    quantised = config.get("quantization_config") is not None
    listed = dict.fromkeys(name for name in names if not (quantised and name.endswith(SCALE)))
    check_names(model.plan, listed, model.extras, str(index))
    return "index"


def summarise(model: OfflineModel, world: int | None = None) -> dict[str, Any]:
    """The numbers of a plan. Every rank of a stage holds as much as the others."""
    sizes, plan = model.sizes, model.plan
    copies = {axis: None for axis in sizes.axes}
    if world is not None:
        copies = {axis: _copies(world, sizes.pp * ranks, axis) for axis, ranks in sizes.axes.items()}
    return {
        "model_type": model.config["model_type"],
        "layout": {axis: vars(sizes)[axis] for axis in ("tp", "pp", "vpp", "ep", "etp")},
        "hf_tensors": len(plan.hf_shapes),
        "hf_parameters": sum(math.prod(shape) for shape in plan.hf_shapes.values()),
        "ranks_per_copy": sizes.stage_ranks * sizes.pp,
        "stages": [_stage(model, stage, copies) for stage in range(sizes.pp)],
    }


def _copies(world: int, ranks: int, axis: str) -> int:
    if world % ranks:
        raise ValueError(
            f"got --world {world} for copies of {ranks} ranks ({'experts' if axis == 'expert' else 'dense weights'}); "
            "expected a multiple; change --world"
        )
    return world // ranks


def _stage(model: OfflineModel, stage: int, copies: dict[str, int | None]) -> dict[str, Any]:
    """Per rank. `optimizer_bytes`: with Megatron's distributed optimizer, spread over the copies of a weight."""
    tensors = model.tensors(stage)
    counts = {axis: 0 for axis in copies}
    for tensor in tensors:
        counts[tensor.placed.op.axis] += math.prod(tensor.placed.live.shape)
    report = {
        "stage": stage,
        "layers": [[chunk.start, chunk.stop] for chunk in model.layers[stage]],
        "tensors": len(tensors),
        "parameters": sum(counts.values()),
        "expert_parameters": counts["expert"],
        "weight_bytes": sum(math.prod(t.placed.live.shape) * t.placed.live.dtype.itemsize for t in tensors),
    }
    if None not in copies.values():
        report["gradient_bytes"] = GRADIENT * sum(counts.values())
        report["optimizer_bytes"] = sum(OPTIMIZER * count // copies[axis] for axis, count in counts.items())
    return report


def render(report: dict[str, Any]) -> str:
    layout = " ".join(f"{axis}{size}" for axis, size in report["layout"].items())
    lines = [
        f"{report['model_type']}: {report['hf_tensors']:,} tensors, {report['hf_parameters']:,} parameters; "
        f"{layout}, {report['ranks_per_copy']} ranks hold one copy",
        *([f"note: {report['note']}"] if report["note"] else []),
        "stage  layers          each rank: tensors, parameters, weights GiB"
        + (", gradients GiB, optimizer GiB" if "gradient_bytes" in report["stages"][0] else ""),
    ]
    for stage in report["stages"]:
        spans = " ".join(f"{start}-{stop - 1}" for start, stop in stage["layers"])
        sizes = [stage[name] for name in ("weight_bytes", "gradient_bytes", "optimizer_bytes") if name in stage]
        columns = [f"{stage['stage']:5}  {spans:15} {stage['tensors']:7,} {stage['parameters']:15,}"]
        lines.append(" ".join([*columns, *(f"{size / 2**30:11.2f}" for size in sizes)]))
    checked = {
        None: "no weight files to compare with",
        "index": "the names of the index are exactly the plan's",
        "weight files": "names, shapes and dtypes of the weight files are exactly the plan's",
    }[report["checked_against"]]
    lines.append(
        "proven: every parameter has one source, every tensor one owner, every cut is exact; "
        f"{checked} ({report['seconds']} s, {report['peak_mb']} MB)"
    )
    return "\n".join(lines)
