"""An Ascend host without Ascend: enough of torch_npu for the real MindSpeed to run on CPU.

The packages that need a device are stand-ins whose every name exists and does nothing; the fused operators that
a forward and backward pass really needs are written in plain torch. Changes torch for the whole process: call
`install()` first thing in a process of its own.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

ABSENT = ("torch_npu", "torchair", "acl", "mindspeed.ops.triton")


class Anything:
    """Callable, has every attribute, decorates without changing."""

    def __init__(self, *args: Any, **kwargs: Any):
        pass

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if len(args) == 1 and isinstance(args[0], FunctionType | type) else Anything()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything()


class StandIn(ModuleType):
    __path__: list[str] = []
    __file__ = "/nonexistent/__init__.py"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything()


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: object = None, target: object = None) -> importlib.machinery.ModuleSpec | None:
        if any(name == absent or name.startswith(f"{absent}.") for absent in ABSENT):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


class Host(torch.overrides.TorchFunctionMode):
    """Tensors for "npu" and "cuda" are made on the host."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("device") is not None and torch.device(kwargs["device"]).type in ("npu", "cuda"):
            kwargs["device"] = torch.device("cpu")
        return func(*args, **kwargs)


def install() -> None:
    sys.meta_path.insert(0, Finder())
    torch.utils.rename_privateuse1_backend("npu")
    torch.npu = StandIn("torch.npu")
    torch.npu.is_available = lambda: False
    torch.npu.current_device = torch.cuda.current_device = lambda: torch.device("cpu")
    import torch_npu

    torch_npu.npu = torch.npu
    torch_npu.unsupported_dtype = ()
    for operator in OPERATORS:
        setattr(torch_npu, operator.__name__, operator)
    multiply = torch.bmm
    # MindSpeed's unfused absorbed attention multiplies many query heads by one shared key head.
    torch.bmm = lambda a, b: multiply(a, b if len(a) == len(b) else b.repeat_interleave(len(a) // len(b), 0))
    Host().__enter__()


def npu_rms_norm(x: Tensor, weight: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, None]:
    return functional.rms_norm(x, weight.shape, weight, epsilon), None


def npu_swiglu(x: Tensor, dim: int = -1) -> Tensor:
    gate, up = x.chunk(2, dim)
    return functional.silu(gate) * up


def _sequences(offsets: Tensor) -> list[tuple[int, int]]:
    return list(zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True))


def npu_lightning_indexer(
    query: Tensor,
    key: Tensor,
    weights: Tensor,
    *,
    actual_seq_lengths_query: Tensor,
    actual_seq_lengths_key: Tensor,
    layout_query: str,
    layout_key: str,
    sparse_count: int,
    sparse_mode: int,
    return_value: bool,
) -> tuple[Tensor, Tensor]:
    """Packed [T, heads, D] queries, [T, 1, D] keys -> the best `sparse_count` earlier tokens of each, or -1."""
    assert (layout_query, layout_key, sparse_mode, return_value) == ("TND", "TND", 3, True)
    best = torch.full((len(query), 1, sparse_count), -1, dtype=torch.int32)
    for start, stop in _sequences(actual_seq_lengths_query):
        products = torch.einsum("thd,sd->ths", query[start:stop].float(), key[start:stop, 0].float()).relu()
        scores = torch.einsum("ths,th->ts", products, weights[start:stop].float())
        scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -torch.inf)
        value, index = scores.topk(min(sparse_count, stop - start), -1)
        best[start:stop, 0, : index.shape[-1]] = index.masked_fill(value == -torch.inf, -1).int()
    return best, torch.zeros_like(best)


def npu_sparse_flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    sparse_indices: Tensor,
    block_table: None,
    actual_seq_lengths_query: Tensor,
    actual_seq_lengths_kv: Tensor,
    query_rope: Tensor,
    key_rope: Tensor,
    scale_value: float,
    sparse_block_size: int,
    layout_query: str,
    layout_kv: str,
    sparse_mode: int,
    attention_mode: int,
    return_softmax_lse: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Packed [T, heads, D] queries over the chosen ones of [T, 1, D] keys and values."""
    assert (layout_query, layout_kv, sparse_block_size, sparse_mode, attention_mode) == ("TND", "TND", 1, 3, 2)
    outputs = []
    for start, stop in _sequences(actual_seq_lengths_query):
        q = torch.cat([query[start:stop], query_rope[start:stop]], -1)
        k = torch.cat([key[start:stop, 0], key_rope[start:stop, 0]], -1)
        size = stop - start
        chosen = torch.zeros(size, size + 1, dtype=torch.bool)  # the last column takes the -1 entries
        chosen.scatter_(1, sparse_indices[start:stop, 0].long() % (size + 1), True)
        scores = torch.einsum("tnd,sd->nts", q, k) * scale_value
        probabilities = scores.masked_fill(~chosen[:, :size], -torch.inf).softmax(-1)
        outputs.append(torch.einsum("nts,sd->tnd", probabilities, value[start:stop, 0]))
    return torch.cat(outputs), torch.zeros(1), torch.zeros(1)


def npu_sparse_lightning_indexer_grad_kl_loss(
    query: Tensor, key: Tensor, query_index: Tensor, key_index: Tensor, weights: Tensor, *args: Any, **kwargs: Any
) -> tuple[Tensor, ...]:
    """No loss: in the runs here the indexer is frozen."""
    return torch.zeros_like(query_index), torch.zeros_like(key_index), torch.zeros_like(weights), torch.zeros(1)


OPERATORS = (
    npu_rms_norm,
    npu_swiglu,
    npu_lightning_indexer,
    npu_sparse_flash_attention,
    npu_sparse_lightning_indexer_grad_kl_loss,
)
