"""What `plan` and `convert` are told about the Megatron-Core side."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from bridge.layout import Layout
from bridge.models import Config, check_supported, full_indexer_layers, has_indexer
from bridge.models.mtp import INNER
from bridge.ops import RopeRows
from bridge.pipeline import Stages, balanced, legal_sizes, stage_layers
from bridge.predict import Form

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def add_model_options(parser: argparse.ArgumentParser) -> None:
    sizes = parser.add_argument_group("parallel sizes")
    for axis, meaning in (
        ("tp", "tensor parallel ranks"),
        ("pp", "pipeline stages"),
        ("vpp", "virtual chunks of a stage"),
        ("ep", "expert parallel ranks"),
        ("etp", "ranks that cut one expert"),
    ):
        sizes.add_argument(f"--{axis}", type=positive, default=1, help=meaning)
    sizes.add_argument("--layers", type=numbers, help="layers of each stage, or of each chunk: 18,20,20,20")
    form = parser.add_argument_group("spelling of the Megatron-Core model")
    form.add_argument("--absorb", action="store_true", help="linear_k_up_proj and linear_v_up_proj (absorbed MLA)")
    form.add_argument("--mtp", action="store_true", help="with extra prediction (MTP) layers")
    form.add_argument("--mtp-inner", choices=INNER, default=INNER[0], help="name of the layer inside an MTP layer")
    form.add_argument("--experts", choices=("sequential", "grouped"), default="sequential")
    form.add_argument("--fused-norms", action="store_true", help="norms inside the next linear (TransformerEngine)")
    form.add_argument("--whole-down", action="store_true", help="MLA down projections uncut (MindSpeed)")
    form.add_argument("--indexer-rows", type=indexer_rows, help="first-half, last-interleaved, ...; default: as in HF")
    form.add_argument("--vocab-multiple", type=positive, default=128, help="pad the vocabulary to this times tp")
    form.add_argument("--dtype", choices=DTYPES, help="default: that of config.json")


def read_config(path: Path) -> Config:
    """config.json of a folder, or the file itself."""
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise ValueError(
            f"got {path} without config.json; expected a Hugging Face folder or its config.json; check --hf"
        )
    config = json.loads(file.read_text())
    check_supported(config)
    return config


def layout_of(args: argparse.Namespace) -> Layout:
    return Layout(tp=args.tp, pp=args.pp, vpp=args.vpp, ep=args.ep, etp=args.etp)


def form_of(args: argparse.Namespace) -> Form:
    return Form(
        experts=args.experts,
        fused_norms=args.fused_norms,
        absorb=args.absorb,
        whole_down=args.whole_down,
        mtp=args.mtp,
        mtp_inner=args.mtp_inner,
        indexer_rows=args.indexer_rows,
        vocab_multiple=args.vocab_multiple,
    )


def layers_of(args: argparse.Namespace, config: Config) -> tuple[Stages, str | None]:
    """Layers of each stage, and a note if they are uneven: Megatron-Core has to be told so."""
    depth, chunks = config["num_hidden_layers"], args.pp * args.vpp
    if args.layers is not None:
        return stage_layers(depth, args.pp, args.vpp, args.layers), None
    if depth < chunks:
        raise ValueError(
            f"got {depth} layers for {args.pp} stages of {args.vpp} chunks; expected a layer or more for each; "
            "lower --pp or --vpp"
        )
    sizes = balanced(depth, chunks)
    if has_indexer(config):
        full = full_indexer_layers(config)
        legal = all(sum(sizes[:chunk]) in full for chunk in range(chunks))
        sizes = sizes if legal else legal_sizes(depth, chunks, full) or sizes
    uneven = f"{depth} layers as {','.join(map(str, sizes))}; choose others with --layers"
    return stage_layers(depth, args.pp, args.vpp, sizes), uneven if len(set(sizes)) > 1 else None


def dtype_of(args: argparse.Namespace, config: Config) -> torch.dtype:
    name = args.dtype or config.get("dtype") or config.get("torch_dtype") or "bfloat16"
    if name not in DTYPES:
        raise ValueError(f"got dtype {name!r} in config.json; expected one of {sorted(DTYPES)}; set --dtype")
    return DTYPES[name]


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text}; expected a number from 1 on")
    return int(text)


def numbers(text: str) -> list[int]:
    return [positive(part) for part in text.split(",")]


def indexer_rows(text: str) -> RopeRows:
    try:
        return RopeRows.named(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
