"""The training processes seen as data-parallel shares, whatever model they hold: cut a batch, call every rank, put
the answers back into order. Actor, reference and critic live in the same processes, so they share one of these."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from engines.base import ForwardOptions, LossFn
from engines.batch import TrainBatch
from engines.metric import Metric, Metrics, merge, over_optimizer_steps
from trainer import cluster
from trainer.batching import balance, denominators, in_order, scatter
from trainer.cluster import WorkerGroup


class Ranks:
    """`group` holds one TrainWorker per rank; the ranks of one data-parallel share get the same data.

    `balance_batch` gives the ranks about equal tokens instead of samples in order.
    """

    def __init__(self, group: WorkerGroup, balance_batch: bool) -> None:
        self.group = group
        self._partition = balance if balance_batch else in_order
        places = group.call("dp_place")
        self.dp_size = places[0][1]
        self._dp_rank = [dp_rank for dp_rank, _, _ in places]
        self._answers = {dp_rank: rank for rank, (dp_rank, _, is_output) in enumerate(places) if is_output}

    def partition(self, batch: TrainBatch) -> list[list[int]]:
        """The samples of each share."""
        return self._partition(batch.lengths, self.dp_size)

    def call(self, method: str, shares: Sequence[TrainBatch], *args: Any) -> list[Any]:
        """Call every rank with its share; the answers in data-parallel order."""
        refs = [cluster.put(share) for share in shares]
        answers = self.group.call_each(method, [(refs[dp_rank], *args) for dp_rank in self._dp_rank])
        return [answers[self._answers[dp_rank]] for dp_rank in range(self.dp_size)]

    def optimizer_steps(
        self, role: str, minis: Iterable[TrainBatch], loss: LossFn, options: ForwardOptions, step: int
    ) -> Metrics:
        """One optimizer step of the `role`'s model per mini-batch. A mini-batch in which every token is masked is
        skipped and counted: it has no gradient."""
        steps: list[Metrics] = []
        for mini in minis:
            counts = denominators(mini)
            if counts.tokens == 0:
                steps.append({f"{role}/skipped_mini_batches": Metric("count", 1)})
                continue
            parts = self.call("update", scatter(mini, self.partition(mini)), role, loss, counts, options, step)
            steps.append(merge(parts) | {f"{role}/optimizer_steps": Metric("count", 1)})
        return over_optimizer_steps(steps)
