"""Which samples give no gradient although their reward is genuine: they stay in the statistics of their group.

Every rule reads the raw accuracy, never the shaped reward, and the end reason, never the width of a batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from engines.metric import Metric, Metrics
from trainer.rollout.scored import Scored


@dataclass(frozen=True)
class MaskOptions:
    """max_len            drop samples that were cut at the length limit
    difficulty         keep groups whose mean accuracy lies strictly between these two numbers; None is off
    error_max_len      drop samples that are wrong and have at least so many tokens; None is off
    correct_threshold  accuracy from which a sample is right
    """

    max_len: bool = False
    difficulty: tuple[float, float] | None = None
    error_max_len: int | None = None
    correct_threshold: float = 1.0


def sample_masks(scored: Sequence[Scored], options: MaskOptions) -> tuple[list[bool], Metrics]:
    """Per sample: does it learn? And the share that each active rule keeps.

    Raises ValueError when a rule needs the accuracy of a sample that has none.
    """
    rules: dict[str, list[bool]] = {}
    if options.max_len:
        rules["max_len"] = [each.sample.finish_reason != "length" for each in scored]
    if options.difficulty is not None:
        rules["difficulty"] = _difficulty(scored, *options.difficulty)
    if options.error_max_len is not None:
        rules["error_len"] = [_short_or_right(each, options) for each in scored]
    kept = [all(flags) for flags in zip(*rules.values(), strict=True)] if rules else [True] * len(scored)
    metrics = {
        f"actor/{name}_mask_ratio": Metric("mean", sum(flags), max(len(flags), 1)) for name, flags in rules.items()
    }
    return kept, metrics


def pass_rates(scored: Sequence[Scored], reader: str) -> dict[str, float]:
    """uid -> mean raw accuracy over the samples that count; groups without any are left out.

    `reader` is the key that asks, for the error about a sample without accuracy.
    """
    accs: dict[str, list[float]] = {}
    for each in scored:
        if each.counts:
            accs.setdefault(each.item.uid, []).append(accuracy(each, reader))
    return {uid: math.fsum(values) / len(values) for uid, values in accs.items()}


def accuracy(each: Scored, reader: str) -> float:
    if each.result.acc is None:
        raise ValueError(
            f"got no acc for a sample of {each.item.uid!r} (domain {each.item.row.domain}); expected one in [0, 1], "
            f"since {reader} reads it; let the scorer of that domain return acc, or switch {reader} off"
        )
    return each.result.acc


def _difficulty(scored: Sequence[Scored], low: float, high: float) -> list[bool]:
    """A group of one says nothing about how hard its prompt is."""
    rates = pass_rates(scored, "algorithm.difficulty_mask")
    sizes: dict[str, int] = {}
    for each in scored:
        sizes[each.item.uid] = sizes.get(each.item.uid, 0) + 1
    return [
        sizes[each.item.uid] == 1 or each.item.uid not in rates or low < rates[each.item.uid] < high for each in scored
    ]


def _short_or_right(each: Scored, options: MaskOptions) -> bool:
    if not each.counts or len(each.sample.response_ids) < options.error_max_len:
        return True
    return accuracy(each, "algorithm.error_max_len_clip") >= options.correct_threshold
