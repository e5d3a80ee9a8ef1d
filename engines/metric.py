"""A metric carries its own reduction; nothing is guessed from its name."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

logger = logging.getLogger(__name__)

Kind = Literal["partial", "mean", "max", "min", "count", "last"]


@dataclass(frozen=True)
class Metric:
    """One reported number and the way it merges over micro-batches, ranks and optimizer steps.

    partial  already divided by the global denominator: summed over micro-batches and ranks
    mean     `total / weight`: totals and weights are summed, then divided
    max, min extreme over everything
    count    summed over everything, also over optimizer steps
    last     the latest value
    """

    kind: Kind
    total: float
    weight: float = 1.0

    def merge(self, other: Metric) -> Metric:
        assert self.kind == other.kind, f"cannot merge a {self.kind} metric with a {other.kind} one"
        if self.kind == "max":
            return Metric("max", max(self.total, other.total))
        if self.kind == "min":
            return Metric("min", min(self.total, other.total))
        if self.kind == "last":
            return other
        if self.kind == "mean":
            return Metric("mean", self.total + other.total, self.weight + other.weight)
        return Metric(self.kind, self.total + other.total)

    @property
    def value(self) -> float:
        if self.kind == "mean":
            return self.total / self.weight if self.weight else 0.0
        return self.total


Metrics = dict[str, Metric]


def merge(parts: Iterable[Metrics]) -> Metrics:
    """Merge micro-batches or ranks. A key present in some parts only is merged over those."""
    merged: Metrics = {}
    for part in parts:
        for name, metric in part.items():
            merged[name] = merged[name].merge(metric) if name in merged else metric
    return merged


def optimizer_metrics(role: str, grad_norm: float, lr: float, applied: bool, dp_rank: int) -> Metrics:
    """What both engines report of an optimizer step. A step is skipped (not `applied`) on all ranks alike when
    a loss or the gradient norm is not finite; the verdict is the same everywhere, so one DP share counts it."""
    if not applied:
        logger.warning(
            "%s: gradient norm %s or a loss is not finite: this optimizer step is skipped on all ranks", role, grad_norm
        )
    return {
        f"{role}/grad_norm": Metric("mean", grad_norm),
        f"{role}/lr": Metric("last", lr),
        f"{role}/nonfinite_grad_steps": Metric("count", float(not applied and dp_rank == 0)),
    }


def over_optimizer_steps(steps: Iterable[Metrics]) -> Metrics:
    """Average partials and means over the optimizer steps of one training step; the rest merges."""
    averaged = [
        {
            name: Metric("mean", metric.value) if metric.kind in ("partial", "mean") else metric
            for name, metric in step.items()
        }
        for step in steps
    ]
    return merge(averaged)
