"""Fused operators change how a transformers model is computed, not what; plain-torch stand-ins play the package."""

from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM

from engines.device import DEVICES
from engines.fsdp.fused import use_fused_operators
from tests.tiny import write_tiny_model


class Package(SimpleNamespace):
    """Counts its calls. `npu_rotary_mul` pairs dimension k with k + d/2, as the operator's default mode does."""

    def __init__(self, *names: str):
        self.calls: list[str] = []
        super().__init__(**{name: self._counted(name) for name in names}, calls=self.calls)

    def _counted(self, name: str):
        def call(*args, **kwargs):
            self.calls.append(name)
            return OPERATORS[name](*args, **kwargs)

        return call


def rotary(x, cos, sin):
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


OPERATORS = {
    "npu_rms_norm": lambda x, weight, epsilon: (functional.rms_norm(x, weight.shape, weight, epsilon), None),
    "npu_swiglu": lambda x, dim: functional.silu(x.chunk(2, dim)[0]) * x.chunk(2, dim)[1],
    "npu_rotary_mul": rotary,
}
# Calls in one forward pass: three layers; two norms a layer, a last one, and with Qwen3 norms of q and k.
NORMS = {"llama": 7, "qwen3": 13, "qwen3_moe": 13, "deepseek_v3": 13}


@pytest.fixture
def files(monkeypatch):
    """The rotary function of a model's file is replaced for the whole process: put it back."""
    from transformers.models.llama import modeling_llama
    from transformers.models.qwen3 import modeling_qwen3
    from transformers.models.qwen3_moe import modeling_qwen3_moe

    for file in (modeling_llama, modeling_qwen3, modeling_qwen3_moe):
        monkeypatch.setattr(file, "apply_rotary_pos_emb", file.apply_rotary_pos_emb)


@pytest.mark.parametrize("kind,mlps", [("llama", 3), ("qwen3", 3), ("qwen3_moe", 0), ("deepseek_v3", 3)])
def test_fused_operators_give_the_same_logits(files, tmp_path, kind, mlps):
    folder = write_tiny_model(tmp_path / kind, kind)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    ids = torch.tensor([[5, 6, 7, 8, 9, 129, 12]])
    with torch.no_grad():
        expected = model(ids).logits
        package = Package(*OPERATORS)
        used = use_fused_operators(model, package)
        assert float((model(ids).logits - expected).abs().max()) <= 2e-6
    rotates = kind != "deepseek_v3"  # its pairs are neighbours
    assert ("npu_rotary_mul" in used) is rotates
    assert package.calls.count("npu_rotary_mul") == (6 if rotates else 0)
    assert package.calls.count("npu_rms_norm") == NORMS[kind]
    assert package.calls.count("npu_swiglu") == mlps


def test_missing_operators_leave_the_model_alone(tmp_path):
    model = AutoModelForCausalLM.from_pretrained(write_tiny_model(tmp_path / "llama", "llama"))
    package = Package("npu_swiglu")
    assert use_fused_operators(model, package) == {"npu_swiglu"}
    model(torch.tensor([[5, 6]]))
    assert set(package.calls) == {"npu_swiglu"}


def test_only_the_npu_has_a_package_and_adds_in_float32():
    assert DEVICES["cpu"].operators is None and DEVICES["cuda"].operators is None
    assert DEVICES["npu"].sum_dtype == torch.float32 and DEVICES["cpu"].sum_dtype == torch.float64
