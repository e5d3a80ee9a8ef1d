"""What makes vLLM fast on CPU without torch.compile changes no answer and is really in use."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch

from tests.engines.vllm_bench import engine, write_model
from tests.vllm_process import needs_vllm, run

pytestmark = [*needs_vllm]

# 12 tensors of 40 MiB, one after the other (glibc maps what is above 32 MiB anew); prints the page faults they took.
FAULTS = """
import resource, torch
from engines.rollout.vllm.memory import keep_freed_memory
keep_freed_memory()
def work(times):
    for _ in range(times):
        torch.ones(10 * 2**20)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
print(-work(2) + work(12))
"""


def _compare_norms() -> None:
    from engines.rollout.vllm.cpu_kernels import fused_add_rms_norm, rms_norm

    for rows, width in ((1, 64), (65, 576), (3, 96)):
        for dtype, off in ((torch.float32, 1e-6), (torch.bfloat16, 2**-8)):
            torch.manual_seed(rows)
            x, residual = torch.randn(rows, width).to(dtype), torch.randn(rows, width).to(dtype)
            weight = (1 + 0.1 * torch.randn(width)).to(dtype)
            summed = x.double() + residual.double()
            got = rms_norm.impl_fn(x, weight, 1e-5, None)
            torch.testing.assert_close(got.double(), _exact(x, weight), rtol=off, atol=1e-6)
            normed, kept = fused_add_rms_norm.impl_fn(x.clone(), residual.clone(), weight, 1e-5, None)
            torch.testing.assert_close(kept, summed.to(dtype))
            torch.testing.assert_close(normed.double(), _exact(summed, weight), rtol=2 * off, atol=1e-6)


def _exact(values: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = values.double()
    return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5) * weight.double()


def test_norm_kernels_give_the_exact_norm_but_for_rounding():
    run(_compare_norms)


def _refuse_what_does_not_fit() -> None:
    from engines.rollout.vllm.cpu_kernels import fused_add_rms_norm, rms_norm

    x, weight = torch.randn(4, 96), torch.randn(32)
    inside = x[:, 32:64]
    for values, scale in ((inside, weight), (torch.randn(4, 24), torch.randn(24)), (x, None)):
        assert not rms_norm.supports_args(values, scale, 1e-5)
    whole = inside.contiguous()
    assert not rms_norm.supports_args(whole, weight.bfloat16(), 1e-5)
    assert not rms_norm.supports_args(whole, weight, 1e-5, 16)
    assert not fused_add_rms_norm.supports_args(whole, inside, weight, 1e-5)
    assert rms_norm.supports_args(whole, weight, 1e-5) and fused_add_rms_norm.supports_args(whole, whole, weight, 1e-5)


def test_a_norm_takes_vllms_own_form_where_the_kernel_does_not_fit():
    """It would read a strided row (queries inside qkv) as if it were contiguous, and takes 16 numbers at a time."""
    run(_refuse_what_does_not_fit)


def _chosen_norms(folder: str) -> list[list[str]]:
    built = engine("vllm", write_model(folder, "qwen3"))
    from vllm import ir

    chosen = [ir.ops.rms_norm.get_priority(), ir.ops.fused_add_rms_norm.get_priority()]
    built.close()
    return chosen


def test_the_engine_runs_with_these_kernels(tmp_path):
    assert run(_chosen_norms, str(tmp_path)) == [["fused_cpu", "native"]] * 2


def test_freed_memory_is_used_again():
    """40 MiB are 10240 pages."""
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-c", FAULTS], env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    assert int(done.stdout) < 12 * 10240 // 2
