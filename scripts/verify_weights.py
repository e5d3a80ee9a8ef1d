"""Are a checkpoint's weights right in the Megatron model, and do they come out as they went in?

    python3 -m scripts.verify_weights --hf DIR --tp 2 --pp 2 --ep 2 --absorb

Starts one gloo process for each rank of a model copy (or --world of them) on this machine's CPUs. Each builds its
part of the real model, fills it with NaN, loads, and exports; every exported tensor is compared with the file bit by
bit, and the log-probs of random token ids with those of transformers. The last line of stdout is one JSON object
(`bytes_read_per_rank` in rank order). Exit code 1, with names on stderr, if anything differs or fails.

Exact parity needs `rms_norm_eps` 1e-6 in models with latent attention: transformers fixes it for two of their norms.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from bridge import Layout, check_supported, open_source, write_folder
from bridge.live import TRAVELS
from bridge.models import Extras, Target, family_extras
from bridge.source import Source
from engines import build_train_engine
from engines.base import ForwardOptions
from engines.batch import TrainBatch
from engines.spec import MegatronSpec, ModelSpec, TrainEngineSpec

LENGTHS = (24, 11, 2)  # of the compared sequences


@dataclass(frozen=True)
class RankResult:
    """bytes read by this rank, its live tensors that still held NaN, exported tensors and the names of those that
    differ (rank 0), and log-probs [T] (output ranks)."""

    bytes_read: int
    unset: list[str]
    tensors: int
    differing: list[str]
    log_probs: list[float] | None


def engine_spec(args: argparse.Namespace) -> TrainEngineSpec:
    """A forward-only engine as the command line describes it."""
    first = args.first_stage_layers
    backend = MegatronSpec(
        tensor_model_parallel_size=args.tp,
        pipeline_model_parallel_size=args.pp,
        virtual_pipeline_model_parallel_size=args.vpp if args.vpp > 1 else None,
        expert_model_parallel_size=args.ep,
        expert_tensor_parallel_size=args.etp,
        dtype=args.dtype,
        mla_absorb=args.absorb,
        override_transformer_config={} if first is None else {"num_layers_in_first_pipeline_stage": first},
    )
    return TrainEngineSpec("megatron", "cpu", ModelSpec(str(args.hf)), backend, None, timeout_s=args.timeout)


def verify_on_rank(rank: int, world: int, folder: str, args: argparse.Namespace) -> None:
    """Process `rank`: build, poison, load, export, compare, score; the result goes to a file."""
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    store = dist.FileStore(f"{folder}/store", world)
    limit = timedelta(seconds=args.timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=limit)
    engine = build_train_engine(engine_spec(args))
    live = travelling(engine.models)
    with torch.no_grad():
        for tensor in live.values():
            tensor.fill_(torch.nan)
    engine.load(args.hf)
    unset = [name for name, tensor in live.items() if tensor.isnan().any()]
    stream = engine.hf_weights()
    tensors, differing = compare(stream, open_source(args.hf), extras_of(args.hf)) if rank == 0 else drain(stream)
    scores = engine.log_probs(TrainBatch.pack(sequences(args.hf)), ForwardOptions(micro_batch_size=len(LENGTHS)))
    log_probs = scores.log_probs.tolist() if engine.is_output_rank else None
    torch.save(
        vars(RankResult(engine.load_report.bytes_read, unset, tensors, differing, log_probs)), f"{folder}/result{rank}"
    )
    engine.close()
    dist.barrier()
    dist.destroy_process_group()


def travelling(chunks: Iterable[nn.Module]) -> dict[str, Tensor]:
    """Everything a checkpoint must fill."""
    return {
        f"chunk {number}: {name}": tensor
        for number, chunk in enumerate(chunks)
        for name, tensor in (*chunk.named_parameters(), *chunk.named_buffers())
        if isinstance(tensor, nn.Parameter) or name.endswith(TRAVELS)
    }


def compare(stream: Iterable[tuple[str, Tensor]], source: Source, extras: Extras) -> tuple[int, list[str]]:
    """Number of exported tensors, and the names of all that are not, bit for bit and in the file's dtype, what the
    file holds, that the file does not have, or that it has and the export lacks."""
    stored, seen, differing = set(source.names()), set(), []
    for name, tensor in stream:
        same = name in stored and name not in seen and torch.equal(tensor.to(source.dtype(name)), source.read(name))
        seen.add(name)
        if not same:
            differing.append(name)
    lost = [name for name in stored - seen if not is_extra(name, extras)]
    return len(seen), differing + sorted(lost)


def extras_of(folder: Path) -> Extras:
    return family_extras(read_config(folder), Target())


def is_extra(name: str, extras: Extras) -> bool:
    """Whether a file may hold this tensor although no model has it."""
    return name in extras.copies or any(pattern.fullmatch(name) for pattern in extras.ignored.values())


def drain(stream: Iterable[tuple[str, Tensor]]) -> tuple[int, list[str]]:
    """Take part in the export; only rank 0 is handed tensors."""
    extra = [name for name, _ in stream]
    return 0, [f"{name} (yielded on a rank that is not the source)" for name in extra]


def read_config(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def sequences(folder: Path) -> list[list[int]]:
    """Random token ids, the same in every process."""
    generator, vocab = torch.Generator().manual_seed(0), read_config(folder)["vocab_size"]
    return [torch.randint(0, vocab, (length,), generator=generator).tolist() for length in LENGTHS]


def reference_log_probs(folder: Path) -> Tensor:
    """[T] of transformers in float32: entry t speaks about token t, the first of each sequence is 0."""
    if "quantization_config" not in read_config(folder):
        return score(folder)
    with tempfile.TemporaryDirectory() as plain:  # transformers wants a GPU, or sizes that fill the blocks, for fp8
        source, extras = open_source(folder), extras_of(folder)
        names = [name for name in source.names() if not is_extra(name, extras)]
        stream = ((name, source.read(name)) for name in names)
        write_folder(stream, Path(plain), source, read_config(folder), keep_mtp=False)
        return score(Path(plain))


@torch.no_grad()
def score(folder: Path) -> Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").float()
    parts = []
    for ids in sequences(folder):
        log_p_SV = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        parts += [torch.zeros(1), log_p_SV[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]]
    return torch.cat(parts)


def run_ranks(world: int, args: argparse.Namespace) -> list[RankResult]:
    """Results in rank order. Raises what the first failing rank raised, or TimeoutError; no process stays behind."""
    with tempfile.TemporaryDirectory() as folder:
        context = mp.spawn(verify_on_rank, (world, folder, args), nprocs=world, join=False, daemon=True)
        deadline = time.monotonic() + args.timeout
        try:
            while not context.join(timeout=0.2):
                if time.monotonic() > deadline:
                    raise TimeoutError(f"got no result in {args.timeout} s; raise --timeout if the model is large")
        finally:
            for process in context.processes:
                if process.is_alive():
                    process.kill()
                process.join()
        return [RankResult(**torch.load(f"{folder}/result{rank}")) for rank in range(world)]


def verify(args: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """The report, and everything that is wrong."""
    start = time.perf_counter()
    config = read_config(args.hf)
    check_supported(config)
    open_source(args.hf)  # a damaged folder should not cost the start of all ranks
    layout = {"tp": args.tp, "pp": args.pp, "vpp": args.vpp, "ep": args.ep, "etp": args.etp}
    world = args.world or Layout(**layout).stage_ranks * args.pp
    results = run_ranks(world, args)
    want = reference_log_probs(args.hf)
    scored = [torch.tensor(result.log_probs) for result in results if result.log_probs is not None]
    # NaN compares false with everything; as infinity it is a difference
    difference = max(float((got - want).abs().nan_to_num(nan=torch.inf).max()) for got in scored)
    unset = [f"rank {rank}, {name}: NaN after loading" for rank, found in enumerate(results) for name in found.unset]
    differing = [name for result in results for name in result.differing]
    problems = [f"{name}: differs from the file" for name in differing] + unset
    if difference > args.tolerance:
        problems.append(f"log-probs differ from transformers by {difference:.3g}, more than {args.tolerance:.3g}")
    report = {
        "model_type": config["model_type"],
        "layout": {**layout, "absorb": args.absorb, "world": world},
        "tensors": results[0].tensors,
        "bit_equal": not differing and not unset,
        "differing": differing,
        "max_log_prob_difference": difference,
        "bytes_read_per_rank": [result.bytes_read for result in results],
        "seconds": round(time.perf_counter() - start, 2),
    }
    return report, problems


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hf", type=Path, required=True, help="Hugging Face folder")
    for axis in ("tp", "pp", "vpp", "ep", "etp"):
        parser.add_argument(f"--{axis}", type=int, default=1)
    parser.add_argument("--first-stage-layers", type=int, help="of the first pipeline stage, if stages are uneven")
    parser.add_argument("--absorb", action="store_true", help="kv_b_proj as linear_k_up_proj and linear_v_up_proj")
    parser.add_argument("--world", type=int, help="ranks in all; default: those of one model copy")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the Megatron model")
    parser.add_argument("--tolerance", type=float, default=1e-4, help="of log-probs; default 1e-4")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds until the ranks are ended")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments)
    try:
        report, problems = verify(args)
    except (ValueError, OSError, TimeoutError, mp.ProcessRaisedException, mp.ProcessExitedException) as error:
        sys.stderr.write(f"verify_weights: {error}\n")
        return 1
    sys.stderr.writelines(f"verify_weights: {problem}\n" for problem in problems)
    print(json.dumps(report), flush=True)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
