"""AdamW on Megatron's optimizers, with the step taken apart so that all ranks agree before anybody acts."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from engines.spec import MegatronSpec, OptimSpec


def is_distributed(backend: MegatronSpec) -> bool:
    """With one copy of the weights there is nothing to shard, and the exchange would copy them all twice."""
    return (
        backend.use_distributed_optimizer
        and parallel_state.get_data_parallel_world_size(with_context_parallel=True) > 1
    )


def wrap(config: TransformerConfig, chunks: list[nn.Module], backend: MegatronSpec) -> list[DistributedDataParallel]:
    """Give every parameter a float32 `main_grad` in a contiguous buffer that is reduced once per update."""
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=False,
        use_distributed_optimizer=is_distributed(backend),
        check_for_nan_in_grad=False,
        average_in_collective=False,
    )
    return [
        DistributedDataParallel(config=config, ddp_config=ddp, module=chunk, disable_bucketing=i > 0)
        for i, chunk in enumerate(chunks)
    ]


def build_optimizer(
    chunks: list[DistributedDataParallel], optim: OptimSpec, backend: MegatronSpec
) -> MegatronOptimizer:
    """Float32 main weights and Adam state; matrices decay, biases and one-dimensional parameters do not."""
    dtype = chunks[0].config.params_dtype
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=optim.schedule.lr,
            weight_decay=optim.weight_decay,
            adam_beta1=optim.betas[0],
            adam_beta2=optim.betas[1],
            adam_eps=optim.eps,
            clip_grad=optim.clip_grad,
            bf16=dtype == torch.bfloat16,
            params_dtype=dtype,
            use_distributed_optimizer=is_distributed(backend),
        ),
        chunks,
    )
    for group in optimizer.param_groups:
        # Megatron leaves this to its own learning-rate scheduler, which we do not use.
        group["weight_decay"] = optim.weight_decay * group["wd_mult"]
        # torch's AdamW (where Apex or TE would have their own): one kernel instead of a loop over tensors.
        if "fused" in group and group["params"] and group["params"][0].device.type in ("cpu", "cuda"):
            group["fused"] = True
    return optimizer


def zero_grad(chunks: list[DistributedDataParallel], optimizer: MegatronOptimizer) -> None:
    for chunk in chunks:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()


@torch.no_grad()
def step(optimizer: MegatronOptimizer, optim: OptimSpec, lr: float, loss_is_finite: Tensor) -> tuple[float, bool]:
    """Clip and apply, unless any rank saw a non-finite loss or norm. Returns (norm before clipping, applied).

    loss_is_finite  bool scalar of this rank, on the compute device
    The norm is that of the whole model: each element counts once under TP, PP, tied embeddings and DP.
    """
    optimizer.prepare_grads()
    norm = float(optimizer.get_grad_norm())
    if not _everywhere(loss_is_finite & math.isfinite(norm)):
        return norm, False
    coefficient = optim.clip_grad / (norm + 1e-6) if optim.clip_grad > 0 else 1.0
    if coefficient < 1.0:
        # Experts have an optimizer of their own: their gradients are reduced over other ranks.
        parameters = (p for inner in optimizer.chained_optimizers for p in inner.get_parameters())
        grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
        torch._foreach_mul_(grads, coefficient)
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step_with_ready_grads()
    return norm, True


def _everywhere(verdict: Tensor) -> bool:
    """True when every rank of the job says so."""
    verdict = verdict.float()
    dist.all_reduce(verdict, op=dist.ReduceOp.MIN)
    return bool(verdict)


def grad_buffers(chunks: list[DistributedDataParallel]) -> list[Tensor]:
    """The contiguous gradient buffers behind all `main_grad` views."""
    return [buffer.grad_data for chunk in chunks for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]]


def state_tensors(optimizer: MegatronOptimizer, models: list[nn.Module]) -> list[Tensor]:
    """Main weights and Adam moments, without what shares its memory with the model's own parameters."""
    own = {p.untyped_storage().data_ptr() for model in models for p in model.parameters()}
    tensors = [
        tensor
        for inner in optimizer.chained_optimizers
        for group in inner.optimizer.param_groups
        for p in group["params"]
        for tensor in [p.detach(), *inner.optimizer.state[p].values()]
    ]
    return [t for t in tensors if isinstance(t, Tensor) and t.untyped_storage().data_ptr() not in own]
