"""What the critic should minimise: the clipped squared error of its values (arXiv 1707.06347).

Shape legend: T packed tokens of one micro-batch.

    1/2 agg(max((V - R)^2, (clip(V, V_old - e, V_old + e) - R)^2))

with the same aggregation and global denominators as the policy loss.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engines.batch import Denominators, TrainBatch, ValueOutput
from engines.metric import Metric, Metrics
from trainer.update.loss import AggMode, aggregate


@dataclass(frozen=True)
class ValueLoss:
    """Picklable, called by the critic's engine. Names follow `critic.*`; `cliprange_value` None does not clip.

    Reads tokens loss_mask, returns and, with clipping, values: those of the pass before the updates.
    """

    cliprange_value: float | None = 0.5
    loss_agg_mode: AggMode = "token-mean"
    loss_scale_factor: float | None = None

    def __call__(self, output: ValueOutput, batch: TrainBatch, denominators: Denominators) -> tuple[Tensor, Metrics]:
        """The micro-batch's share of the global loss (a scalar with gradient) and its metrics."""
        mask_T = batch.tokens["loss_mask"].bool()
        values_T, returns_T = (torch.where(mask_T, x, 0.0) for x in (output.values, batch.tokens["returns"].detach()))
        loss_T, clipped_T = (values_T - returns_T).square(), torch.zeros_like(mask_T)
        if self.cliprange_value is not None:
            old_T = torch.where(mask_T, batch.tokens["values"].detach(), 0.0)
            near_T = values_T.clamp(old_T - self.cliprange_value, old_T + self.cliprange_value)
            bounded_T = (near_T - returns_T).square()
            clipped_T = bounded_T > loss_T
            loss_T = torch.maximum(loss_T, bounded_T)
        loss = aggregate(loss_T / 2, mask_T, batch, denominators, self.loss_agg_mode, self.loss_scale_factor)
        sums = [(x.detach().float() * mask_T).sum() for x in (clipped_T, values_T, mask_T)]
        value, clipped, predicted, tokens = torch.stack([loss.detach(), *sums]).tolist()
        return loss, {
            "critic/vf_loss": Metric("partial", value),
            "critic/vf_clipfrac": Metric("mean", clipped, tokens),
            "critic/vpred_mean": Metric("mean", predicted, tokens),
        }


def explained_variance(batch: TrainBatch) -> Metrics:
    """`critic/vf_explained_var` = 1 - Var(returns - values) / Var(returns) over the valid tokens of a whole step.

    1 is a perfect critic, 0 one that knows the mean alone. Left out where returns do not vary. Variances do not
    merge over micro-batches: call it once, with the values of the pass before the updates.
    """
    mask_T = batch.tokens["loss_mask"].bool()
    values, returns = batch.tokens["values"][mask_T].double(), batch.tokens["returns"][mask_T].double()
    if returns.numel() < 2 or returns.max() == returns.min():
        return {}
    return {"critic/vf_explained_var": Metric("last", float(1 - (returns - values).var() / returns.var()))}
