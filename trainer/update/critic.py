"""The critic: a value model in the training processes, which it shares with the actor by taking turns.

values of the policy that sampled -> advantages and returns -> the critic's own optimizer steps
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from engines.base import ForwardOptions
from engines.batch import TrainBatch
from engines.metric import Metrics
from trainer.batching import gather, mini_batches, scatter
from trainer.update.ranks import Ranks
from trainer.update.value_loss import ValueLoss, explained_variance

# What the loss reads: nothing else of a batch travels to the ranks.
READS = ("loss_mask", "returns", "values")


@dataclass(frozen=True)
class CriticPlan:
    """What the configuration decides. `mini_batch_size` counts prompts; `shuffle_seed` None keeps their order.

    The actor starts to learn after `warmup_steps` training steps, in which the critic learns alone.
    """

    options: ForwardOptions
    loss: ValueLoss
    mini_batch_size: int
    epochs: int = 1
    shuffle_seed: int | None = None
    warmup_steps: int = 0

    def actor_learns(self, step: int) -> bool:
        """Whether the training step after `step` completed ones updates the actor."""
        return step >= self.warmup_steps

    def rows(self, num_prompts: int, n: int, step: int) -> list[list[int]]:
        """The samples behind each of the step's optimizer steps: `epochs` passes, each in its own order."""
        rows: list[list[int]] = []
        for epoch in range(self.epochs):
            seed = None if self.shuffle_seed is None else self.shuffle_seed + step * self.epochs + epoch
            rows += mini_batches(num_prompts, n, self.mini_batch_size, seed)
        return rows


class Critic:
    """The value model on all training ranks. `values` and `update` are for the inside of a `turn`; the others, for
    the outside, take one themselves."""

    def __init__(self, ranks: Ranks, plan: CriticPlan) -> None:
        self.ranks, self.plan = ranks, plan

    @contextmanager
    def turn(self) -> Iterator[None]:
        """On the devices, for as long as the block runs. The caller sends the actor away first where both do not
        fit."""
        self.ranks.group.call("onload", "critic")
        yield
        self.ranks.group.call("offload", "critic")

    def values(self, batch: TrainBatch) -> None:
        """Adds `values` to `batch.tokens`: entry t is what is still to be won before token t."""
        partitions = self.ranks.partition(batch)
        bare = TrainBatch(batch.input_ids, batch.cu_seqlens)
        answers = self.ranks.call("values", scatter(bare, partitions), self.plan.options)
        batch.tokens["values"] = gather(answers, partitions, batch)

    def update(self, batch: TrainBatch, rows: Sequence[Sequence[int]], step: int) -> Metrics:
        """One optimizer step per entry of `rows` towards `returns`; metrics are named critic/*."""
        read = TrainBatch(batch.input_ids, batch.cu_seqlens, {name: batch.tokens[name] for name in READS})
        minis = (read.select(mini_rows) for mini_rows in rows)
        metrics = self.ranks.optimizer_steps("critic", minis, self.plan.loss, self.plan.options, step)
        return metrics | explained_variance(batch)

    def save(self, directory: Path) -> None:
        directory.mkdir(parents=True)
        with self.turn():
            self.ranks.group.call("save", str(directory), "critic")

    def restore(self, directory: Path) -> None:
        with self.turn():
            self.ranks.group.call("restore", str(directory), "critic")

    def export_hf(self, directory: Path, source: str) -> None:
        """A Hugging Face folder of a token classifier with one label; `source` is the critic's model.path."""
        with self.turn():
            self.ranks.group.call("export_hf", str(directory), source, "critic")
