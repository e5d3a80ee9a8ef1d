"""How much a sample's policy loss weighs: hard prompts and short answers more, mean 1 over the whole batch.

The weights are rescaled before the batch is split: inside a micro-batch of one sample every weight would be 1.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from engines.metric import Metrics
from trainer.credit.sample_masks import pass_rates
from trainer.prompts import Row
from trainer.report.step_metrics import spread
from trainer.rollout.scored import Scored

NUMBER = re.compile(r"\s*([+-]?\d+(?:\.\d+)?)\s*\+?\s*")  # "8.0+" is 8.0


@dataclass(frozen=True)
class WeightOptions:
    """difficulty        w = 0.5 + 1.5 d, d in [0, 1]: from the data `field`, or 1 - the group's `pass_rate`
    difficulty_range  (a, b) of the field: d = (x - a) / (b - a), values outside count as the nearer end
    length            w = 1.5 - (len - min) / (max - min), in [0.5, 1.5]
    """

    difficulty: Literal["field", "pass_rate"] | None = None
    difficulty_range: tuple[float, float] | None = None
    length: bool = False

    @property
    def active(self) -> bool:
        return self.difficulty is not None or self.length


def sample_weights(
    scored: Sequence[Scored], valid: Sequence[bool], options: WeightOptions
) -> tuple[list[float], Metrics]:
    """Product of the active weights, rescaled to mean 1 over the `valid` samples: those that learn anything.

    The others get 1 and influence nothing, not even the shortest and longest length. Raises ValueError for a
    difficulty that is no number.
    """
    weights = [1.0] * len(scored)
    rows = [row for row, flag in enumerate(valid) if flag]
    if not rows:
        return weights, {}
    if options.difficulty is not None:
        hardness = _difficulties([scored[row] for row in rows], scored, options)
        for row, d in zip(rows, hardness, strict=True):
            weights[row] *= 0.5 + 1.5 * d
    if options.length:
        lengths = {row: len(scored[row].sample.response_ids) for row in rows}
        shortest, longest = min(lengths.values()), max(lengths.values())
        for row in rows:
            weights[row] *= 1.5 - (lengths[row] - shortest) / (longest - shortest) if longest > shortest else 1.0
    mean = math.fsum(weights[row] for row in rows) / len(rows)
    for row in rows:
        weights[row] /= mean
    return weights, _named(spread("", [weights[row] for row in rows]))


def check_difficulties(rows: Iterable[Row]) -> None:
    """ValueError naming the first row whose difficulty is no number: at start, not in the middle of a run."""
    for row in rows:
        difficulty(row)


def difficulty(row: Row) -> float:
    """The number of the data field; a trailing plus ("8.0+") is read over."""
    if row.difficulty is not None:
        return row.difficulty
    match = NUMBER.fullmatch(row.difficulty_text)
    if match is None:
        name, line = row.origin
        raise ValueError(
            f"got difficulty {row.difficulty_text!r} in {name}:{line} (id {row.id!r}, tag {row.tag!r}); expected a "
            "number such as 4.5 or '8.0+', since algorithm.difficulty_source=field reads it; mend the field or set "
            "algorithm.difficulty_source=pass_rate"
        )
    return float(match[1])


def _difficulties(members: Sequence[Scored], scored: Sequence[Scored], options: WeightOptions) -> list[float]:
    if options.difficulty == "pass_rate":
        rates = pass_rates(scored, "algorithm.difficulty_loss_weight")
        return [1 - min(1.0, max(0.0, rates[each.item.uid])) for each in members]
    low, high = options.difficulty_range
    return [min(1.0, max(0.0, (difficulty(each.item.row) - low) / (high - low))) for each in members]


def _named(metrics: Metrics) -> Metrics:
    return {f"actor/sample_weights_{name.removeprefix('/')}": metric for name, metric in metrics.items()}
