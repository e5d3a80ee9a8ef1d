"""Answers to the validation prompts, with their own sampling: accuracy over time, and the reward before training."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

from engines.base import SamplingParams
from trainer.config import Config
from trainer.prompts import PromptSource
from trainer.report.console import Console
from trainer.rollout.collect import Collector
from trainer.rollout.scored import Scored
from trainer.validation.history import ValidationHistory
from trainer.validation.reward_report import from_scored, refuse_flat, report_lines, write_reward_report
from trainer.validation.summary import ValRecord, sample_table, summarise, write_samples

log = logging.getLogger(__name__)


class Validator:
    """`sampling` is greedy unless val_kwargs say otherwise; `train_sampling` that of the rollout."""

    def __init__(
        self,
        config: Config,
        prompts: PromptSource,
        collector: Collector,
        sampling: SamplingParams,
        train_sampling: SamplingParams,
        console: Console,
        run_dir: Path,
    ) -> None:
        self.config, self.prompts, self.collector, self.console = config, prompts, collector, console
        self.sampling, self.train_sampling, self.run_dir = sampling, train_sampling, run_dir
        self.history = ValidationHistory(run_dir, config.trainer.overfit_patience)
        self._scores: list[float] = []  # mean training scores since the last validation

    def note_training(self, score: float | None) -> None:
        """The mean score of a training step; None where no sample counted."""
        if score is not None:
            self._scores.append(score)

    def run(self, step: int, timings: dict[str, float]) -> dict[str, float]:
        """Metrics of all validation files at this step; samples to the console and to disk."""
        records: list[ValRecord] = []
        for items in self.prompts.validation_batches(self.config.data.val_batch_size or len(self.prompts)):
            scored = self.collector.answer(items, self.sampling, timings, validation=True)
            records += [val_record(each) for each in scored]
        settings = self.config.trainer
        if settings.validation_data_dir:
            write_samples(Path(settings.validation_data_dir) / f"val_{step}.jsonl", records)
        if settings.log_val_generations > 0:
            columns, rows = sample_table(records, settings.log_val_generations)
            self.console.samples(f"validation samples at step {step}", columns, rows)
        metrics = summarise(records)
        score = sum(self._scores) / len(self._scores) if self._scores else None
        for warning in self.history.update(step, metrics, score):
            log.warning(warning)
        self._scores = []
        scoring = {f"val-{name}": value for name, value in self.collector.rewards.take_metrics().items()}
        return metrics | scoring

    def report_rewards(self) -> None:
        """Before a long run: do the scores of sampled answers differ at all? (`reward.report`)"""
        settings = self.config.reward.report
        items = next(self.prompts.validation_batches(settings.prompts))
        sampling = self.train_sampling if settings.n is None else replace(self.train_sampling, n=settings.n)
        scored = self.collector.answer(items, sampling, {}, validation=True)
        report, warnings = write_reward_report(self.run_dir, from_scored(scored), min_std=settings.min_std)
        for line in report_lines(report):
            self.console.say(f"reward report: {line}")
        for warning in warnings:
            log.warning(warning)
        if settings.on_flat == "error":
            refuse_flat(warnings)

    def state_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {"history": self.history.state_dict(), "scores": self._scores}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.history.load_state_dict(state["history"])
        self._scores = list(state["scores"])


def val_record(scored: Scored) -> ValRecord:
    sample, result, row = scored.sample, scored.result, scored.item.row
    return ValRecord(
        uid=scored.item.uid,
        tag=row.tag,
        id=row.id,
        index=sample.index,
        prompt=row.messages[-1].content,
        answer=scored.text,
        pred=result.pred,
        gold=row.ground_truth,
        acc=result.acc,
        score=result.score,
        reason=result.reason,
        length=len(sample.response_ids),
        finish_reason=sample.finish_reason,
        failed=result.failed,
    )
