"""cpu | cuda | npu behind one object. The only place that tells accelerators apart."""

from __future__ import annotations

import importlib.util
import resource
import sys
from dataclasses import dataclass
from types import ModuleType

import torch


@dataclass(frozen=True)
class Device:
    """`kind` is cpu, cuda or npu; `backend` is what init_process_group wants; `ray_resource` what Ray counts;
    `sum_dtype` the widest type that its collectives add (HCCL knows no float64, and once MindSpeed is loaded a
    float64 sum stays local without an error)."""

    kind: str
    backend: str
    visibility_variable: str | None
    ray_resource: str
    sum_dtype: torch.dtype = torch.float64

    @property
    def module(self) -> ModuleType | None:
        """torch.cuda or torch.npu, None on CPU."""
        return None if self.kind == "cpu" else getattr(torch, self.kind)

    def set_index(self, index: int) -> torch.device:
        if self.kind == "cpu":
            return torch.device("cpu")
        self.module.set_device(index)
        return torch.device(self.kind, index)

    def synchronize(self) -> None:
        if self.module is not None:
            self.module.synchronize()

    def empty_cache(self) -> None:
        if self.module is not None:
            self.module.empty_cache()

    @property
    def operators(self) -> ModuleType | None:
        """The package that holds fused operators beside torch's own: torch_npu; None elsewhere."""
        return sys.modules["torch_npu"] if self.kind == "npu" else None

    def peak_memory_gb(self) -> float:
        """Peak of this process since its start (CPU: resident set; else allocator), in GiB."""
        if self.module is None:
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        return self.module.max_memory_allocated() / 2**30


DEVICES = {
    "cpu": Device("cpu", "gloo", None, "CPU"),
    "cuda": Device("cuda", "cpu:gloo,cuda:nccl", "CUDA_VISIBLE_DEVICES", "GPU"),
    "npu": Device("npu", "cpu:gloo,npu:hccl", "ASCEND_RT_VISIBLE_DEVICES", "NPU", torch.float32),
}


def get_device(kind: str) -> Device:
    """`auto` is npu if torch_npu is installed and sees a device, else cuda, else cpu."""
    if kind == "auto":
        return DEVICES[_detect()]
    if kind == "npu":
        _import_torch_npu()
    if kind not in DEVICES:
        raise ValueError(f"got device {kind!r}; expected one of {sorted(DEVICES)} or auto; set trainer.device")
    return DEVICES[kind]


def _detect() -> str:
    if importlib.util.find_spec("torch_npu") is not None:
        _import_torch_npu()
        if torch.npu.is_available():
            return "npu"
    return "cuda" if torch.cuda.is_available() else "cpu"


def _import_torch_npu() -> None:
    if importlib.util.find_spec("torch_npu") is None:
        raise ValueError(
            "got trainer.device=npu, but the package torch_npu is not installed; expected torch_npu with CANN; "
            "install the extra `npu` on an Ascend host or set trainer.device=cpu"
        )
    import torch_npu  # noqa: F401  registers torch.npu
