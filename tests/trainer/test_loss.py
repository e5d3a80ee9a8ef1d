"""Policy losses against hand-computed numbers, and the invariances of their global value."""

import math
import pickle
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.batch import Denominators, PolicyOutput, TrainBatch
from engines.metric import merge
from trainer.batching import balance, denominators, scatter
from trainer.credit.importance import WeightRule
from trainer.update.loss import AGG_MODES, LossOptions, PolicyLoss, aggregate
from trainer.update.policy_loss import LOSSES


def make_batch(rows, **tokens):
    """Rows are mask rows; every other keyword is one row of floats per sample."""
    return TrainBatch.pack([[1] * len(row) for row in rows], loss_mask=rows, **tokens)


def run(options, log_probs, batch, counts=None, entropy=None):
    """Loss, gradient per token [T], metric values."""
    log_probs = log_probs.detach().clone().requires_grad_()
    loss, metrics = PolicyLoss(options)(PolicyOutput(log_probs, entropy), batch, counts or denominators(batch))
    (grad,) = torch.autograd.grad(loss, log_probs)
    return loss.item(), grad, metrics


def tokens_of(options, cases, log_prob=-1.0):
    """Loss and gradient of single tokens given as (A, r), each in a sample of its own; and all metrics."""
    batch = make_batch(
        [[1.0]] * len(cases),
        old_log_probs=[[log_prob - math.log(r)] for _, r in cases],
        advantages=[[a] for a, _ in cases],
    )
    log_probs = torch.full((len(cases),), log_prob)
    single = [run(options, log_probs[i : i + 1], batch.select([i])) for i in range(len(cases))]
    _, _, metrics = run(options, log_probs, batch)
    return [loss for loss, _, _ in single], [grad.item() for _, grad, _ in single], metrics


def test_vanilla_clips_higher_than_lower():
    options = LossOptions(clip_ratio_high=0.28, clip_ratio_c=None)
    losses, _, metrics = tokens_of(options, [(1, 1.5), (1, 0.5), (-1, 1.5), (-1, 0.5)])
    assert losses == pytest.approx([-1.28, -0.5, 1.5, 0.8])
    assert metrics["actor/pg_clipfrac"].value == 0.5
    assert "actor/pg_clipfrac_lower" not in metrics


def test_dual_clip_bounds_the_loss_of_bad_tokens():
    losses, grads, metrics = tokens_of(LossOptions(clip_ratio_high=0.28, clip_ratio_c=2.5), [(-2, 6), (-2, 2), (2, 6)])
    assert losses == pytest.approx([5, 4, -2.56])
    assert grads == pytest.approx([0, 4, 0])
    assert metrics["actor/pg_clipfrac_lower"].value == pytest.approx(1 / 3)


def test_clip_distances_are_distances_from_one():
    options = LossOptions(clip_ratio_low=0.1, clip_ratio_high=1.1)
    losses, _, _ = tokens_of(options, [(1, 0.85), (1, 2.0), (1, 2.5), (-1, 0.85)])
    assert losses == pytest.approx([-0.85, -2.0, -2.1, 0.9])


def one_sample(options, differences, advantages, weights=None):
    extras = {} if weights is None else {"rollout_is_weights": [weights]}
    batch = make_batch(
        [[1.0] * len(differences)], old_log_probs=[[-1.0 - d for d in differences]], advantages=[advantages], **extras
    )
    return run(options, torch.full((len(differences),), -1.0), batch)


def test_gspo_uses_the_mean_not_the_sum():
    wide = LossOptions(loss_mode="gspo", clip_ratio_low=1.0, clip_ratio_high=1e5)
    assert one_sample(wide, [math.log(2)] * 2, [1.0] * 2)[0] == pytest.approx(-2)
    loss, grad, _ = one_sample(wide, [0.4, -0.2, 0.1, 0.1], [1.0] * 4)
    assert loss == pytest.approx(-1.105171)
    assert grad.tolist() == pytest.approx([-0.276293] * 4)
    assert one_sample(wide, [100.0, -100.0], [1.0] * 2)[0] == pytest.approx(-1)
    assert one_sample(wide, [100.0, -50.0], [1.0] * 2)[0] == pytest.approx(-math.exp(10))


def test_gspo_weighs_samples_alike_whatever_their_length():
    batch = make_batch([[1.0], [1.0] * 100], old_log_probs=[[-1.1], [-1.1] * 100], advantages=[[1.0], [1.0] * 100])
    _, grad, _ = run(LossOptions(loss_mode="gspo"), torch.full((101,), -1.0), batch)
    assert grad[0].item() == pytest.approx(grad[1:].sum().item(), rel=1e-5)


