"""Megatron-Core on CPU over gloo.

Megatron-Core assumes CUDA: it allocates on `torch.cuda.current_device()`, keeps CUDA random states, and
compares `Tensor.type()` with CUDA type names. `adapt()` answers those questions for the host, without
touching torch itself: other libraries in the process still see the true `torch.cuda`.

Tested with megatron-core 0.16.1 and 0.19.2, which need the same. Each adaptation says what it is for and
when it can go. Nothing happens at import; the engine calls `adapt()` once when its device is cpu.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import mappings, random
from megatron.core.transformer.moe import token_dispatcher
from torch import Tensor
from torch.nn import functional

from engines.megatron import imports  # noqa: F401  adapt() covers what is loaded

_HOST = torch.device("cpu")
_gather_evenly, _scatter_evenly = mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim
# torch functions that take `device=`; Megatron calls them with "cuda" or torch.cuda.current_device().
_FACTORIES = (
    *("arange", "empty", "empty_like", "full", "full_like", "linspace", "ones", "ones_like"),
    *("rand", "randn", "tensor", "zeros", "zeros_like"),
)


def adapt() -> None:
    """Apply all lasting adaptations; calling it again covers Megatron modules imported since."""
    _answer_cuda_with_host()
    _keep_random_state_on_host()
    _count_tokens_as_numbers()
    _exchange_unequal_shares()
    # A hint about overlapping CUDA kernels.
    warnings.filterwarnings("ignore", message=".*CUDA_DEVICE_MAX_CONNECTIONS")


def _answer_cuda_with_host() -> None:
    """Give every Megatron module a `torch` whose `torch.cuda` is the host.

    Reason: hundreds of `device="cuda"`, streams, events and synchronisations without a device switch.
    Place: all of megatron.core. Goes when Megatron-Core takes its device from configuration.
    """
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.") and vars(module).get("torch") is torch:
            module.torch = _HOST_TORCH


def _keep_random_state_on_host() -> None:
    """Use torch's CPU generator as "the CUDA generator" of the tensor-parallel random tracker.

    Place: tensor_parallel/random.py, which imports lazy-initialisation helpers of torch.cuda by name.
    Goes with the adaptation above.
    """
    random._get_cuda_rng_state = lambda device="cpu", clone=False, graph_safe=False: torch.get_rng_state()
    random._set_cuda_rng_state = lambda new_state, device=-1, graph_safe=False: torch.set_rng_state(new_state)


def _count_tokens_as_numbers() -> None:
    """Hand the sizes of expert shares to all-to-all as numbers.

    Reason: the alltoall dispatcher turns them into numpy arrays when it copies them from the device; host
    tensors it passes on as they are, and torch refuses tensors as split sizes.
    Place: transformer/moe/token_dispatcher.py, `_maybe_dtoh_and_synchronize`. Goes when it converts host tensors too.
    """

    def to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    token_dispatcher.maybe_move_tensor_to_cpu = to_host


def _exchange_unequal_shares() -> None:
    """Gather and reduce-scatter rows when ranks have different numbers of them (EP and expert-TP together).

    Reason: gloo's all_gather and reduce_scatter want equal shares. Place: tensor_parallel/mappings.py, called by
    the alltoall dispatcher. Goes when gloo takes unequal ones.
    """

    def gather(rows: Tensor, group: dist.ProcessGroup, sizes: list[int] | None = None, buffer: bool = False) -> Tensor:
        if sizes is None or group.size() == 1:
            return _gather_evenly(rows, group, sizes, buffer)
        padding = [0, 0] * (rows.dim() - 1) + [0, max(sizes) - rows.shape[0]]
        padded = functional.pad(rows, padding).contiguous()
        shares = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(shares, padded, group=group)
        return torch.cat([share[:size] for share, size in zip(shares, sizes, strict=True)])

    def scatter(rows: Tensor, group: dist.ProcessGroup, sizes: list[int] | None = None, buffer: bool = False) -> Tensor:
        if sizes is None or group.size() == 1:
            return _scatter_evenly(rows, group, sizes, buffer)
        total = rows.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total.split(sizes)[group.rank()].clone()

    mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim = gather, scatter


@contextlib.contextmanager
def construction() -> Iterator[None]:
    """While models and optimizers are built: CUDA type names for host tensors, `Tensor.cuda` as identity.

    Reason: optimizer/optimizer.py and distrib_optimizer.py accept only "torch.cuda.*Tensor" parameters;
    language_module.py moves a tied embedding with `.cuda()`. Limited to construction because it changes
    torch.Tensor itself. Goes when those checks compare dtypes.
    """
    names, move = torch.Tensor.type, torch.Tensor.cuda

    def type_name(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = names(self, *args, **kwargs)
        return answer.replace("torch.", "torch.cuda.", 1) if isinstance(answer, str) else answer

    torch.Tensor.type = type_name
    torch.Tensor.cuda = lambda self, *args, **kwargs: self
    try:
        yield
    finally:
        torch.Tensor.type, torch.Tensor.cuda = names, move


class _Nothing:
    """A stream, an event, or the context of one, where everything already runs in order."""

    def __init__(self, *args: Any, **kwargs: Any):
        pass

    def __enter__(self) -> _Nothing:
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def _ignore(self, *args: Any, **kwargs: Any) -> None:
        pass

    record = wait = wait_event = wait_stream = synchronize = _ignore

    def record_event(self, event: _Nothing | None = None) -> _Nothing:
        return event or _Nothing()


class _HostCuda(ModuleType):
    """torch.cuda as seen by Megatron; whatever is not listed is torch's own."""

    Stream = Event = stream = _Nothing
    current_stream = default_stream = _Nothing

    current_device = staticmethod(lambda: _HOST)
    set_device = synchronize = empty_cache = staticmethod(lambda *args, **kwargs: None)
    memory_allocated = memory_reserved = max_memory_allocated = staticmethod(lambda *args, **kwargs: 0)
    manual_seed = manual_seed_all = staticmethod(torch.manual_seed)
    get_rng_state = staticmethod(lambda device=None: torch.get_rng_state())
    set_rng_state = staticmethod(lambda state, device=None: torch.set_rng_state(state))

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)


class _HostTorch(ModuleType):
    """torch as seen by Megatron: factories build on the host whatever device they are told."""

    def __init__(self) -> None:
        super().__init__("torch")
        self.cuda = _HostCuda("torch.cuda")
        for name in _FACTORIES:
            setattr(self, name, _on_host(getattr(torch, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _on_host(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def build(*args: Any, **kwargs: Any) -> torch.Tensor:
        if kwargs.get("device") is not None:
            kwargs["device"] = _HOST
        return factory(*args, **kwargs)

    return build


_HOST_TORCH = _HostTorch()
