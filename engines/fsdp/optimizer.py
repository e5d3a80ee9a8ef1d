"""AdamW on the local rows of sharded parameters, with a global gradient norm and one non-finite verdict.

AdamW acts element by element, so each rank updates its own rows as plain tensors: no DTensor dispatch
per operation, and the fused kernels apply (arXiv 1711.05101).
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor, nn

from engines.device import DEVICES
from engines.fsdp.shard import local
from engines.spec import OptimSpec

# Same guard as torch.nn.utils.clip_grad_norm_: a norm of exactly 0 must not divide.
_CLIP_EPS = 1e-6


class ShardedAdamW:
    """`group` is the group over which parameters are cut (HSDP replicas hold equal gradients)."""

    def __init__(self, model: nn.Module, spec: OptimSpec, group: dist.ProcessGroup) -> None:
        self.spec = spec
        self.group = group
        self._sharded = [p for p in model.parameters() if p.requires_grad]
        self._locals = [nn.Parameter(local(p.detach())) for p in self._sharded]
        # A cut along dim 0 keeps the number of dimensions: matrices stay matrices.
        decay = [p for p in self._locals if p.ndim >= 2]
        keep = [p for p in self._locals if p.ndim < 2]
        self.adamw = torch.optim.AdamW(
            [{"params": decay, "weight_decay": spec.weight_decay}, {"params": keep, "weight_decay": 0.0}],
            lr=0.0,  # set at every step
            betas=spec.betas,
            eps=spec.eps,
            fused=self._locals[0].device.type in ("cpu", "cuda"),  # elsewhere torch picks the foreach kernels
        )

    def step(self, lr: float, loss_finite: Tensor) -> tuple[float, bool]:
        """Clip and apply the accumulated gradients unless any rank saw a non-finite value, then drop them.

        loss_finite  bool scalar of this rank. Returns (global gradient norm before clipping, applied).
        """
        self._attach()
        norm, finite = self._global_norm(loss_finite)
        if finite:
            if self.spec.clip_grad > 0:
                scale = min(1.0, self.spec.clip_grad / (norm + _CLIP_EPS))
                torch._foreach_mul_([p.grad for p in self._locals], scale)
            for group in self.adamw.param_groups:
                group["lr"] = lr
            self.adamw.step()
        for sharded, own in zip(self._sharded, self._locals, strict=True):
            sharded.grad = own.grad = None
        return norm, finite

    def _attach(self) -> None:
        """Point the local views at the current storage (offloading moves it) and at the new gradients."""
        for sharded, own in zip(self._sharded, self._locals, strict=True):
            own.data = local(sharded.detach())
            own.grad = local(sharded.grad) if sharded.grad is not None else torch.zeros_like(own)

    def _global_norm(self, loss_finite: Tensor) -> tuple[float, bool]:
        """L2 norm over all ranks' rows (float32 per tensor, then the device's widest sum), and if all is finite."""
        norms = torch._foreach_norm([p.grad for p in self._locals], dtype=torch.float32)
        squares = torch.stack(norms).double().square().sum()
        total = torch.stack([squares, (~loss_finite).to(squares)])
        total = total.to(DEVICES[total.device.type].sum_dtype)
        dist.all_reduce(total, group=self.group)
        bad = total[1].clone()
        dist.all_reduce(bad)  # replicas have their own losses; every rank must take the same branch
        norm = math.sqrt(float(total[0])) if torch.isfinite(total[0]) else math.nan
        return norm, math.isfinite(norm) and float(bad) == 0

    def move_state(self, device: torch.device | str) -> None:
        for state in self.adamw.state.values():
            for name, value in state.items():
                if name != "step" and isinstance(value, Tensor):
                    state[name] = value.to(device, non_blocking=True)
