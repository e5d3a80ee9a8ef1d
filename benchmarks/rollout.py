"""Tokens per second of the rollout engines on the same prompts in one run.

    python3 benchmarks/rollout.py                         32 prompts x 64 tokens, SmolLM2-135M in bf16
    python3 benchmarks/rollout.py --legs ours bare        only these two
    python3 benchmarks/rollout.py --model DIR --samples 4 --dtype float32
    python3 benchmarks/rollout.py --stop --prompts 8 --samples 8 --tokens 192    answers end where they end, as in RL

    transformers   model.generate on one padded batch, as its documentation shows
    kept           the same in a process that keeps freed memory, as `ours` does (not part of the default run)
    hf             the transformers rollout engine of this repository
    ours           its vLLM rollout engine
    bare           one call of vllm.LLM.generate with the same SamplingParams, in vLLM's default form but for eager mode
    compiled       the same with torch.compile, vLLM's default (not part of the default run: minutes to start)

Every leg lives in a process of its own and answers in turn, so a round sees one machine. End tokens are ignored, so all
produce the same number of tokens, unless `--stop`: then a padded batch goes on until its longest answer is done, and
tokens after an end token do not count. On a machine with other work on it the wall clock measures the others too, so
tokens per second of processor time (all threads) are given beside it. The last line is JSON: medians of the rounds
after the first, and ratios, which are medians of the ratios inside a round.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from engines import build_rollout_engine
from engines.base import Prompt, SamplingParams
from engines.rollout.vllm.memory import keep_freed_memory
from engines.spec import ModelSpec, RolloutEngineSpec

Job = Callable[[], int]  # returns the tokens it generated


def prompt_ids(args: argparse.Namespace) -> list[list[int]]:
    """Chat prompts of different lengths."""
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    found = []
    for number in range(args.prompts):
        text = f"What is {number} + {3 * number + 1}?" + " Think about it step by step." * (number % 5)
        found.append(
            tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True)["input_ids"]
        )
    return found


def sampling_of(args: argparse.Namespace) -> SamplingParams:
    ends = AutoTokenizer.from_pretrained(args.model).eos_token_id
    return SamplingParams(n=args.samples, max_new_tokens=args.tokens, eos_token_ids=(ends,), ignore_eos=not args.stop)


def transformers_leg(args: argparse.Namespace) -> Job:
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, args.dtype)).eval()
    prompts = [ids for ids in prompt_ids(args) for _ in range(args.samples)]
    longest = max(map(len, prompts))
    ids = torch.tensor([[model.config.pad_token_id or 0] * (longest - len(row)) + row for row in prompts])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in prompts])

    (end,) = sampling_of(args).eos_token_ids
    least = {} if args.stop else {"min_new_tokens": args.tokens}

    def job() -> int:
        out = model.generate(
            ids, attention_mask=mask, do_sample=True, top_k=0, eos_token_id=end, max_new_tokens=args.tokens, **least
        )
        ended = (out[:, longest:] == end).cumsum(1) - (out[:, longest:] == end).int()
        return int((ended == 0).sum()) if args.stop else ended.numel()

    return job


def kept_leg(args: argparse.Namespace) -> Job:
    keep_freed_memory()
    return transformers_leg(args)


def engine_leg(name: str, args: argparse.Namespace) -> Job:
    engine = build_rollout_engine(
        RolloutEngineSpec(
            name, "cpu", ModelSpec(args.model), args.dtype, max_num_seqs=256, max_model_len=args.max_model_len
        )
    )
    engine.load_weights(iter(load_file(f"{args.model}/model.safetensors").items()), 1)
    prompts, sampling = [Prompt(str(n), tuple(ids)) for n, ids in enumerate(prompt_ids(args))], sampling_of(args)
    return lambda: sum(len(sample.response_ids) for sample in engine.generate(prompts, sampling))


def bare_leg(args: argparse.Namespace, eager: bool) -> Job:
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    from vllm import LLM

    from engines.rollout.vllm.engine import request_sampling

    llm = LLM(
        args.model,
        skip_tokenizer_init=True,
        dtype=args.dtype,
        max_model_len=args.max_model_len,
        max_num_seqs=256,
        enforce_eager=eager,
        enable_prefix_caching=True,
        logprobs_mode="processed_logprobs",
        kv_cache_memory_bytes=2**30,
    )
    sampling = sampling_of(args)
    requests = [(str(number), ids, i) for number, ids in enumerate(prompt_ids(args)) for i in range(args.samples)]

    def job() -> int:
        outputs = llm.generate(
            [{"prompt_token_ids": ids} for _, ids, _ in requests],
            [request_sampling(sampling, uid, index) for uid, _, index in requests],
            use_tqdm=False,
        )
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    return job


LEGS: dict[str, Callable[[argparse.Namespace], Job]] = {
    "transformers": transformers_leg,
    "kept": kept_leg,
    "hf": lambda args: engine_leg("hf", args),
    "ours": lambda args: engine_leg("vllm", args),
    "bare": lambda args: bare_leg(args, eager=True),
    "compiled": lambda args: bare_leg(args, eager=False),
}


def work(leg: str, args: argparse.Namespace, orders: Connection) -> None:
    """A leg's process: one timed job per order."""
    torch.set_num_threads(args.threads)
    job = LEGS[leg](args)
    orders.send("ready")
    while orders.recv():
        wall, cpu = time.perf_counter(), time.process_time()
        tokens = job()
        orders.send((tokens / (time.perf_counter() - wall), tokens / (time.process_time() - cpu)))


def measure(args: argparse.Namespace) -> dict[str, list[tuple[float, float]]]:
    """Leg -> tokens per second of each round, by the clock and by the processor."""
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    context = multiprocessing.get_context("spawn")
    pipes, rates = {}, {leg: [] for leg in args.legs}
    for leg in args.legs:
        pipes[leg], end = context.Pipe()
        context.Process(target=work, args=(leg, args, end), daemon=True).start()
        assert pipes[leg].recv() == "ready"
    for number in range(args.rounds + 1):
        for leg in args.legs if number % 2 else reversed(args.legs):
            pipes[leg].send(True)
            rates[leg].append(pipes[leg].recv())
        print(f"round {number}: " + ", ".join(f"{leg} {rates[leg][-1][0]:.0f} tok/s" for leg in args.legs), flush=True)
    for pipe in pipes.values():
        pipe.send(False)
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="runs/models/SmolLM2-135M-Instruct")
    parser.add_argument("--legs", nargs="+", choices=tuple(LEGS), default=["transformers", "hf", "ours", "bare"])
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--samples", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--stop", action="store_true")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--max-model-len", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    args = parser.parse_args()
    rates = {leg: found[1:] for leg, found in measure(args).items()}
    report: dict[str, Any] = vars(args) | {"model": Path(args.model).name}
    for clock, unit in enumerate(("s", "cpu_s")):
        for leg, found in rates.items():
            report[f"{leg}_tokens_per_{unit}"] = round(statistics.median(rate[clock] for rate in found), 1)
            if "ours" in rates and leg != "ours":
                ratios = [ours[clock] / other[clock] for ours, other in zip(rates["ours"], found, strict=True)]
                report[f"ours_of_{leg}_per_{unit}"] = round(statistics.median(ratios), 3)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