def test_sapo_gates_softly():
    losses, grads, _ = tokens_of(LossOptions(loss_mode="sapo"), [(1, 1), (1, 1.2), (-1, 1.2), (1, 3)])
    assert losses == pytest.approx([-2, -2.199336, 2.104030, -3.523188], rel=1e-5)
    assert grads == pytest.approx([-1, -1.188080, 1.186867, -1.259923], rel=1e-5)


def test_cispo_keeps_the_gradient_of_clipped_tokens():
    losses, grads, metrics = tokens_of(LossOptions(loss_mode="cispo", clip_ratio_high=0.28), [(1, 1.5), (-1, 0.5)])
    assert losses == pytest.approx([1.28, -0.8]) and grads == pytest.approx([-1.28, 0.8])
    assert metrics["actor/pg_clipfrac"].value == 1.0


def test_gpg_and_dro():
    losses, grads, _ = tokens_of(LossOptions(loss_mode="gpg"), [(2, 1.0)])
    assert (losses, grads) == ([2.0], [-2.0])
    losses, grads, _ = tokens_of(LossOptions(loss_mode="dro", dro_beta=0.4), [(2, math.exp(0.5))])
    assert losses == pytest.approx([2.05]) and grads == pytest.approx([-1.8])


@pytest.mark.parametrize(("mode", "bound"), [("dppo_tv", 0.15), ("dppo_kl", 0.05)])
def test_dppo_drops_by_divergence_not_by_ratio(mode, bound):
    options = LossOptions(loss_mode=mode, clip_ratio_low=bound, clip_ratio_high=bound, clip_ratio_c=20)
    expected = [0, -0.499345, 10.519674, 0]
    cases = [(0.5, 0.7, 1), (0.5, 0.7, -1), (0.01, 0.03, 1), (0.6, 0.4, -1)]
    for (old, new, advantage), loss in zip(cases, expected, strict=True):
        losses, _, metrics = tokens_of(options, [(advantage, new / old)], log_prob=math.log(new))
        assert losses == pytest.approx([loss], rel=1e-5)
        assert metrics["actor/pg_clipfrac"].value == (loss == 0)


def test_dppo_kl_at_certainty_is_finite():
    options = LossOptions(loss_mode="dppo_kl", clip_ratio_low=0.05, clip_ratio_high=0.05)
    losses, grads, _ = tokens_of(options, [(1, 1.0), (-1, 1.0), (1, 2.0)], log_prob=0.0)
    assert all(math.isfinite(value) for value in losses + grads) and grads[2] == 0
    # p rounds to 1: the divergence is not infinite, the token stays
    assert tokens_of(options, [(1, math.exp(1e-6))], log_prob=0.0)[1] == pytest.approx([-1])


def test_dppo_keeps_tokens_that_moved_against_their_advantage():
    for mode in ("dppo_tv", "dppo_kl"):
        options = LossOptions(loss_mode=mode, clip_ratio_low=0.05, clip_ratio_high=0.05)
        losses, _, _ = tokens_of(options, [(1, 0.4 / 0.6)], log_prob=math.log(0.4))
        assert losses == pytest.approx([-0.4 / 0.6 * math.log(0.4)])


def test_geo_mean_clips_in_log_space():
    options = LossOptions(loss_mode="geo_mean", clip_ratio_low=0.4, clip_ratio_high=0.4)
    loss, grad, _ = one_sample(options, [0.5, -0.1], [1.0, 1.0])
    assert loss == pytest.approx(-1.161834) and grad[0] == 0
    assert grad[1].item() == pytest.approx(-1.161834 / 2)
    assert one_sample(options, [0.5, -0.5], [-1.0, -1.0])[0] == pytest.approx(1.051271)
    batch = make_batch([[1.0], [1.0] * 3], old_log_probs=[[-1.0], [-1.0] * 3], advantages=[[1.0], [3.0] * 3])
    assert run(options, torch.full((4,), -1.0), batch)[0] == pytest.approx(-2.0)  # each sample counts once


