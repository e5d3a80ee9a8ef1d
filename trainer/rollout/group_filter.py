"""Dynamic sampling: only groups that can teach something reach the update (DAPO, arXiv 2503.14476).

A group whose answers are all right or all wrong has no advantage. Rounds of prompts are generated and judged until
enough groups are kept; the update always sees exactly as many. Judging waits for the end of a round: taking whoever
finishes first would favour short answers. The raw metric decides, never the shaped reward: a length penalty makes
scores differ where nothing is to be learnt about the task.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from engines.metric import Metric, Metrics
from trainer.rollout.scored import Scored
from trainer.rollout.scored_state import from_json, to_json

KEY = "algorithm.filter_groups"
HARD_LIMIT = 64  # rounds per step, whatever the configuration says: no run may generate for ever

Verdict = Literal["kept", "all_right", "all_wrong", "flat"]
Group = list[Scored]


@dataclass(frozen=True)
class FilterOptions:
    """metric         `acc`, or a number that the scorers return
    std_threshold  keep groups whose unbiased deviation is above it; None: any deviation will do
    mean_low       keep groups whose mean is above it        mean_high  and below this one
    max_rounds     generation rounds per step; 0 or less means HARD_LIMIT
    on_exhausted   when they are used up: `error`, or top up with evicted groups (`fill_unfiltered`)
    carry_over     store surplus groups for the next step instead of discarding them
    max_staleness  weight versions that a stored group may be old when it is used
    """

    metric: str = "acc"
    std_threshold: float | None = None
    mean_low: float | None = None
    mean_high: float | None = None
    max_rounds: int = 10
    on_exhausted: Literal["error", "fill_unfiltered"] = "error"
    carry_over: bool = False
    max_staleness: int = 1

    @property
    def rounds(self) -> int:
        return min(self.max_rounds, HARD_LIMIT) if self.max_rounds > 0 else HARD_LIMIT


def judge(values: Sequence[float], options: FilterOptions) -> Verdict:
    """Is there something to learn from a group with these metric values (of its baseline set)?

    `flat` is everything that is dropped without being all right (>= 1) or all wrong (<= 0): fewer than two samples,
    equal values in between, or outside the optional limits.
    """
    if len(values) >= 2 and max(values) > min(values):
        mean = math.fsum(values) / len(values)
        std = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))
        inside = (
            (options.std_threshold is None or std > options.std_threshold)
            and (options.mean_low is None or mean > options.mean_low)
            and (options.mean_high is None or mean < options.mean_high)
        )
        return "kept" if inside else "flat"
    if not values:
        return "flat"
    return "all_right" if min(values) >= 1 else "all_wrong" if max(values) <= 0 else "flat"


def metric_value(each: Scored, metric: str) -> float:
    """The raw number that the filter reads. ValueError naming what the scorer returned when it is missing."""
    value = each.result.acc if metric == "acc" else each.result.extra.get(metric)
    if not isinstance(value, int | float):
        numbers = sorted(name for name, found in each.result.extra.items() if isinstance(found, int | float))
        offered = [*(["acc"] if each.result.acc is not None else []), *numbers]
        raise ValueError(
            f"got {KEY}.metric={metric}, which the scorer of domain {each.item.row.domain} did not return for "
            f"{each.item.uid!r}; expected one of {offered}; set {KEY}.metric, or return {metric} from the scorer"
        )
    return float(value)


def groups_of(scored: Sequence[Scored]) -> list[Group]:
    """Samples by uid, groups in order of first appearance."""
    groups: dict[str, Group] = {}
    for each in scored:
        groups.setdefault(each.item.uid, []).append(each)
    return list(groups.values())


@dataclass
class _Round:
    """What a step has gathered so far."""

    kept: list[Group] = field(default_factory=list)
    evicted: list[Group] = field(default_factory=list)
    verdicts: Counter[Verdict] = field(default_factory=Counter)
    rounds: int = 0


class DynamicSampling:
    """Fills each step with exactly `num_groups` groups that vary.

    `collect` asks `generate(prompts)` for the scored samples of the next so many prompts of the data, all n of each.
    """

    def __init__(self, options: FilterOptions, num_groups: int, prompts_per_round: int) -> None:
        self.options, self.num_groups, self.prompts_per_round = options, num_groups, prompts_per_round
        self._stored: list[Group] = []

    def collect(self, generate: Callable[[int], list[Scored]], version: int) -> tuple[list[Scored], Metrics]:
        """Samples of `num_groups` groups in data order, and counts of what was kept and evicted.

        `version` is the trainer's weight version: stored groups that are too old for it are dropped. RuntimeError
        when the rounds are used up and `on_exhausted=error`.
        """
        fresh = [group for group in self._stored if self._age(group, version) <= self.options.max_staleness]
        stale, step = len(self._stored) - len(fresh), _Round(kept=fresh)
        while len(step.kept) < self.num_groups and step.rounds < self.options.rounds:
            self._play(step, generate)
        filled = 0
        if len(step.kept) < self.num_groups:
            filled = self._top_up(step)
        surplus = step.kept[self.num_groups :]
        self._stored = surplus if self.options.carry_over else []
        counts = {
            "train/num_gen_batches": step.rounds,
            "training/filter_groups/kept": step.verdicts["kept"],
            "training/filter_groups/evicted_all_correct": step.verdicts["all_right"],
            "training/filter_groups/evicted_all_wrong": step.verdicts["all_wrong"],
            "training/filter_groups/evicted_flat": step.verdicts["flat"],
            "training/filter_groups/surplus": len(surplus),
            "training/filter_groups/stale": stale,
            "training/filter_groups/filled": filled,
        }
        used = [each for group in step.kept[: self.num_groups] for each in group]
        return used, {name: Metric("count", value) for name, value in counts.items()}

    def _play(self, step: _Round, generate: Callable[[int], list[Scored]]) -> None:
        """One round: generate, then judge every group of it."""
        for group in groups_of(generate(self.prompts_per_round)):
            judged = [each for each in group if each.counts and each.sample.response_ids]
            values = [metric_value(each, self.options.metric) for each in judged]
            verdict = judge(values, self.options)
            step.verdicts[verdict] += 1
            (step.kept if verdict == "kept" else step.evicted).append(group)
        step.rounds += 1

    def _top_up(self, step: _Round) -> int:
        """Complete the step with evicted groups, or say why it cannot be completed."""
        missing = self.num_groups - len(step.kept)
        if self.options.on_exhausted == "error" or missing > len(step.evicted):
            raise RuntimeError(
                f"got {len(step.kept)} groups with a varying {self.options.metric} in {step.rounds} rounds of "
                f"{self.prompts_per_round} prompts ({step.verdicts['all_right']} dropped as all right, "
                f"{step.verdicts['all_wrong']} as all wrong, {step.verdicts['flat']} as flat); expected "
                f"{self.num_groups}; use prompts of fitting difficulty, raise data.gen_batch_size or "
                f"{KEY}.max_num_gen_batches, or set {KEY}.on_exhausted=fill_unfiltered"
            )
        step.kept += step.evicted[:missing]
        return missing

    @staticmethod
    def _age(group: Group, version: int) -> int:
        return version - min(each.sample.weight_version for each in group)

    def state_dict(self) -> dict[str, Any]:
        """JSON-able: the stored groups."""
        return {"stored": [[to_json(each) for each in group] for group in self._stored]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._stored = [[from_json(each) for each in group] for group in state["stored"]]
