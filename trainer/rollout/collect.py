"""Rooms 1 to 3: prompts are drawn, answered and scored; a step's samples come out.

Scoring runs while others still decode. With dynamic sampling a step takes several rounds (group_filter.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from engines.base import Prompt, SamplingParams
from engines.metric import Metric, Metrics
from trainer.prompts import PromptEncoder, PromptItem, PromptSource
from trainer.report.console import Console
from trainer.reward import RewardManager
from trainer.rollout.group import RolloutGroup
from trainer.rollout.group_filter import DynamicSampling
from trainer.rollout.scored import Scored


@dataclass
class Collected:
    """One step's samples: whole groups in prompt order.

    greedy   score of the greedy answer to each prompt, by uid; None where there is none to use; empty unless asked for
    state    what must be restored to draw the prompts after these
    timings  seconds by `timing_s/<phase>`
    """

    scored: list[Scored]
    greedy: dict[str, float | None] = field(default_factory=dict)
    metrics: Metrics = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)
    timings: dict[str, float] = field(default_factory=dict)

    @property
    def num_prompts(self) -> int:
        return len({each.item.uid for each in self.scored})


class Collector:
    """Draws, answers and scores. `filter` is dynamic sampling or None; `greedy` asks for a greedy answer to every
    prompt too (ReMax)."""

    def __init__(
        self,
        prompts: PromptSource,
        encoder: PromptEncoder,
        rollout: RolloutGroup,
        rewards: RewardManager,
        console: Console,
        sampling: SamplingParams,
        filter: DynamicSampling | None = None,
        greedy: bool = False,
        max_failed_frac: float = 0.05,
    ) -> None:
        self.prompts, self.encoder, self.rollout, self.rewards = prompts, encoder, rollout, rewards
        self.console, self.sampling, self.filter = console, sampling, filter
        self.max_failed_frac = max_failed_frac
        self._greedy = replace(sampling, n=1, temperature=0.0, top_p=1.0, top_k=-1) if greedy else None

    def collect(self) -> Collected:
        """The next step's samples."""
        timings: dict[str, float] = {}
        greedy: dict[str, float | None] = {}

        def round_of(count: int) -> list[Scored]:
            items = self.prompts.next(count)
            scored = self.answer(items, self.sampling, timings)
            if self._greedy is not None:
                best = {each.item.uid: each for each in self.answer(items, self._greedy, timings)}
                greedy.update({uid: each.result.score if each.counts else None for uid, each in best.items()})
            return scored

        if self.filter is None:
            scored, metrics = round_of(self.prompts.batch_size), {}
        else:
            scored, metrics = self.filter.collect(round_of, self.rollout.version)
        lost = {"rollout/lost_replicas": Metric("count", self.rollout.losses)}
        self.rollout.losses = 0
        return Collected(scored, greedy, metrics | lost, self.state_dict(), timings)

    def answer(
        self, items: list[PromptItem], sampling: SamplingParams, timings: dict[str, float], validation: bool = False
    ) -> list[Scored]:
        """All samples of the prompts in prompt order, each with its reward. Adds seconds to `timings`."""
        by_uid = {item.uid: item for item in items}
        pending = {}
        prompts = [Prompt(item.uid, item.token_ids) for item in items]
        name, key = ("validation", "testing") if validation else ("rollout", "gen")
        with self.console.phase(name, timings, key, len(items) * sampling.n) as advance:
            for sample in self.rollout.generate(prompts, sampling):
                text, item = self.encoder.decode(sample.response_ids), by_uid[sample.uid]
                future = self.rewards.submit(
                    text, item.row, response_length=len(sample.response_ids), think_open=item.think_open
                )
                pending[sample.uid, sample.index] = (sample, text, future)
                advance()
        with self.console.phase("reward", timings, "testing" if validation else "reward"):
            scored = [
                Scored(item, sample, text, future.result())
                for item in items
                for sample, text, future in (pending[item.uid, index] for index in range(sampling.n))
            ]
        self._check_failed(scored)
        return scored

    def _check_failed(self, scored: list[Scored]) -> None:
        """A few answers that cannot be scored are left out; many mean that scoring is broken."""
        failed = [each for each in scored if each.result.failed]
        if len(failed) > self.max_failed_frac * len(scored):
            last = failed[-1]
            raise RuntimeError(
                f"got {len(failed)} of {len(scored)} answers that could not be scored; expected at most "
                f"reward.max_failed_frac={self.max_failed_frac:g}; the last one, {last.item.uid}: {last.result.reason} "
                f"{dict(last.result.extra)}; mend the scorer or raise the limit"
            )

    def state_dict(self) -> dict[str, Any]:
        """JSON-able: the place in the data and what dynamic sampling keeps for later."""
        return {
            "cursor": self.prompts.state_dict(),
            "filter": self.filter.state_dict() if self.filter is not None else {},
        }

    def load_state_dict(self, state: dict[str, Any], *, allow_changed_files: bool) -> None:
        self.prompts.load_state_dict(state["cursor"], allow_changed_files=allow_changed_files)
        if self.filter is not None and state["filter"]:
            self.filter.load_state_dict(state["filter"])