def test_rollout_weights_multiply_tokens_and_enter_geo_mean_by_their_geometric_mean():
    vanilla, geo = LossOptions(), LossOptions(loss_mode="geo_mean")
    loss, grad, _ = one_sample(vanilla, [0.0, 0.0], [1.0, 1.0], weights=[0.5, 2.0])
    assert loss == pytest.approx(-1.25) and grad.tolist() == pytest.approx([-0.25, -1.0])
    assert one_sample(geo, [0.0, 0.0], [1.0, 1.0], weights=[0.5, 8.0])[0] == pytest.approx(-2.0)


# --- aggregation ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", 1.8),
        ("seq-mean-token-sum", 4.5),
        ("seq-mean-token-mean", 3.0),
        ("seq-mean-token-sum-norm", 1.125),
        ("token-sum", 9.0),
    ],
)
def test_aggregation_modes_with_a_masked_sample(mode, expected):
    """Sample A: four tokens of loss 1; B: one of loss 5; C: fully masked. Any split gives the same."""
    batch = make_batch([[1.0] * 4, [1.0], [0.0] * 3])
    values = torch.tensor([1.0] * 4 + [5.0] + [math.nan] * 3)
    counts = denominators(batch)
    assert counts == Denominators(5, 2)
    total = 0.0
    for row, part in enumerate(batch.rows(values)):
        micro = batch.select([row])
        total += aggregate(part, micro.tokens["loss_mask"], micro, counts, mode, 4.0).item()
    whole = aggregate(values, batch.tokens["loss_mask"], batch, counts, mode, 4.0).item()
    assert total == pytest.approx(expected) and whole == pytest.approx(expected)


@pytest.mark.parametrize(
    ("mode", "expected"), [("token-mean", 1.0), ("seq-mean-token-mean", 1.75), ("seq-mean-token-sum", 2.5)]
)
@pytest.mark.parametrize("ranks", [[[0, 1, 2, 3]], [[0, 3], [1, 2]], [[0], [1], [2], [3]]])
def test_four_samples_on_any_ranks(mode, expected, ranks):
    batch = make_batch([[1.0] * 4, [1.0], [1.0] * 2, [1.0] * 3])
    values = batch.rows(torch.tensor([1.0] * 4 + [5.0] + [2.0] * 2 + [-1.0] * 3))
    counts, total = denominators(batch), 0.0
    for rows in ranks:
        share = batch.select(rows)
        total += aggregate(torch.cat([values[r] for r in rows]), share.tokens["loss_mask"], share, counts, mode).item()
    assert total == pytest.approx(expected)


def test_sample_weights_act_on_the_policy_loss_only():
    tokens = {"old_log_probs": [[-1.0], [-1.0]], "advantages": [[1.0], [1.0]], "ref_log_probs": [[-2.0], [-2.0]]}
    batch = make_batch([[1.0], [1.0]], **tokens)
    batch.samples["loss_weights"] = torch.tensor([0.5, 2.0])
    _, grad, metrics = run(LossOptions(), torch.tensor([-1.0, -1.0]), batch)
    assert metrics["actor/pg_loss"].value == pytest.approx(-1.25)
    assert grad.tolist() == pytest.approx([-0.25, -1.0])
    options = LossOptions(use_kl_loss=True, kl_loss_coef=0.1, kl_loss_type="k1")
    loss, _, metrics = run(options, torch.tensor([-1.0, -1.0]), batch)
    assert metrics["actor/kl_loss"].value == 1.0 and metrics["actor/kl_coef"].value == 0.1
    assert loss == pytest.approx(-1.25 + 0.1)


def test_total_is_policy_plus_kl_minus_entropy():
    batch = make_batch([[0.0, 1.0]], old_log_probs=[[0.0, -1.0]], advantages=[[0.0, 1.0]], ref_log_probs=[[0.0, -2.0]])
    options = LossOptions(use_kl_loss=True, kl_loss_coef=0.5, kl_loss_type="k2", entropy_coeff=0.1)
    entropy = torch.tensor([math.nan, 2.0], requires_grad=True)
    log_probs = torch.tensor([0.0, -1.0], requires_grad=True)
    loss, metrics = PolicyLoss(options)(PolicyOutput(log_probs, entropy), batch, denominators(batch))
    loss.backward()
    assert loss.item() == pytest.approx(-1 + 0.5 * 0.5 - 0.1 * 2.0)
    assert log_probs.grad.tolist() == pytest.approx([0, -1 + 0.5 * 1.0])
    assert entropy.grad.tolist() == pytest.approx([0, -0.1])
    values = {name: metric.value for name, metric in metrics.items()}
    assert values["actor/entropy"] == values["actor/entropy_loss"] == 2.0
    assert values["actor/loss"] == pytest.approx(loss.item())
    assert (values["actor/ppo_kl"], values["actor/ratio_mean"], values["actor/ratio_max"]) == (0, 1, 1)


