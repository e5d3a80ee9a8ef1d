"""What rooms 2 and 3 hand on: a sample with its prompt and its reward."""

from __future__ import annotations

from dataclasses import dataclass

from engines.base import Sample
from trainer.prompts import PromptItem
from trainer.reward import RewardResult


@dataclass(frozen=True)
class Scored:
    """A sample, the prompt it answers, its text and its reward; `routable` is False where its routes must be
    replayed and cannot."""

    item: PromptItem
    sample: Sample
    text: str
    result: RewardResult
    routable: bool = True

    @property
    def counts(self) -> bool:
        """An answer that was aborted or could not be scored is no evidence of anything."""
        return not self.result.failed and self.sample.finish_reason != "abort" and self.routable
