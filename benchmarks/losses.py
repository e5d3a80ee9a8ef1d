"""Peak memory of log-probs and policy loss over a large vocabulary, beside the plain log-softmax.

    python3 benchmarks/losses.py                         4096 tokens x 32768 columns, bf16, on the CPU
    python3 benchmarks/losses.py --device cuda --tokens 16384 --vocabulary 151936

Counted is what one forward and backward pass needs beyond the logits it is given, in units of the logits' own size.
Their gradient must exist: 1. A float32 copy of bf16 logits alone would be 2. The exit status is 1 when a pass of ours
needs more than its bound. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from torch import Tensor

from engines.batch import Denominators, PolicyOutput, TrainBatch
from engines.logprobs import sum_pi_squared, token_log_probs
from trainer.update.loss import LossOptions, PolicyLoss

# Beyond the logits, in units of their size: the gradient, one chunk of rows, and allocators that keep some slack.
BOUNDS = {"log-probs": 1.5, "log-probs, entropy": 1.5, "sum pi^2": 0.5}


def batch_of(tokens: int) -> TrainBatch:
    """One long sample with everything the loss reads."""
    names = ("loss_mask", "old_log_probs", "advantages", "ref_log_probs")
    return TrainBatch(
        torch.zeros(tokens, dtype=torch.int64),
        torch.tensor([0, tokens]),
        {name: torch.ones(tokens) for name in names},
    )


def loss_of(output: PolicyOutput, batch: TrainBatch) -> Tensor:
    entropy = 0.01 if output.entropy is not None else 0.0
    loss = PolicyLoss(LossOptions(use_kl_loss=True, entropy_coeff=entropy))
    return loss(output, batch, Denominators(batch.num_tokens, 1))[0]


def ours(logits_TV: Tensor, labels_T: Tensor, batch: TrainBatch, entropy: bool) -> None:
    values = token_log_probs(logits_TV, labels_T, temperature=0.9, entropy=entropy)
    loss_of(PolicyOutput(*values), batch).backward()


def plain(logits_TV: Tensor, labels_T: Tensor, batch: TrainBatch) -> None:
    log_p_TV = (logits_TV.float() / 0.9).log_softmax(-1)
    loss_of(PolicyOutput(log_p_TV.gather(1, labels_T[:, None]).squeeze(1)), batch).backward()


def peak_bytes(run: Callable[[], None], device: str) -> int:
    """Bytes at the highest point of `run` above those at its start."""
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        return torch.cuda.max_memory_allocated() - before
    Path("/proc/self/clear_refs").write_text("5")  # forget the highest resident size so far
    before = _kilobytes("VmRSS")
    run()
    return (_kilobytes("VmHWM") - before) * 1024


def _kilobytes(name: str) -> int:
    return next(int(line.split()[1]) for line in Path("/proc/self/status").open() if line.startswith(name))


def measure(tokens: int, vocabulary: int, device: str) -> dict[str, float]:
    """Peak of each way, in units of the logits' size."""
    batch = batch_of(tokens).to(device)
    labels_T = torch.randint(0, vocabulary, (tokens,), device=device)
    logits_TV = torch.randn(tokens, vocabulary, dtype=torch.bfloat16, device=device).requires_grad_()
    ways: dict[str, Callable[[], None]] = {
        "log-probs": lambda: ours(logits_TV, labels_T, batch, entropy=False),
        "log-probs, entropy": lambda: ours(logits_TV, labels_T, batch, entropy=True),
        "sum pi^2": lambda: sum_pi_squared(logits_TV, temperature=0.9),
        "plain log-softmax": lambda: plain(logits_TV, labels_T, batch),
    }
    # Allocators and libraries take memory of their own the first time.
    ours(logits_TV[:64].detach().requires_grad_(), labels_T[:64], batch_of(64).to(device), entropy=True)
    found = {}
    for name, run in ways.items():
        logits_TV.grad = None
        found[name] = peak_bytes(run, device) / (logits_TV.numel() * logits_TV.element_size())
    return found


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--vocabulary", type=int, default=32768)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    args = parser.parse_args(argv)
    found = measure(args.tokens, args.vocabulary, args.device)
    print(f"logits {args.tokens} x {args.vocabulary} bf16, {args.tokens * args.vocabulary * 2 / 2**20:.0f} MiB = 1")
    for name, size in found.items():
        bound = f"at most {BOUNDS[name]}" if name in BOUNDS else ""
        print(f"{name:20} {size:5.2f}  {bound}")
    too_much = [name for name, bound in BOUNDS.items() if found[name] > bound]
    print(json.dumps({"tokens": args.tokens, "vocabulary": args.vocabulary, "peak": found, "too_much": too_much}))
    return 1 if too_much else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
