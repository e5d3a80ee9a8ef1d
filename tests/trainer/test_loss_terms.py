"""Losses that need more than a micro-batch knows: selection by covariance, length, bypass, and losses of one's own."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.batch import PolicyOutput, TrainBatch
from engines.metric import merge
from trainer.batching import balance, denominators, sample_key, scatter
from trainer.credit.importance import WeightRule
from trainer.update.covariance import covariance, select_cov
from trainer.update.length_loss import length_weights
from trainer.update.loss import LossOptions, PolicyLoss

SEEDS = (1, 0, 0)
CLIP = LossOptions(loss_mode="clip_cov", clip_cov_ratio=0.5)
KL = LossOptions(loss_mode="kl_cov", kl_cov_ratio=0.25, ppo_kl_coef=0.5)


def run(options, log_probs_T, batch, counts=None):
    """Loss, gradient per token [T], metrics."""
    log_probs_T = log_probs_T.detach().clone().requires_grad_()
    loss, metrics = PolicyLoss(options)(PolicyOutput(log_probs_T), batch, counts or denominators(batch))
    (grad_T,) = torch.autograd.grad(loss, log_probs_T)
    return loss.item(), grad_T, metrics


def four_tokens():
    """One token per sample."""
    batch = TrainBatch.pack(
        [[1]] * 4, loss_mask=[[1.0]] * 4, advantages=[[1.0], [1.0], [-1.0], [-1.0]],
        old_log_probs=[[-0.2], [-3.0], [-0.4], [-3.0]],
    )  # fmt: skip
    batch.samples["key"] = torch.arange(4)
    return batch


def test_covariance_and_what_it_selects():
    batch = four_tokens()
    assert covariance(batch).tolist() == pytest.approx([1.45, -1.35, -1.25, 1.35])
    assert select_cov(batch, KL, SEEDS).tolist() == [1, 0, 0, 0]
    assert select_cov(batch, CLIP, SEEDS).tolist() == [1, 0, 0, 1]
    above = LossOptions(loss_mode="clip_cov", clip_cov_ratio=0.5, clip_cov_lb=1.4)
    assert select_cov(batch, above, SEEDS).tolist() == [1, 0, 0, 0]
    assert select_cov(batch.masked(), CLIP, SEEDS).tolist() == [0, 0, 0, 0]


def test_at_least_one_token_is_selected_and_the_choice_is_random_over_seeds():
    batch = four_tokens()
    few = LossOptions(loss_mode="clip_cov", clip_cov_ratio=1e-4)
    choices = {tuple(select_cov(batch, few, (1, 0, number)).tolist()) for number in range(30)}
    assert choices == {(1, 0, 0, 0), (0, 0, 0, 1)}
    assert torch.equal(select_cov(batch, few, SEEDS), select_cov(batch, few, SEEDS))


def test_clip_cov_takes_the_loss_of_selected_tokens():
    batch = four_tokens()
    loss = PolicyLoss(CLIP)
    loss.prepare_mini(batch, step=0, number=0)
    now_T = batch.tokens["old_log_probs"] + math.log(1.1)
    value, grad_T, metrics = run(CLIP, now_T, batch)
    assert value == pytest.approx(0.0) and grad_T.tolist() == pytest.approx([0, -0.275, 0.275, 0])
    assert metrics["actor/cov_selected_frac"].value == 0.5
    # Clipped tokens keep theirs: A = 1, r = 1.5 at token 0, A = -1, r = .5 at token 3.
    now_T = batch.tokens["old_log_probs"] + torch.tensor([1.5, 1.0, 1.0, 0.5]).log()
    value, grad_T, metrics = run(CLIP, now_T, batch)
    assert value == pytest.approx((-1.2 - 1 + 1 + 0.8) / 4) and grad_T.tolist() == pytest.approx([0, -0.25, 0.25, 0])
    assert (metrics["actor/pg_clipfrac"].value, metrics["actor/cov_selected_frac"].value) == (0.5, 0.0)


def test_kl_cov_adds_a_distance_to_selected_tokens():
    batch = four_tokens()
    PolicyLoss(KL).prepare_mini(batch, step=0, number=0)
    log2 = math.log(2)
    value, grad_T, metrics = run(KL, batch.tokens["old_log_probs"] + torch.tensor([log2, 0, 0, -log2]), batch)
    assert value == pytest.approx((-2 + 0.5 * log2 - 1 + 1 + 0.5) / 4)
    assert grad_T.tolist() == pytest.approx([(-2 + 0.5) / 4, -0.25, 0.25, 0.125])
    assert metrics["actor/ppo_kl"].value == pytest.approx(log2 / 2)  # of absolute values


shapes = st.lists(st.integers(1, 6), min_size=2, max_size=7)


@settings(max_examples=20)
@given(shapes, st.integers(0, 10**6), st.integers(1, 3), st.randoms())
def test_selection_and_loss_do_not_depend_on_order_ranks_or_micro_batches(lengths, seed, dp, rng):
    generator = torch.Generator().manual_seed(seed)
    batch = TrainBatch.pack([[1] * n for n in lengths])
    for name in ("advantages", "old_log_probs", "now"):
        batch.tokens[name] = torch.randn(batch.num_tokens, generator=generator)
    batch.tokens["loss_mask"] = (torch.rand(batch.num_tokens, generator=generator) < 0.7).float()
    batch.samples["key"] = torch.tensor([sample_key("uid", row) for row in range(len(lengths))])
    order = rng.sample(range(len(lengths)), len(lengths))
    moved, counts = batch.select(order), denominators(batch)
    poisoned = batch.tokens["loss_mask"] == 0
    moved.tokens["advantages"] = torch.where(moved.tokens["loss_mask"] == 0, math.nan, moved.tokens["advantages"])
    for options in (
        LossOptions(loss_mode="clip_cov", clip_cov_ratio=0.3, clip_cov_lb=-0.2, clip_cov_ub=2.0),
        LossOptions(loss_mode="kl_cov", kl_cov_ratio=0.3),
    ):
        for each in (batch, moved):
            PolicyLoss(options).prepare_mini(each, step=3, number=1)
        assert torch.equal(moved.tokens["cov_selected"], batch.select(order).tokens["cov_selected"])
        assert not batch.tokens["cov_selected"][poisoned].any()
        value, grad_T, metrics = run(options, batch.tokens["now"], batch, counts)
        for plan in ([order], [[row] for row in order], balance(lengths, min(dp, len(lengths)))):
            parts = [run(options, share.tokens["now"], share, counts) for share in scatter(batch, plan)]
            assert sum(part[0] for part in parts) == pytest.approx(value, rel=1e-5, abs=1e-6)
            expected = [batch.rows(grad_T)[row] for rows in plan for row in rows]
            torch.testing.assert_close(torch.cat([part[1] for part in parts]), torch.cat(expected))
            merged = {key: metric.value for key, metric in merge(part[2] for part in parts).items()}
            assert merged == pytest.approx({k: m.value for k, m in metrics.items()}, rel=1e-5, abs=1e-6)


# --- length ---------------------------------------------------------------------------------------------------


def two_lengths():
    """A prompt token, then 2 and 6 response tokens, A = 0: the length term alone is left."""
    masks = [[0.0] + [1.0] * 2, [0.0] + [1.0] * 6]
    zeros = [[0.0] * 3, [0.0] * 7]
    batch = TrainBatch.pack([[1] * 3, [1] * 7], loss_mask=masks, old_log_probs=zeros, advantages=zeros)
    return batch


def test_length_loss_shortens_long_samples():
    batch = two_lengths()
    options = LossOptions(loss_agg_mode="seq-mean-token-mean", length_loss_coef=1.0, length_max_len=8)
    PolicyLoss(options).prepare_batch(batch, ["a", "a"])
    assert batch.samples["length_weights"].tolist() == [-0.25, 0.25]
    value, grad_T, metrics = run(options, torch.full((10,), -1.0), batch)
    expected = [0] + [-0.0625] * 2 + [0] + [0.0208333] * 6
    # At A = 0 the policy loss has no gradient; the detached form of the penalty would have none either.
    assert grad_T.tolist() == pytest.approx(expected, rel=1e-5)
    assert value == metrics["actor/length_loss"].value == pytest.approx(0.0, abs=1e-6)  # -1 (-.25 + .25) / 2
    half = replace(options, length_loss_coef=0.5)
    assert torch.allclose(run(half, torch.full((10,), -1.0), batch)[1] * 2, grad_T)
    PolicyLoss(LossOptions()).prepare_batch(none := two_lengths(), ["a", "a"])
    assert "length_weights" not in none.samples
    assert "actor/length_loss" not in run(LossOptions(), torch.full((10,), -1.0), batch)[2]


def test_length_weights_are_those_of_the_group():
    lengths = {"a": (4, 8, 20), "b": (2, 2), "c": (9,)}
    rows = [(uid, n) for uid, group in lengths.items() for n in group] + [("a", 0)]
    rows = rows[::2] + rows[1::2]  # interleaved
    batch = TrainBatch.pack([[1] * (n + 1) for _, n in rows], response_mask=[[0.0] + [1.0] * n for _, n in rows])
    weights = length_weights(batch, [uid for uid, _ in rows], free_len=4, max_len=12)
    found = {(uid, n): weight for (uid, n), weight in zip(rows, weights.tolist(), strict=True)}
    # ratios of a: 0, .5, 1 (clipped), without the empty sample
    assert found == pytest.approx({("a", 4): -0.5, ("a", 8): 0, ("a", 20): 0.5, ("b", 2): 0, ("c", 9): 0, ("a", 0): 0})


# --- without a pass for the old policy ------------------------------------------------------------------------


def rollout_batch(rho):
    """Log-probs -1 now, rho = now / rollout."""
    return TrainBatch.pack(
        [[1] * len(row) for row in rho],
        loss_mask=[[1.0] * len(row) for row in rho],
        old_log_probs=[[-1 - math.log(x) for x in row] for row in rho],
        advantages=[[2.0] * len(row) for row in rho],
    )


@pytest.mark.parametrize(
    ("rule", "weights"),
    [
        (None, [1, 1, 1, 1, 1]),
        (WeightRule("token", 2.0), [0.5, 1.2, 2.0, 1.0, 1.1]),
        (WeightRule("sequence", 1.5), [1.5] * 3 + [1.1] * 2),
        (WeightRule("token", 2.5, low=0.8), [0, 1.2, 0, 1.0, 1.1]),
    ],
)
def test_bypass_reinforce_weighs_by_the_current_policy(rule, weights):
    """-A w log_probs, w without gradient."""
    options = LossOptions(loss_mode="bypass_reinforce", rollout_weights=rule, loss_agg_mode="token-sum", bypass=True)
    value, grad_T, metrics = run(options, torch.full((5,), -1.0), rollout_batch([[0.5, 1.2, 3.0], [1.0, 1.1]]))
    assert value == pytest.approx(2 * sum(weights))
    assert grad_T.tolist() == pytest.approx([-2 * weight for weight in weights])
    if rule is not None:
        assert metrics["rollout_corr/rollout_is_mean"].value == pytest.approx(sum(weights) / 5)


def test_bypass_compares_trainer_and_rollout():
    metrics = run(LossOptions(bypass=True), torch.full((2,), -1.0), rollout_batch([[2.0], [0.5]]))[2]
    now = math.exp(-1)
    assert metrics["training/rollout_probs_diff_mean"].value == pytest.approx((now / 2 + now) / 2)
    assert metrics["training/rollout_probs_diff_max"].value == pytest.approx(now)
    assert metrics["training/rollout_logprobs_abs_diff_mean"].value == pytest.approx(math.log(2))
    assert "training/rollout_probs_diff_mean" not in run(LossOptions(), torch.zeros(2), rollout_batch([[1.0, 2.0]]))[2]


def test_a_batch_without_old_log_probs_is_on_policy():
    batch = rollout_batch([[3.0, 0.2], [1.0]])
    given_T = torch.tensor([-0.5, -2.0, -1.0])
    batch.tokens["old_log_probs"] = given_T
    expected = run(LossOptions(), given_T, batch)
    del batch.tokens["old_log_probs"]
    value, grad_T, metrics = run(LossOptions(old_is_current=True), given_T, batch)
    assert value == expected[0] and torch.equal(grad_T, expected[1]) and metrics == expected[2]
    assert metrics["actor/ratio_max"].value == 1


# --- of one's own ---------------------------------------------------------------------------------------------


def own_loss(x, options):
    """Reads what every loss may read, and a tensor of its own."""
    loss_T = -x.advantages_T * x.ratio_T + x.token("bonus") * x.log_probs_T
    return x.weighted(loss_T), {"actor/own": x.ratio_T > 1 + options.clip_ratio_high}


def test_a_loss_of_ones_own():
    batch = rollout_batch([[2.0, 1.0], [1.0]])
    batch.tokens["bonus"] = torch.tensor([0.5, 0.0, math.nan])
    batch.tokens["loss_mask"] = torch.tensor([1.0, 1.0, 0.0])
    options = LossOptions(loss_mode=f"{__name__}:own_loss")
    value, grad_T, metrics = run(options, torch.full((3,), -1.0), batch)
    assert value == pytest.approx((-4 - 0.5 - 2) / 2) and grad_T.tolist() == pytest.approx([-1.75, -1.0, 0.0])
    assert metrics["actor/own"].value == 0.5 and metrics["actor/ratio_max"].value == pytest.approx(2)