# --- invariances ----------------------------------------------------------------------------------------------


def mode_options(mode):
    """Options under which clips bind for some tokens; dro needs its beta."""
    clips = {"dppo_tv": (0.02, 0.02), "dppo_kl": (0.01, 0.01), "gspo": (0.05, 0.05)}.get(mode, (0.2, 0.28))
    return LossOptions(
        loss_mode=mode,
        clip_ratio_low=clips[0],
        clip_ratio_high=clips[1],
        clip_ratio_c=2.0,
        loss_scale_factor=7.0,
        dro_beta=0.3,
        length_loss_coef=0.3,
        length_max_len=9,
        rollout_weights=WeightRule("geometric", 1.05),
        bypass=mode == "bypass_reinforce",
        use_kl_loss=True,
        kl_loss_coef=0.2,
        entropy_coeff=0.1,
    )


def random_batch(lengths, seed):
    """Random masks (one sample may end up empty), weights and log-probs, and the model output for it."""
    generator = torch.Generator().manual_seed(seed)
    batch = TrainBatch.pack([[1] * n for n in lengths])
    total = batch.num_tokens
    noise = lambda scale=1.0: scale * torch.randn(total, generator=generator)  # noqa: E731
    log_probs = -torch.rand(total, generator=generator) * 3 - 0.05
    batch.tokens |= {
        "loss_mask": (torch.rand(total, generator=generator) < 0.7).float(),
        "old_log_probs": log_probs - noise(0.4),
        "ref_log_probs": log_probs - noise(0.4),
        "advantages": noise(),
        "rollout_is_weights": torch.rand(total, generator=generator) + 0.5,
        "cov_selected": (torch.rand(total, generator=generator) < 0.4).float(),
    }
    batch.samples["loss_weights"] = torch.rand(len(lengths), generator=generator) + 0.5
    batch.samples["length_weights"] = torch.rand(len(lengths), generator=generator) - 0.5
    batch.tokens["log_probs"], batch.tokens["entropy"] = log_probs, torch.rand(total, generator=generator)
    return batch


def outcome(options, batch, counts):
    return run(options, batch.tokens["log_probs"], batch, counts, batch.tokens["entropy"])


shapes = st.lists(st.integers(1, 7), min_size=2, max_size=8)


@settings(max_examples=8)
@given(shapes, st.integers(0, 10**6), st.integers(1, 4), st.randoms())
def test_any_cut_over_ranks_and_micro_batches_gives_the_same_loss_and_gradient(lengths, seed, dp, rng):
    batch = random_batch(lengths, seed)
    counts = denominators(batch)
    order = rng.sample(range(len(lengths)), len(lengths))
    shares = balance(lengths, min(dp, len(lengths)))
    for name in LOSSES:
        for agg in AGG_MODES:
            options = replace(mode_options(name), loss_agg_mode=agg)
            loss, grad, metrics = outcome(options, batch, counts)
            grads = batch.rows(grad)
            for plan in (shares, [order], [[row] for row in order]):
                parts = [outcome(options, share, counts) for share in scatter(batch, plan)]
                assert sum(part[0] for part in parts) == pytest.approx(loss, rel=1e-5, abs=1e-6)
                for rows, (_, part_grad, _) in zip(plan, parts, strict=True):
                    torch.testing.assert_close(part_grad, torch.cat([grads[r] for r in rows]), rtol=1e-5, atol=1e-7)
                merged = merge(part[2] for part in parts)
                assert merged.keys() == metrics.keys()
                for key in metrics:
                    assert merged[key].value == pytest.approx(metrics[key].value, rel=1e-5, abs=1e-6), (name, key)


