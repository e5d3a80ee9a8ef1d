"""The training ranks seen as one model: rooms 5 (update) and the scoring passes before it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from torch import Tensor

from engines.base import ForwardOptions
from engines.batch import TrainBatch
from engines.metric import Metrics
from trainer.batching import balance_metrics, gather, scatter
from trainer.cluster import WorkerGroup
from trainer.update.loss import PolicyLoss
from trainer.update.ranks import Ranks


class Policy:
    """The actor (and the reference beside it) on the ranks of `group`; `balance_batch` as in Ranks."""

    def __init__(self, group: WorkerGroup, balance_batch: bool) -> None:
        self.group = group
        self.ranks = Ranks(group, balance_batch)

    def score(self, batch: TrainBatch, options: ForwardOptions | None, ref_options: ForwardOptions | None) -> Metrics:
        """Adds to `batch.tokens`: old_log_probs, entropy, sum_pi_squared and routes as `options` ask for them, and
        ref_log_probs with `ref_options`. Without either of the two its pass is left out."""
        partitions = self.ranks.partition(batch)
        if options is None and ref_options is None:
            return balance_metrics(batch.lengths, partitions)
        scores = self.ranks.call("score", scatter(batch, partitions), options, ref_options)

        def add(name: str, values: Sequence[Tensor]) -> None:
            batch.tokens[name] = gather(values, partitions, batch)

        if options is not None:
            add("old_log_probs", [each.old.log_probs for each in scores])
            if options.entropy:
                add("entropy", [each.old.entropy for each in scores])
            if options.sum_pi_squared:
                add("sum_pi_squared", [each.old.sum_pi_squared for each in scores])
            if options.record_routes:
                add("routes", [each.old.routes for each in scores])
        if ref_options is not None:
            add("ref_log_probs", [each.ref_log_probs for each in scores])
        return balance_metrics(batch.lengths, partitions)

    def update(
        self, batch: TrainBatch, rows: Sequence[Sequence[int]], loss: PolicyLoss, options: ForwardOptions, step: int
    ) -> Metrics:
        """One optimizer step per entry of `rows` (the samples of a mini-batch)."""

        def minis() -> Iterator[TrainBatch]:
            for number, mini_rows in enumerate(rows):
                mini = batch.select(mini_rows)
                loss.prepare_mini(mini, step, number)
                yield mini

        return self.ranks.optimizer_steps("actor", minis(), loss, options, step)

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
