"""`convert`: between Hugging Face folders and shards of a Megatron-Core layout, either way, or shards to shards."""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path
from typing import Any

from bridge.cli.options import add_model_options, dtype_of, form_of, layers_of, layout_of, read_config
from bridge.hf_export import write_folder
from bridge.layout import Layout
from bridge.models import mtp_pattern
from bridge.offline import OfflineModel
from bridge.pipeline import stage_layers
from bridge.predict import Form
from bridge.shards import ShardSource, write_shards
from bridge.source import open_source
from bridge.source_check import Readable, check_source


def add_command(commands: Any) -> None:
    parser = commands.add_parser(
        "convert",
        help="convert a checkpoint on disk",
        description="--hf becomes shards, --mcore a Hugging Face folder, unless --to says otherwise: shards to shards "
        "changes the layout or the form of kv_b_proj, folder to folder dequantises fp8.",
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--hf", type=Path, help="Hugging Face folder")
    source.add_argument("--mcore", type=Path, help="folder of shards with a manifest.json")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--to", choices=("hf", "mcore"), help="default: the other kind")
    parser.add_argument("--drop-mtp", action="store_true", help="do not carry untrained MTP layers over to --out")
    parser.add_argument("--skip-checksums", action="store_true", help="do not read shards once more to verify them")
    add_model_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    start = time.perf_counter()
    if args.hf is not None:
        config, source = read_config(args.hf), open_source(args.hf)
    else:
        source = ShardSource(args.mcore, checksums=not args.skip_checksums)
        config = source.config
    to = args.to or ("mcore" if args.hf is not None else "hf")
    lines, buffer = (to_shards if to == "mcore" else to_folder)(args, config, source)
    seconds = time.perf_counter() - start
    lines.append(
        f"{args.out}: {source.bytes_read / 1e9:.2f} GB read in {seconds:.1f} s, buffers of {buffer / 1e6:.0f} MB"
    )
    print("\n".join(lines))


def to_shards(args: argparse.Namespace, config: dict[str, Any], source: Readable) -> tuple[list[str], int]:
    """What to tell, and the bytes held in memory at a time."""
    layers, note = layers_of(args, config)
    model = OfflineModel.make(config, form_of(args), layout_of(args), layers, dtype_of(args, config))
    result = write_shards(model, source, args.out)
    lines = [note] if note else []
    lines += [f"left out {count} tensors: {reason}" for reason, count in result.left_out.items()]
    if result.rounding:
        lines.append(f"largest rounding: {result.rounding[1]:.3g} in {result.rounding[0]}")
    return [*lines, f"wrote {len(result.manifest.ranks)} shards"], result.buffer_bytes


def to_folder(args: argparse.Namespace, config: dict[str, Any], source: Readable) -> tuple[list[str], int]:
    if args.out.exists() and any(args.out.iterdir()):
        raise ValueError(f"got --out {args.out}, which is not empty; expected a new folder; choose another one")
    # One rank's plan proves the source whole before half of it is copied.
    extra = mtp_pattern(config)
    mtp = not args.drop_mtp and extra is not None and any(extra.fullmatch(name) for name in source.names())
    layers = stage_layers(config["num_hidden_layers"], 1)
    whole = OfflineModel.make(config, Form(mtp=mtp), Layout(), layers, dtype_of(args, config))
    left_out = check_source(whole.plan, source, whole.extras, str(source.directory))
    names = list(whole.plan.hf_shapes)
    largest = max(
        sum(math.prod(shape) * source.dtype(name).itemsize for name, shape in unit.hf.items())
        for unit in whole.plan.units
    )
    stream = ((name, source.read(name)) for name in names)
    done = write_folder(stream, args.out, source, config, keep_mtp=not args.drop_mtp)
    lines = [f"left out {count} tensors: {reason}" for reason, count in left_out.items()]
    return [*lines, *([done] if done else []), f"wrote {len(names)} tensors"], largest
