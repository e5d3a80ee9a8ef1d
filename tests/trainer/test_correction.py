"""Rollout correction against hand-computed numbers: weights, rejection, and what they report."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.batch import TrainBatch
from trainer.credit.correction import CorrectionOptions, Rejection, correct
from trainer.credit.importance import WeightRule, raw_weights, segments

RHO = [[0.5, 1.2, 3.0], [1.0, 1.1]]
ROLLOUT = [[-1.0, -0.5, -2.0], [-0.3, -0.7]]


def make_batch(rho=RHO, rollout=ROLLOUT, mask=None):
    """One leading prompt token per sample, which holds nan everywhere."""
    nan = math.nan
    old = [[nan] + [r + math.log(x) for r, x in zip(*rows, strict=True)] for rows in zip(rollout, rho, strict=True)]
    mask = mask or [[1.0] * len(row) for row in rho]
    return TrainBatch.pack(
        [[1] * len(row) for row in old],
        response_mask=[[0.0, *row] for row in mask],
        old_log_probs=old,
        rollout_log_probs=[[nan, *row] for row in rollout],
    )


def run(batch=None, **options):
    """Weights and kept flags of the response tokens per sample, and the metrics without their prefix."""
    batch = batch or make_batch()
    metrics = correct(batch, CorrectionOptions(**options))
    found = {key.removeprefix("rollout_corr/"): metric.value for key, metric in metrics.items()}
    rows = lambda name: [row[1:].tolist() for row in batch.rows(batch.tokens[name])]  # noqa: E731
    weights = rows("rollout_is_weights") if "rollout_is_weights" in batch.tokens else None
    return weights, rows("rs_mask"), found


def flat(rows):
    return [value for row in rows for value in row]


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (WeightRule("token", 2.0), [0.5, 1.2, 2.0, 1.0, 1.1]),
        (WeightRule("sequence", 2.0), [1.8] * 3 + [1.1] * 2),
        (WeightRule("sequence", 1.5), [1.5] * 3 + [1.1] * 2),
        (WeightRule("geometric", 2.0), [1.216440] * 3 + [1.048809] * 2),
        (WeightRule("segment", 2.0), [1.216440] * 3 + [1.048809] * 2),
        (WeightRule("token", 2.5, low=0.8), [0.0, 1.2, 0.0, 1.0, 1.1]),
    ],
)
def test_weights(rule, expected):
    weights, kept, _ = run(weights=rule)
    assert flat(weights) == pytest.approx(expected, rel=1e-5)
    assert flat(kept) == [1] * 5  # weights leave the mask alone


def test_weights_are_float32_without_gradient():
    batch = make_batch()
    batch.tokens["old_log_probs"].requires_grad_()
    correct(batch, CorrectionOptions(weights=WeightRule("token", 2.0)))
    weights_T = batch.tokens["rollout_is_weights"]
    assert weights_T.dtype == torch.float32 and not weights_T.requires_grad and weights_T.isfinite().all()


def test_weights_divided_by_their_batch_mean():
    weights, _, metrics = run(weights=WeightRule("token", 2.0), batch_normalize=True)
    assert flat(weights) == pytest.approx([value / 1.16 for value in (0.5, 1.2, 2, 1, 1.1)])
    assert metrics["rollout_is_batch_norm_factor"] == pytest.approx(1.16)
    assert metrics["rollout_is_mean"] == pytest.approx(1.16)  # of the weights before
    weights, _, _ = run(weights=WeightRule("sequence", 2.0), batch_normalize=True)
    assert flat(weights) == pytest.approx([1.8 / 1.45] * 3 + [1.1 / 1.45] * 2)  # a sample counts once


def test_segments_are_runs_of_model_tokens():
    """A turn of rho 2 and 8, an observation, a turn of rho .5; the next sample starts a run of its own."""
    mask, row = torch.tensor([0, 1, 1, 0, 1, 1]).bool(), torch.tensor([0, 0, 0, 0, 0, 1])
    assert segments(mask, row) == (pytest.approx([0, 0, 0, 0, 1, 2]), 3)
    log = torch.tensor([math.nan, math.log(2), math.log(8), math.nan, math.log(0.5), math.log(3)])
    assert raw_weights(log, mask, row, 2, "segment").tolist() == pytest.approx([1, 4, 4, 1, 0.5, 3])


def test_weight_metrics():
    _, _, metrics = run(weights=WeightRule("token", 2.0))
    expected = {
        "rollout_is_mean": 1.16,
        "rollout_is_max": 2.0,
        "rollout_is_min": 0.5,
        "rollout_is_std": math.sqrt((7.9 - 5 * 1.16**2) / 4),
        "rollout_is_ratio_fraction_high": 0.2,
        "rollout_is_eff_sample_size": 0.851646,
        "rollout_is_seq_mean": (3.7 / 3 + 1.05) / 2,
        "rollout_is_seq_max": 3.7 / 3,
        "rollout_is_seq_min": 1.05,
        "rollout_is_seq_std": (3.7 / 3 - 1.05) / math.sqrt(2),
        "rollout_is_seq_max_deviation": 0.7 / 3,
        "rollout_is_seq_fraction_high": 0.0,  # raw mean 4.7 / 3
        "rollout_is_seq_fraction_low": 0.0,
    }
    assert {key: metrics[key] for key in expected} == pytest.approx(expected, rel=1e-5)
    metrics = run(weights=WeightRule("token", 1.5))[2]
    assert metrics["rollout_is_ratio_fraction_low"] == 0.2  # .5 is below 1 / 1.5
    assert metrics["rollout_is_seq_fraction_high"] == 0.5  # raw mean 4.7 / 3
    metrics = run(weights=WeightRule("token", 2.5, low=0.8))[2]
    assert metrics["rollout_is_ratio_fraction_low"] == metrics["rollout_is_ratio_fraction_high"] == 0.2
    assert metrics["rollout_is_oob_ratio"] == 0.4


@pytest.mark.parametrize(
    ("rules", "kept"),
    [
        ([Rejection("token_k1", 2.5, 0.4)], [1, 1, 0, 1, 1]),
        ([Rejection("token_k3", 0.5)], [1, 1, 0, 1, 1]),
        ([Rejection("token_k2", 0.2)], [0, 1, 0, 1, 1]),  # (ln 2)^2 / 2 = .240
        ([Rejection("seq_mean_k3", 0.3)], [0, 0, 0, 1, 1]),
        ([Rejection("seq_mean_k3", 0.371)], [1, 1, 1, 1, 1]),
        ([Rejection("seq_sum_k3", 1.2)], [1, 1, 1, 1, 1]),  # 1.112213
        ([Rejection("seq_sum_k3", 1.1)], [0, 0, 0, 1, 1]),
        ([Rejection("seq_max_k3", 0.9)], [0, 0, 0, 1, 1]),  # .901388
        ([Rejection("seq_max_k2", 0.61)], [1, 1, 1, 1, 1]),  # (ln 3)^2 / 2 = .603474
        ([Rejection("seq_mean_k1", 1.25, 0.8)], [1, 1, 1, 1, 1]),
        ([Rejection("seq_mean_k1", 1.2, 0.8)], [0, 0, 0, 1, 1]),
        ([Rejection("seq_sum_k1", 1.75, 0.8)], [0, 0, 0, 1, 1]),  # products 1.8 and 1.1
        ([Rejection("token_k1", 2.5, 0.4), Rejection("seq_sum_k1", 1.85, 1.15)], [1, 1, 0, 0, 0]),
    ],
)
def test_rejection(rules, kept):
    assert flat(run(rejections=tuple(rules))[1]) == kept


def test_an_unsymmetric_band_is_one_of_the_ratio():
    batch = make_batch([[3.0, 0.3, 1.0, 0.9]], [[-3.0] * 4])
    _, kept, metrics = run(batch, rejections=(Rejection("token_k1", 4.0, 0.5),))
    assert flat(kept) == [1, 0, 1, 1]
    assert metrics["rollout_rs_token_k1_fraction_low"] == 0.25 and metrics["rollout_rs_token_k1_fraction_high"] == 0


def test_rejection_metrics():
    _, _, metrics = run(rejections=(Rejection("token_k3", 0.5), Rejection("seq_mean_k3", 0.3)))
    expected = {
        "rollout_rs_token_k3_mean": 0.223381,
        "rollout_rs_token_k3_max": 0.901388,
        "rollout_rs_token_k3_min": 0.0,
        "rollout_rs_token_k3_fraction_high": 0.2,
        "rollout_rs_token_k3_masked_fraction": 0.2,
        "rollout_rs_token_k3_seq_masked_fraction": 0.5,
        "rollout_rs_seq_mean_k3_max": 0.370738,
        "rollout_rs_seq_mean_k3_fraction_high": 0.5,
        "rollout_rs_seq_mean_k3_masked_fraction": 0.6,
        "rollout_rs_masked_fraction": 0.6,
        "rollout_rs_seq_masked_fraction": 0.5,
    }
    assert {key: metrics[key] for key in expected} == pytest.approx(expected, rel=1e-5)
    assert {"rollout_rs_token_k3_std", "rollout_rs_seq_mean_k3_min"} <= metrics.keys()


def test_a_veto_takes_the_whole_sample():
    _, kept, metrics = run(veto=0.6)
    assert flat(kept) == [0, 0, 0, 1, 1] and metrics["rollout_rs_veto_seq_masked_fraction"] == 0.5


def test_off_policy_metrics():
    _, _, metrics = run()
    expected = {
        "kl": -0.136619,
        "k3_kl": 0.223381,
        "training_ppl": 2.105943,
        "rollout_ppl": 2.429996,
        "chi2_token": 1.58,
        "chi2_seq": 1.225,
        "rollout_log_ppl": (3.5 / 3 + 0.5) / 2,
        "training_log_ppl": ((3.5 - math.log(1.8)) / 3 + (1 - math.log(1.1)) / 2) / 2,
        "log_ppl_diff_min": -math.log(1.8) / 3,
        "log_ppl_diff_max": -math.log(1.1) / 2,
        "log_ppl_diff": -(math.log(1.8) / 3 + math.log(1.1) / 2) / 2,
        "log_ppl_abs_diff": (math.log(1.8) / 3 + math.log(1.1) / 2) / 2,
        "ppl_ratio": (1.8 ** (-1 / 3) + 1.1**-0.5) / 2,
        "samples_without_log_probs": 0,
    }
    assert metrics == pytest.approx(expected, rel=1e-5)


def test_samples_without_rollout_log_probs_are_dropped_and_empty_ones_are_skipped():
    rho, rollout = [*RHO, [2.0], [5.0]], [*ROLLOUT, [math.nan], [-1.0]]
    batch = make_batch(rho, rollout, mask=[[1.0] * 3, [1.0] * 2, [1.0], [0.0]])
    rules = (Rejection("seq_mean_k3", 0.3),)
    weights, kept, metrics = run(batch, weights=WeightRule("token", 2.0), rejections=rules)
    assert flat(kept) == [0, 0, 0, 1, 1, 0, 0]
    assert flat(weights)[:5] == pytest.approx([0.5, 1.2, 2.0, 1.0, 1.1]) and all(map(math.isfinite, flat(weights)))
    assert metrics.pop("samples_without_log_probs") == 1
    alone = run(weights=WeightRule("token", 2.0), rejections=rules)[2]
    assert metrics == pytest.approx({key: alone[key] for key in metrics}) and len(metrics) == len(alone) - 1


def test_no_usable_token_at_all():
    batch = make_batch([[1.0]], [[math.nan]])
    weights, kept, metrics = run(batch, weights=WeightRule("token", 2.0))
    assert (weights, flat(kept), metrics) == (None, [0], {"samples_without_log_probs": 1})


def test_bypass_puts_the_rollout_in_the_place_of_the_old_policy():
    batch = make_batch([*RHO, [1.0]], [*ROLLOUT, [math.nan]])
    weights, kept, metrics = run(batch, bypass=True)
    old = [row[1:].tolist() for row in batch.rows(batch.tokens["old_log_probs"])]
    assert flat(old) == pytest.approx([*flat(ROLLOUT), 0.0]) and batch.tokens["old_log_probs"].isfinite().all()
    assert weights is None and flat(kept) == [1] * 5 + [0] and metrics == {"samples_without_log_probs": 1}


def test_extreme_ratios_stay_finite():
    batch = make_batch([[1.0] * 3], [[-1.0] * 3])
    batch.tokens["old_log_probs"] = torch.tensor([0.0, -900.0, -1.0, 900.0])
    for kind in ("token", "sequence", "geometric", "segment"):
        rules = (Rejection("seq_sum_k1", 2.0, 0.5), Rejection("seq_max_k3", 1.0))
        weights, _, metrics = run(batch, weights=WeightRule(kind, 1e12), rejections=rules)
        found = {key: value for key, value in metrics.items() if "ppl" not in key}
        assert all(map(math.isfinite, [*flat(weights), *found.values()]))


@settings(max_examples=25)
@given(st.lists(st.integers(1, 6), min_size=2, max_size=7), st.integers(0, 10**6), st.randoms())
def test_the_order_of_the_samples_means_nothing(lengths, seed, rng):
    generator = torch.Generator().manual_seed(seed)
    batch = TrainBatch.pack([[1] * (n + 1) for n in lengths])
    rollout = -torch.rand(batch.num_tokens, generator=generator)
    batch.tokens["response_mask"] = (torch.rand(batch.num_tokens, generator=generator) < 0.7).float()
    batch.tokens["rollout_log_probs"] = rollout
    batch.tokens["old_log_probs"] = rollout + 0.3 * torch.randn(batch.num_tokens, generator=generator)
    order = rng.sample(range(len(lengths)), len(lengths))
    moved = batch.select(order)
    rules = (Rejection("token_k1", 1.5, 0.6), Rejection("seq_mean_k3", 0.04))
    for kind in ("token", "sequence", "geometric", "segment"):
        options = CorrectionOptions(weights=WeightRule(kind, 1.2), batch_normalize=True, rejections=rules)
        one, two = correct(batch, options), correct(moved, options)
        assert {k: m.value for k, m in one.items()} == pytest.approx({k: m.value for k, m in two.items()})
        for name in {"rollout_is_weights", "rs_mask"} & batch.tokens.keys():
            torch.testing.assert_close(batch.select(order).tokens[name], moved.tokens[name])
