"""Cut one rank's sequences into micro-batches; the same number on every DP rank."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist

from engines.base import ForwardOptions
from engines.batch import TrainBatch


def plan_micro_batches(lengths: Sequence[int], options: ForwardOptions, count: int | None = None) -> list[list[int]]:
    """Row numbers per micro-batch.

    By sequences: consecutive chunks of `micro_batch_size`. By tokens: longest first into the least
    loaded slot, using the smallest number of slots (at least `count`) in which every slot stays within
    `max_tokens`. With `count` larger than needed the surplus slots are empty.
    """
    if options.micro_batch_size is not None:
        size = options.micro_batch_size
        plan = [list(range(i, min(i + size, len(lengths)))) for i in range(0, len(lengths), size)]
        return plan + [[] for _ in range((count or 0) - len(plan))]
    budget = options.max_tokens
    if max(lengths) > budget:
        raise ValueError(
            f"got a sequence of {max(lengths)} tokens; expected at most max_tokens={budget} per micro-batch; "
            "raise ppo_max_token_len_per_gpu (and log_prob_max_token_len_per_gpu)"
        )
    slots = max(math.ceil(sum(lengths) / budget), count or 1)
    while True:
        plan = _longest_first(lengths, slots)
        if max(sum(lengths[i] for i in rows) for rows in plan) <= budget:
            return plan
        slots += 1


def _longest_first(lengths: Sequence[int], slots: int) -> list[list[int]]:
    plan: list[list[int]] = [[] for _ in range(slots)]
    loads = [0] * slots
    for row in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        slot = min(range(slots), key=lambda s: (loads[s], s))
        plan[slot].append(row)
        loads[slot] += lengths[row]
    return [sorted(rows) for rows in plan]


def split(
    batch: TrainBatch, options: ForwardOptions, group: dist.ProcessGroup | None
) -> list[tuple[list[int], TrainBatch]]:
    """(row numbers, packed micro-batch) pairs; empty slots hold a masked copy of the shortest sequence
    and no row numbers. `group` is the DP group whose ranks must agree on the count."""
    lengths = batch.lengths
    plan = plan_micro_batches(lengths, options)
    if group is not None and dist.get_world_size(group) > 1:
        count = torch.tensor([len(plan)], device=batch.input_ids.device)
        dist.all_reduce(count, op=dist.ReduceOp.MAX, group=group)
        plan = plan_micro_batches(lengths, options, count=int(count))
        # A larger slot count can only lower the loads, so one exchange is enough.
        assert len(plan) == int(count), f"planned {len(plan)} micro-batches, agreed on {int(count)}"
    shortest = min(range(len(lengths)), key=lengths.__getitem__)
    return [(rows, batch.select(rows)) if rows else (rows, batch.select([shortest]).masked()) for rows in plan]