@pytest.mark.parametrize("name", LOSSES)
def test_masked_positions_reach_nothing_even_when_nan(name):
    batch = random_batch([5, 3, 6, 4], seed=3)
    options, counts, masked = mode_options(name), denominators(batch), batch.tokens["loss_mask"] == 0
    assert masked.any()
    loss, grad, metrics = outcome(options, batch, counts)
    assert math.isfinite(loss) and grad.isfinite().all() and (grad[masked] == 0).all()
    for poison in (math.nan, math.inf, -math.inf, 1e30):
        spoiled = TrainBatch(batch.input_ids, batch.cu_seqlens, dict(batch.tokens), batch.samples)
        for key in spoiled.tokens.keys() - {"loss_mask"}:
            spoiled.tokens[key] = torch.where(masked, poison, batch.tokens[key])
        again = outcome(options, spoiled, counts)
        assert again[0] == loss and torch.equal(again[1], grad) and again[2] == metrics


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("agg", AGG_MODES)
def test_a_masked_filler_adds_nothing(name, agg):
    batch = random_batch([5, 3], seed=1)
    options = replace(mode_options(name), loss_agg_mode=agg)
    loss, grad, metrics = outcome(options, batch.masked(), Denominators(0.0, 0.0))
    assert loss == 0 and torch.equal(grad, torch.zeros_like(grad))
    real = outcome(options, batch, denominators(batch))[2]
    assert {k: m.value for k, m in merge([real, metrics]).items()} == {k: m.value for k, m in real.items()}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("agg", [mode for mode in AGG_MODES if mode != "token-sum"])
def test_duplicating_the_batch_changes_no_mean(name, agg):
    batch = random_batch([5, 3, 6], seed=2)
    twice = batch.select([0, 1, 2, 0, 1, 2])
    options = replace(mode_options(name), loss_agg_mode=agg)
    one, two = outcome(options, batch, denominators(batch)), outcome(options, twice, denominators(twice))
    assert two[0] == pytest.approx(one[0], rel=1e-5)
    torch.testing.assert_close(two[1][: len(one[1])] * 2, one[1], rtol=1e-5, atol=1e-7)


def test_a_loss_on_policy_has_ratio_one_and_clips_nothing():
    batch = random_batch([5, 3], seed=4)
    batch.tokens["old_log_probs"] = batch.tokens["log_probs"]
    metrics = outcome(mode_options("vanilla"), batch, denominators(batch))[2]
    values = {key: metric.value for key, metric in metrics.items()}
    assert (values["actor/ratio_max"], values["actor/ratio_min"], values["actor/ppo_kl"]) == (1, 1, 0)
    assert values["actor/pg_clipfrac"] == values["actor/pg_clipfrac_lower"] == 0


@pytest.mark.parametrize(("factor", "highest", "lowest"), [(1.0, 4, 2), (-1.0, 0.5, 0.25)])
def test_ratio_metrics_ignore_masked_tokens(factor, highest, lowest):
    log2 = factor * math.log(2)
    batch = make_batch([[0.0, 1.0, 1.0]], old_log_probs=[[0.0, -2 - log2, -2 - 2 * log2]], advantages=[[0.0, 1, 1]])
    metrics = run(LossOptions(), torch.full((3,), -2.0), batch)[2]
    assert metrics["actor/ratio_max"].value == pytest.approx(highest)
    assert metrics["actor/ratio_min"].value == pytest.approx(lowest)
    assert metrics["actor/ratio_mean"].value == pytest.approx((highest + lowest) / 2)
    assert metrics["actor/ppo_kl"].value == pytest.approx(-1.5 * log2)
    assert "actor/ratio_max" not in run(LossOptions(), torch.full((3,), -2.0), batch.masked())[2]


def test_huge_ratios_stay_finite():
    losses, grads, _ = tokens_of(LossOptions(clip_ratio_c=None), [(-1, math.exp(80))])
    assert losses == pytest.approx([math.exp(20)]) and grads == [0.0]


def test_the_loss_can_be_pickled():
    loss = PolicyLoss(LossOptions(loss_mode="gspo"))
    assert pickle.loads(pickle.dumps(loss)) == loss


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"loss_mode": "vanila"}, "expected one of"),
        ({"loss_agg_mode": "mean"}, "expected one of"),
        ({"loss_agg_mode": "seq-mean-token-sum-norm"}, "loss_scale_factor"),
        ({"loss_mode": "dro"}, "dro_beta"),
        ({"clip_ratio_low": 1.1}, "distance"),
        ({"clip_ratio_low": 0.0}, "distances"),
        ({"clip_ratio_high": -0.1}, "distances"),
        ({"clip_ratio_c": 1.0}, "more than 1"),
        ({"clip_cov_lb": 5.0}, "below the upper"),
        ({"length_loss_coef": 0.1, "length_free_len": 8, "length_max_len": 8}, "free < max"),
        ({"loss_mode": "no_such_module:f"}, "no_such_module"),
        ({"loss_mode": "math:f"}, "has no function 'f'"),
        ({"kl_loss_type": "full"}, "KL estimator"),
    ],
)
def test_wrong_options_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        LossOptions(**change)
