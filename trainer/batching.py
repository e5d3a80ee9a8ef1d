"""From samples to packed batches, and fair shares of them for the ranks.

Shape legend: T packed tokens, B samples.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Sequence
from hashlib import blake2b
from itertools import pairwise

import torch
from torch import Tensor

from engines.base import Sample
from engines.batch import Denominators, TrainBatch
from engines.metric import Metric, Metrics


def build_batch(samples: Sequence[Sample]) -> TrainBatch:
    """Pack prompt + response of every sample, in order.

    tokens   loss_mask          1 on response tokens
             rollout_log_probs  the sampler's log-probs on response tokens, 0 elsewhere; nan for every response
                                token of a sample that came without any
    samples  index              0..B-1
             key                int64 from uid and sample index: the same for a sample in every batch

    Example, prompt [7, 8] with response [9] scored -0.5: input_ids 7 8 9, loss_mask 0 0 1, log-probs 0 0 -0.5.
    """
    sequences, masks, log_probs = [], [], []
    for sample in samples:
        prompt, response = list(sample.prompt_ids), list(sample.response_ids)
        if not prompt:
            raise ValueError(
                f"got an empty prompt for sample {sample.index} of {sample.uid!r}; expected at least one token, since "
                "the first token of a sequence has no prediction; check the chat template and the prompt field"
            )
        scores = list(sample.log_probs) or [float("nan")] * len(response)
        assert len(scores) == len(response), (
            f"sample {sample.index} of {sample.uid!r} has {len(scores)} log-probs for {len(response)} response tokens"
        )
        sequences.append(prompt + response)
        masks.append([0.0] * len(prompt) + [1.0] * len(response))
        log_probs.append([0.0] * len(prompt) + scores)
    batch = TrainBatch.pack(sequences, loss_mask=masks, rollout_log_probs=log_probs)
    batch.samples["index"] = torch.arange(len(batch))
    batch.samples["key"] = torch.tensor([sample_key(sample.uid, sample.index) for sample in samples])
    return batch


def sample_key(uid: str, index: int) -> int:
    """63 bits that name a sample wherever it stands; python's own hash of a text changes from run to run."""
    return int.from_bytes(blake2b(f"{uid}/{index}".encode(), digest_size=8).digest(), "big") >> 1


def denominators(batch: TrainBatch) -> Denominators:
    """Counts of a whole mini-batch: unmasked tokens, and sequences with at least one of them."""
    mask_T = batch.tokens["loss_mask"].bool()
    return Denominators(
        tokens=float(mask_T.sum()),
        sequences=float(sum(bool(row.any()) for row in batch.rows(mask_T))),
    )


def mini_batches(n_prompts: int, n: int, mini_batch_size: int, shuffle_seed: int | None = None) -> list[list[int]]:
    """Rows behind each optimizer step; `mini_batch_size` counts prompts, whose `n` samples stay together.

    Prompt p owns rows p*n..p*n+n-1. With `shuffle_seed` the prompts are dealt out in a random order that
    depends on the seed alone.
    """
    if n_prompts % mini_batch_size != 0:
        raise ValueError(
            f"got {n_prompts} prompts and mini-batches of {mini_batch_size}; expected a divisor of {n_prompts}; "
            "change actor_rollout_ref.actor.ppo_mini_batch_size or data.train_batch_size"
        )
    prompts = list(range(n_prompts))
    if shuffle_seed is not None:
        random.Random(shuffle_seed).shuffle(prompts)
    return [
        [prompt * n + i for prompt in prompts[start : start + mini_batch_size] for i in range(n)]
        for start in range(0, n_prompts, mini_batch_size)
    ]


def balance(lengths: Sequence[int], dp_size: int) -> list[list[int]]:
    """Rows of each rank: the same number of samples (one more or less if B is no multiple), about equal tokens.

    Lengths in falling order are cut into blocks of `dp_size`; in each block the longest goes to the rank with
    the fewest tokens, so the loads differ by at most the widest spread within a block. Then samples are
    swapped between the fullest and the emptiest rank for as long as that narrows their gap.
    """
    _check_enough(lengths, dp_size)
    order = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    partitions: list[list[int]] = [[] for _ in range(dp_size)]
    loads = [0] * dp_size
    for start in range(0, len(order), dp_size):
        ranks = sorted(range(dp_size), key=lambda rank: (loads[rank], rank))
        for rank, row in zip(ranks, order[start : start + dp_size], strict=False):  # the last block may be short
            partitions[rank].append(row)
            loads[rank] += lengths[row]
    _swap(partitions, loads, lengths)
    return [sorted(rows) for rows in partitions]


