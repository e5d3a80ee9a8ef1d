"""The training ranks seen as one model: rooms 5 (update) and the scoring passes before it.

Cuts batches over data-parallel ranks, calls every rank, and puts the answers back into the batch's order.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engines.base import ForwardOptions, LossFn
from engines.batch import TrainBatch
from engines.metric import Metric, Metrics, merge, over_optimizer_steps
from trainer import cluster
from trainer.batching import balance, balance_metrics, denominators, gather, in_order, scatter
from trainer.cluster import WorkerGroup


class Policy:
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

    def score(self, batch: TrainBatch, options: ForwardOptions, ref_options: ForwardOptions | None) -> Metrics:
        """Adds old_log_probs, entropy and routes (if asked) and ref_log_probs (with `ref_options`) to
        `batch.tokens`."""
        partitions = self._partition(batch.lengths, self.dp_size)
        scores = self._call("score", scatter(batch, partitions), options, ref_options)
        batch.tokens["old_log_probs"] = gather([each.log_probs for each in scores], partitions, batch)
        if options.entropy:
            batch.tokens["entropy"] = gather([each.entropy for each in scores], partitions, batch)
        if options.record_routes:
            batch.tokens["routes"] = gather([each.routes for each in scores], partitions, batch)
        if ref_options is not None:
            batch.tokens["ref_log_probs"] = gather([each.ref_log_probs for each in scores], partitions, batch)
        return balance_metrics(batch.lengths, partitions)

    def update(
        self, batch: TrainBatch, rows: Sequence[Sequence[int]], loss: LossFn, options: ForwardOptions, step: int
    ) -> Metrics:
        """One optimizer step per entry of `rows` (the samples of a mini-batch). A mini-batch in which every
        token is masked is skipped and counted: it has no gradient."""
        steps: list[Metrics] = []
        for mini_rows in rows:
            mini = batch.select(mini_rows)
            counts = denominators(mini)
            if counts.tokens == 0:
                steps.append({"actor/skipped_mini_batches": Metric("count", 1)})
                continue
            shares = scatter(mini, self._partition(mini.lengths, self.dp_size))
            parts = self._call("update", shares, loss, counts, options, step)
            steps.append(merge(parts) | {"actor/optimizer_steps": Metric("count", 1)})
        return over_optimizer_steps(steps)

    def _call(self, method: str, shares: list[TrainBatch], *args: Any) -> list[Any]:
        """Call every rank with its share; the answers in data-parallel order."""
        refs = [cluster.put(share) for share in shares]
        answers = self.group.call_each(method, [(refs[dp_rank], *args) for dp_rank in self._dp_rank])
        return [answers[self._answers[dp_rank]] for dp_rank in range(self.dp_size)]

    def save(self, directory: Path) -> None:
        directory.mkdir(parents=True)
        self.group.call("save", str(directory))

    def restore(self, directory: Path) -> None:
        self.group.call("restore", str(directory))

    def export_hf(self, directory: Path, source: str) -> None:
        self.group.call("export_hf", str(directory), source)

    def onload(self) -> None:
        self.group.call("onload")

    def offload(self) -> None:
        self.group.call("offload")
