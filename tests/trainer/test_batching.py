"""Packing, mini-batches and balanced shares."""

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.base import Sample
from engines.batch import TrainBatch
from trainer.batching import balance, balance_metrics, build_batch, denominators, gather, mini_batches, scatter


def sample(uid="p", prompt=(7, 8), response=(9,), log_probs=(-0.5,)):
    return Sample(uid, 0, tuple(prompt), list(response), list(log_probs), "stop", 0)


def test_build_batch_aligns_log_probs_with_their_tokens():
    batch = build_batch([sample(), sample(prompt=(5,), response=(6, 2), log_probs=(-0.25, -2.0))])
    assert batch.input_ids.tolist() == [7, 8, 9, 5, 6, 2]
    assert batch.cu_seqlens.tolist() == [0, 3, 6]
    assert batch.tokens["loss_mask"].tolist() == [0, 0, 1, 0, 1, 1]
    assert batch.tokens["rollout_log_probs"].tolist() == [0, 0, -0.5, 0, -0.25, -2.0]
    assert batch.samples["index"].tolist() == [0, 1]


def test_an_aborted_sample_keeps_its_row_and_counts_nowhere():
    batch = build_batch([sample(response=(), log_probs=()), sample()])
    assert len(batch) == 2 and batch.tokens["loss_mask"].sum() == 1
    counts = denominators(batch)
    assert (counts.tokens, counts.sequences) == (1.0, 1.0)


def test_missing_log_probs_become_nan_and_wrong_counts_are_refused():
    batch = build_batch([sample(response=(9, 9), log_probs=())])
    assert batch.tokens["rollout_log_probs"].isnan().tolist() == [False, False, True, True]
    with pytest.raises(AssertionError, match="3 log-probs for 1 response tokens"):
        build_batch([sample(log_probs=(0.0, 0.0, 0.0))])


def test_an_empty_prompt_is_refused():
    with pytest.raises(ValueError, match="empty prompt"):
        build_batch([sample(prompt=())])


def test_mini_batches_keep_the_samples_of_a_prompt_together():
    assert mini_batches(4, 2, 2) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    shuffled = mini_batches(8, 3, 2, shuffle_seed=5)
    assert shuffled == mini_batches(8, 3, 2, shuffle_seed=5) != mini_batches(8, 3, 2, shuffle_seed=6)
    assert sorted(row for rows in shuffled for row in rows) == list(range(24))
    for rows in shuffled:
        assert all(rows[i : i + 3] == list(range(rows[i], rows[i] + 3)) and rows[i] % 3 == 0 for i in (0, 3))
    with pytest.raises(ValueError, match="divisor of 5"):
        mini_batches(5, 2, 2)


@settings(max_examples=100)
@given(st.lists(st.integers(1, 4096), min_size=1, max_size=60), st.integers(1, 8))
def test_balance_gives_equal_counts_and_near_equal_tokens(lengths, dp_size):
    if len(lengths) < dp_size:
        with pytest.raises(ValueError, match="data-parallel ranks"):
            balance(lengths, dp_size)
        return
    partitions = balance(lengths, dp_size)
    assert partitions == balance(lengths, dp_size)
    assert sorted(row for rows in partitions for row in rows) == list(range(len(lengths)))
    counts = [len(rows) for rows in partitions]
    assert max(counts) - min(counts) <= 1
    loads = [sum(lengths[row] for row in rows) for rows in partitions]
    assert max(loads) - min(loads) <= max(lengths)


def test_balance_finds_the_even_cut():
    partitions = balance([8, 7, 6, 5, 4, 3, 2, 1], 2)
    assert sorted(sum([8, 7, 6, 5, 4, 3, 2, 1][row] for row in rows) for rows in partitions) == [18, 18]
    assert balance([10, 1, 1, 8], 2) == [[0, 2], [1, 3]]
    assert [len(rows) for rows in balance([1] * 15, 2)] == [8, 7]


def test_swaps_even_out_lengths_with_a_long_tail():
    """Dealing out sorted blocks alone leaves ranks 30 % apart here."""
    rng = random.Random(0)
    lengths = [int(min(4096, 50 + math.exp(rng.gauss(6, 1)))) for _ in range(64)]
    loads = [sum(lengths[row] for row in rows) for rows in balance(lengths, 8)]
    assert max(loads) - min(loads) < 0.02 * max(loads)


def test_balance_metrics_compare_with_the_order_given():
    lengths = [4, 4, 1, 1]
    metrics = balance_metrics(lengths, balance(lengths, 2))
    values = {name.removeprefix("global_seqlen/"): metric.value for name, metric in metrics.items()}
    assert values == {"min": 2, "max": 8, "minmax_diff": 6, "balanced_min": 5, "balanced_max": 5, "mean": 5}


@settings(max_examples=50)
@given(st.lists(st.integers(1, 9), min_size=2, max_size=20), st.integers(1, 4))
def test_gather_restores_the_order(lengths, dp_size):
    if len(lengths) < dp_size:
        return
    batch = TrainBatch.pack([[i] * n for i, n in enumerate(lengths)])
    partitions = balance(lengths, dp_size)
    shares = scatter(batch, partitions)
    assert torch.equal(gather([share.input_ids for share in shares], partitions, batch), batch.input_ids)


def test_gather_refuses_outputs_of_the_wrong_length():
    batch = TrainBatch.pack([[1, 2], [3]])
    with pytest.raises(AssertionError, match="expected 2"):
        gather([torch.zeros(3), torch.zeros(1)], [[0], [1]], batch)
    with pytest.raises(AssertionError, match="not a cut"):
        gather([torch.zeros(2), torch.zeros(2)], [[0], [0]], batch)


def test_denominators_add_up_over_any_cut():
    batch = build_batch([sample(response=range(n), log_probs=[0.0] * n) for n in (3, 0, 1, 5, 2)])
    whole = denominators(batch)
    parts = [denominators(share) for share in scatter(batch, balance(batch.lengths, 3))]
    assert (whole.tokens, whole.sequences) == (11.0, 4.0)
    assert math.fsum(p.tokens for p in parts) == 11.0 and math.fsum(p.sequences for p in parts) == 4.0
