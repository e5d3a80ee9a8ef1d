"""The critic's loss against hand-computed numbers, and its invariances."""

import math
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.batch import Denominators, TrainBatch, ValueOutput
from engines.metric import merge
from trainer.batching import denominators
from trainer.update.loss import AGG_MODES
from trainer.update.value_loss import ValueLoss, explained_variance


def run(loss, values_T, batch, counts=None):
    """Loss, gradient per token, metric values."""
    values_T = values_T.detach().clone().requires_grad_()
    value, metrics = loss(ValueOutput(values_T), batch, counts or denominators(batch))
    (grad_T,) = torch.autograd.grad(value, values_T)
    return value.item(), grad_T, metrics


def one_token(value, returned, old=0.3, clip=0.5):
    batch = TrainBatch.pack([[1]], loss_mask=[[1.0]], values=[[old]], returns=[[returned]])
    loss, grad_T, metrics = run(ValueLoss(clip), torch.tensor([value]), batch)
    return loss, grad_T.item(), metrics["critic/vf_clipfrac"].value


def test_the_clipped_branch_counts_where_it_is_larger():
    assert one_token(1.0, 1.5) == pytest.approx((0.245, 0.0, 1.0))  # .8 is further from 1.5 than 1.0
    assert one_token(1.0, 0.2) == pytest.approx((0.32, 0.8, 0.0))
    assert one_token(0.5, 0.2) == pytest.approx((0.045, 0.3, 0.0))  # within the clip both are equal
    assert one_token(-1.0, -1.5) == pytest.approx((0.845, 0.0, 1.0))  # clipped to -.2


def test_without_clipping_nothing_is_clipped_and_old_values_are_not_read():
    assert one_token(1.0, 1.5, old=math.nan, clip=None) == pytest.approx((0.125, -0.5, 0.0))


@pytest.mark.parametrize(("mode", "expected"), [("token-mean", 1.8), ("seq-mean-token-mean", 3.0), ("token-sum", 9.0)])
def test_aggregation(mode, expected):
    """Sample A: four tokens with (V - R)^2 / 2 = 1; B: one with 5."""
    batch = TrainBatch.pack([[1] * 4, [1]], loss_mask=[[1.0] * 4, [1.0]], returns=[[0.0] * 4, [0.0]])
    values_T = torch.tensor([math.sqrt(2)] * 4 + [math.sqrt(10)])
    assert run(ValueLoss(None, mode), values_T, batch)[0] == pytest.approx(expected)


def random_batch(lengths, seed):
    generator = torch.Generator().manual_seed(seed)
    batch = TrainBatch.pack([[1] * n for n in lengths])
    for name in ("values", "returns", "current"):
        batch.tokens[name] = torch.randn(batch.num_tokens, generator=generator)
    batch.tokens["loss_mask"] = (torch.rand(batch.num_tokens, generator=generator) < 0.7).float()
    return batch


@settings(max_examples=15)
@given(st.lists(st.integers(1, 6), min_size=2, max_size=6), st.integers(0, 10**6), st.randoms())
def test_any_cut_and_any_order_give_the_same(lengths, seed, rng):
    batch = random_batch(lengths, seed)
    counts, order = denominators(batch), rng.sample(range(len(lengths)), len(lengths))
    middle = len(order) // 2
    for mode in AGG_MODES:
        loss = ValueLoss(0.3, mode, 7.0)
        value, grad_T, metrics = run(loss, batch.tokens["current"], batch, counts)
        for plan in ([order], [order[:middle], order[middle:]], [[row] for row in order]):
            shares = [batch.select(rows) for rows in plan]
            parts = [run(loss, share.tokens["current"], share, counts) for share in shares]
            assert sum(part[0] for part in parts) == pytest.approx(value, rel=1e-5, abs=1e-6)
            expected = [batch.rows(grad_T)[row] for rows in plan for row in rows]
            torch.testing.assert_close(torch.cat([part[1] for part in parts]), torch.cat(expected))
            merged = merge(part[2] for part in parts)
            assert {k: m.value for k, m in merged.items()} == pytest.approx(
                {k: m.value for k, m in metrics.items()}, rel=1e-5, abs=1e-6
            )


def test_masked_positions_reach_nothing_even_when_nan():
    batch = random_batch([5, 3, 6], 1)
    masked_T = batch.tokens["loss_mask"] == 0
    value, grad_T, metrics = run(ValueLoss(), batch.tokens["current"], batch)
    assert masked_T.any() and (grad_T[masked_T] == 0).all()
    for name in ("values", "returns", "current"):
        batch.tokens[name] = batch.tokens[name].masked_fill(masked_T, math.nan)
    again = run(ValueLoss(), batch.tokens["current"], batch)
    assert again[0] == value and torch.equal(again[1], grad_T) and again[2] == metrics


def test_a_masked_filler_adds_nothing():
    batch = random_batch([4], 2).masked()
    loss, grad_T, metrics = run(ValueLoss(), batch.tokens["current"], batch, Denominators(0, 0))
    assert loss == 0 and not grad_T.any() and metrics["critic/vpred_mean"].weight == 0


def test_explained_variance():
    batch = TrainBatch.pack(
        [[1] * 4], loss_mask=[[1.0, 1.0, 1.0, 0.0]], returns=[[0.0, 1.0, 2.0, 9.0]], values=[[0.0, 1.0, 1.0, -9.0]]
    )
    # Var(returns) = 1, Var(returns - values) = Var(0, 0, 1) = 1/3
    assert explained_variance(batch)["critic/vf_explained_var"].value == pytest.approx(2 / 3)
    batch.tokens["returns"] = torch.ones(4)
    assert explained_variance(batch) == {}


def test_the_loss_can_be_pickled():
    assert pickle.loads(pickle.dumps(ValueLoss(None))) == ValueLoss(None)