def _swap(partitions: list[list[int]], loads: list[int], lengths: Sequence[int]) -> None:
    """Exchange the pair whose lengths differ most nearly by half the gap, until none narrows it (in place)."""
    while True:
        full, empty = loads.index(max(loads)), loads.index(min(loads))
        gap = loads[full] - loads[empty]
        offers = sorted(partitions[empty], key=lambda row: (lengths[row], row))
        sizes = [lengths[row] for row in offers]
        best: tuple[int, int, int] | None = None  # (remaining gap, row out, row in)
        for row in partitions[full]:
            middle = bisect_left(sizes, lengths[row] - gap / 2)
            for place in range(max(0, middle - 1), min(len(offers), middle + 1)):
                candidate = (abs(gap - 2 * (lengths[row] - sizes[place])), row, offers[place])
                best = candidate if best is None else min(best, candidate)
        if best is None or best[0] >= gap:
            return
        _, out, into = best
        partitions[full][partitions[full].index(out)] = into
        partitions[empty][partitions[empty].index(into)] = out
        moved = lengths[out] - lengths[into]
        loads[full] -= moved
        loads[empty] += moved


def in_order(lengths: Sequence[int], dp_size: int) -> list[list[int]]:
    """Consecutive rows per rank, the same number each (one more or less if B is no multiple)."""
    _check_enough(lengths, dp_size)
    size, surplus = divmod(len(lengths), dp_size)
    starts = [rank * size + min(rank, surplus) for rank in range(dp_size + 1)]
    return [list(range(a, b)) for a, b in pairwise(starts)]


def _check_enough(lengths: Sequence[int], dp_size: int) -> None:
    if len(lengths) < dp_size:
        raise ValueError(
            f"got {len(lengths)} samples for {dp_size} data-parallel ranks; expected at least one per rank, where "
            "ranks = world size / (tensor * pipeline * context parallel size); raise ppo_mini_batch_size or rollout.n, "
            "or use fewer ranks"
        )


def balance_metrics(lengths: Sequence[int], partitions: Sequence[Sequence[int]]) -> Metrics:
    """`global_seqlen/*`: tokens per rank if the rows were cut in order, and as partitioned."""
    plain = [sum(lengths[row] for row in rows) for rows in in_order(lengths, len(partitions))]
    balanced = [sum(lengths[row] for row in rows) for rows in partitions]
    return {
        "global_seqlen/min": Metric("min", min(plain)),
        "global_seqlen/max": Metric("max", max(plain)),
        "global_seqlen/minmax_diff": Metric("max", max(plain) - min(plain)),
        "global_seqlen/balanced_min": Metric("min", min(balanced)),
        "global_seqlen/balanced_max": Metric("max", max(balanced)),
        "global_seqlen/mean": Metric("mean", sum(balanced), len(partitions)),
    }


def scatter(batch: TrainBatch, partitions: Sequence[Sequence[int]]) -> list[TrainBatch]:
    """One packed share per rank."""
    return [batch.select(rows) for rows in partitions]


def gather(outputs: Sequence[Tensor], partitions: Sequence[Sequence[int]], batch: TrainBatch) -> Tensor:
    """Undo `scatter` for packed outputs: the ranks' [T_r] tensors become one [T] in the order of `batch`.

    Every row must be in exactly one partition.
    """
    lengths = batch.lengths
    assert sorted(row for rows in partitions for row in rows) == list(range(len(batch))), "partitions are not a cut"
    pieces: dict[int, Tensor] = {}
    for output, rows in zip(outputs, partitions, strict=True):
        expected = sum(lengths[row] for row in rows)
        assert output.shape[0] == expected, f"a rank returned {output.shape[0]} entries, expected {expected}"
        pieces.update(zip(rows, torch.split(output, [lengths[row] for row in rows]), strict=True))
    return torch.cat([pieces[row] for row in range(len(batch))])
