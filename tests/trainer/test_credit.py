"""From scored samples to what the update learns from: the order of the rules, and what must not change the result."""

import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.batch import PolicyOutput, TrainBatch
from tests.trainer.credit_bench import PROMPT, batch_of, one
from trainer.batching import balance, denominators, scatter
from trainer.credit.advantage_input import AdvantageOptions
from trainer.credit.assign import CreditOptions, CreditState, RewardKl, assign_credit
from trainer.credit.correction import CorrectionOptions, Rejection
from trainer.credit.importance import WeightRule
from trainer.credit.length_penalty import LengthPenaltyOptions
from trainer.credit.reward_norm import RewardNormOptions
from trainer.credit.sample_masks import MaskOptions
from trainer.credit.sample_weights import WeightOptions
from trainer.kl_control import KlControl
from trainer.update.loss import LossOptions, PolicyLoss

START = len(PROMPT)


def credit(scored, options, batch=None, state=None, step=0, **tokens):
    """Rows of advantages (prompts stripped), the batch and the metrics; `tokens` are rows of response values."""
    batch = batch or batch_of(scored)
    for name, rows in tokens.items():
        batch.tokens[name] = torch.tensor([v for row in rows for v in [0.0] * START + list(row)])
    metrics = assign_credit(batch, scored, options, state or CreditState(options), step=step)
    return [row[START:].tolist() for row in batch.rows(batch.tokens["advantages"])], batch, metrics


def firsts(scored, options, **kwargs):
    return [row[0] for row in credit(scored, options, **kwargs)[0]]


def test_plain_grpo():
    scored = [one("a", 1.0), one("b", 5.0), one("a", 0.0), one("a", 0.0), one("b", 3.0), one("a", 0.0)]
    rows, batch, metrics = credit(scored, CreditOptions())
    expected = [1.499997, 0.707106, -0.499999, -0.499999, -0.707106, -0.499999]
    assert [row[0] for row in rows] == pytest.approx(expected, abs=1e-6)
    assert batch.tokens["loss_mask"].tolist() == [0, 0, 1, 1] * 6
    assert "loss_weights" not in batch.samples
    assert (metrics["actor/samples_used"].value, metrics["actor/final_mask_ratio"].value) == (6, 1.0)


REINFORCE = AdvantageOptions(gamma=1.0)


@settings(max_examples=40)
@given(
    st.lists(st.tuples(st.floats(-3, 3), st.integers(1, 4), st.sampled_from("abc")), min_size=2, max_size=9),
    st.sampled_from(["zero", "reward"]),
)
def test_reinforce_with_group_statistics_is_grpo(rows, singleton):
    scored = [one(uid, score, length=length) for score, length, uid in rows]
    advantage = AdvantageOptions(singleton=singleton)
    norm = RewardNormOptions("group", "group", singleton=singleton)
    one_way = credit(scored, CreditOptions("grpo", advantage))[0]
    other = credit(scored, CreditOptions("reinforce", advantage, norm))[0]
    for left, right in zip(one_way, other, strict=True):
        assert right == pytest.approx(left, abs=1e-6)


def test_running_moments_live_in_the_state_and_in_the_checkpoint():
    options = CreditOptions("reinforce", REINFORCE, RewardNormOptions("running", "running"))
    state = CreditState(options)
    first = firsts([one("a", score) for score in (1.0, 0.0, 1.0, 1.0)], options, state=state)
    assert first == pytest.approx([0.5, -1.5, 0.5, 0.5], abs=4e-6)
    resumed = CreditState(options)
    resumed.load_state_dict(json.loads(json.dumps(state.state_dict())))
    second = firsts([one("a", 0.0)] * 4, options, state=resumed)
    assert second == pytest.approx([-0.724567] * 4, abs=2e-6)
    fresh = firsts([one("b", 0.0, domain="code")] * 4, options, state=resumed)  # domains do not mix
    assert fresh == [0.0] * 4


def kl_options(norm=None, **control):
    reward_kl = RewardKl("kl+", KlControl(**control))
    return CreditOptions("reinforce", REINFORCE, norm or RewardNormOptions(), reward_kl=reward_kl)


def test_kl_in_the_reward():
    """A plus changes nothing here; the reward of a token is what is left of it, its advantage the sum from there on."""
    tokens = dict(old_log_probs=[[-1.0, -2.0]], ref_log_probs=[[-1.5, -1.8]])
    rows, _, metrics = credit([one(score=1.0)], kl_options(kl_coef=0.1), **tokens)
    assert rows[0] == pytest.approx([-0.05 + 1.02, 1.02])
    assert metrics["actor/reward_kl_penalty"].value == pytest.approx(0.15)
    assert metrics["actor/reward_kl_penalty_coeff"].value == 0.1
    assert metrics["critic/rewards/mean"].value == pytest.approx(0.97)


def test_every_token_reward_is_clipped_again():
    tokens = dict(old_log_probs=[[-1.0, -2.0]], ref_log_probs=[[-7.0, -2.0]])
    options = kl_options(RewardNormOptions(clip=0.5), kl_coef=0.1)
    rows, _, metrics = credit([one(score=1.0)], options, **tokens)
    assert rows[0] == pytest.approx([-0.5 + 0.5, 0.5])  # -0.6 and the clipped 0.5
    assert metrics["critic/token_reward_clip_frac"].value == 0.5
    assert metrics["critic/reward_clip_frac"].value == 1.0


def test_the_coefficient_moves_after_its_use_and_is_saved():
    options = kl_options(type="adaptive", kl_coef=0.1, target_kl=0.1, horizon=10000)
    state, tokens = CreditState(options), dict(old_log_probs=[[-1.0, -1.0]] * 4, ref_log_probs=[[-1.2, -1.2]] * 4)
    used = [credit([one()] * 4, options, state=state, **tokens)[2] for _ in range(2)]
    coefficients = [metrics["actor/reward_kl_penalty_coeff"].value for metrics in used]
    assert coefficients == [0.1, pytest.approx(0.1 * (1 + 0.2 * 4 / 10000), rel=1e-12)]
    resumed = CreditState(options)
    resumed.load_state_dict(json.loads(json.dumps(state.state_dict())))
    assert resumed.kl.coefficient(2) == state.kl.coefficient(2) > coefficients[1]


def test_the_scheduled_coefficient_depends_on_completed_updates():
    options = kl_options(type="schedule", schedule=((0, 0.05), (300, 0.01)))
    tokens = dict(old_log_probs=[[-1.0, -1.0]], ref_log_probs=[[-1.2, -1.2]])
    for step, value in ((0, 0.05), (299, 0.05), (300, 0.01)):
        metrics = credit([one()], options, step=step, **tokens)[2]
        assert metrics["actor/reward_kl_penalty_coeff"].value == value


def test_masked_samples_stay_in_the_statistics():
    scored = [one(score=1.0), one(score=0.0, finish="length")]
    rows, batch, metrics = credit(scored, CreditOptions(masks=MaskOptions(max_len=True)))
    assert rows[0][0] == pytest.approx(0.707106, abs=1e-6) and rows[1] == [0.0, 0.0]
    assert batch.tokens["loss_mask"].tolist() == [0, 0, 1, 1, 0, 0, 0, 0]
    assert batch.tokens["response_mask"].tolist() == [0, 0, 1, 1] * 2
    assert metrics["actor/final_mask_ratio"].value == metrics["actor/max_len_mask_ratio"].value == 0.5
    assert metrics["actor/samples_used"].value == 1


def test_rejected_and_uncounted_samples_leave_the_statistics():
    """Row 0 loses its reward token to rejection, row 2 was aborted: row 1 is alone, nobody has an advantage."""
    scored = [one(score=1.0), one(score=0.0), one(score=9.0, finish="abort")]
    options = CreditOptions(correction=CorrectionOptions(rejections=(Rejection("token_k1", 1.4, 0.6),)))
    tokens = dict(
        rollout_log_probs=[[-1.0, -1.0], [-1.0, -1.0], [-1.0, -1.0]],
        old_log_probs=[[-1.0, -3.0], [-1.0, -1.1], [-1.0, -1.0]],
    )
    rows, batch, metrics = credit(scored, options, **tokens)
    assert rows == [[0.0, 0.0]] * 3
    assert batch.tokens["loss_mask"].tolist() == [0, 0, 1, 0, 0, 0, 1, 1, 0, 0, 0, 0]
    assert metrics["critic/singleton_groups"].value == 1
    assert metrics["critic/samples_outside_baseline"].value == 2
    assert "rollout_corr/kl" in metrics


def test_importance_weights_are_handed_to_the_loss():
    options = CreditOptions(correction=CorrectionOptions(weights=WeightRule("token", 2.0)))
    tokens = dict(rollout_log_probs=[[-2.0, -1.0]], old_log_probs=[[-1.0, -1.0]])
    _, batch, _ = credit([one()], options, **tokens)
    assert batch.tokens["rollout_is_weights"][START:].tolist() == [2.0, 1.0]


def test_a_domain_is_whitened_for_itself():
    scored = [one(str(i), score, domain=d) for i, (score, d) in enumerate([(1, "x"), (0, "x"), (50, "y"), (0, "y")])]
    advantage = AdvantageOptions(whiten_advantages=True, whiten_scope="domain")
    values = firsts(scored, CreditOptions("reinforce", advantage))
    assert values == pytest.approx([math.sqrt(0.75), -math.sqrt(0.75)] * 2, abs=1e-5)  # two tokens each


def test_the_price_of_length_survives_normalisation():
    scored = [one(length=n) for n in (1, 2, 5)]  # all right: grpo alone gives 0
    penalty = LengthPenaltyOptions(0.5, max_len=5, free_len=1, stage="advantage")
    values = firsts(scored, CreditOptions(length_penalty=penalty))
    assert values == pytest.approx([0.208333, 0.083333, -0.291667], abs=1e-6)
    paid = LengthPenaltyOptions(0.5, max_len=5, free_len=1, stage="reward")
    assert firsts(scored, CreditOptions(length_penalty=paid)) == [0.0] * 3  # it acted on the scores


def test_sample_weights_have_mean_one_over_what_learns():
    lengths = [(10, "stop"), (20, "stop"), (30, "stop"), (90, "length")]
    scored = [one(str(n), length=n, finish=finish) for n, finish in lengths]
    options = CreditOptions(masks=MaskOptions(max_len=True), weights=WeightOptions(length=True))
    _, batch, metrics = credit(scored, options)
    assert batch.samples["loss_weights"].tolist() == pytest.approx([1.5, 1.0, 0.5, 1.0])
    assert metrics["actor/sample_weights_mean"].value == pytest.approx(1.0)


def test_everything_masked_is_a_step_without_learning():
    options = CreditOptions(
        "gae",
        AdvantageOptions(whiten_advantages=True, advantage_clip=1.0),
        RewardNormOptions("batch", "batch", clip=1.0),
        masks=MaskOptions(max_len=True),
        weights=WeightOptions(length=True),
    )
    scored = [one(finish="length"), one(finish="abort", length=0)]
    _, batch, metrics = credit(scored, options, values=[[0.5, 0.5], []])
    assert not batch.tokens["loss_mask"].any() and not batch.tokens["advantages"].any()
    assert metrics["actor/samples_used"].value == 0
    assert all(math.isfinite(metric.value) for metric in metrics.values())


ALL = CreditOptions(
    "gae",
    AdvantageOptions(gamma=0.9, lam=0.8, advantage_clip=1.5),
    RewardNormOptions("batch", "running", clip=2.0),
    CorrectionOptions(WeightRule("sequence", 2.0), rejections=(Rejection("token_k1", 2.5, 0.4),)),
    MaskOptions(max_len=True, difficulty=(0.1, 0.9), error_max_len=4),
    RewardKl("k3", KlControl(kl_coef=0.1)),
    LengthPenaltyOptions(0.3, max_len=5, stage="advantage"),
    WeightOptions("pass_rate", length=True),
)
NAMES = ("old_log_probs", "rollout_log_probs", "ref_log_probs", "values")


def random_step(count=12, seed=0):
    rng = torch.Generator().manual_seed(seed)

    def draw(high):
        return int(torch.randint(high, (1,), generator=rng))

    scored = [
        one(
            "abc"[i % 3],
            acc=float(draw(2)),
            score=draw(5) / 4,
            length=1 + draw(5),
            finish=("stop", "length")[draw(5) == 0],
        )
        for i in range(count)
    ]
    batch = batch_of(scored)
    for name in NAMES:
        batch.tokens[name] = -torch.rand(batch.num_tokens, generator=rng)
    return scored, batch


def outputs(batch):
    tokens = [batch.tokens[name] for name in ("advantages", "returns", "loss_mask", "rollout_is_weights")]
    return [torch.stack(row) for row in zip(*(batch.rows(each) for each in tokens), strict=True)]


@settings(max_examples=25)
@given(st.integers(0, 50), st.permutations(range(12)))
def test_the_order_of_samples_does_not_matter(seed, order):
    scored, batch = random_step(seed=seed)
    shuffled = batch.select(order)
    assign_credit(batch, scored, ALL, CreditState(ALL), step=0)
    assign_credit(shuffled, [scored[i] for i in order], ALL, CreditState(ALL), step=0)
    for found, i in zip(outputs(shuffled), order, strict=True):
        torch.testing.assert_close(found, outputs(batch)[i], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(shuffled.samples["loss_weights"], batch.samples["loss_weights"][list(order)])


@pytest.mark.parametrize("filler", [math.nan, math.inf, 1e30])
def test_what_stands_outside_the_response_reaches_nothing(filler):
    scored, clean = random_step()
    _, dirty = random_step()
    outside_T = ~dirty.tokens["response_mask"].bool()
    for name in NAMES:
        dirty.tokens[name][outside_T] = filler
    states = CreditState(ALL), CreditState(ALL)
    one_way = assign_credit(clean, scored, ALL, states[0], step=0)
    other = assign_credit(dirty, scored, ALL, states[1], step=0)
    for name in ("advantages", "returns", "loss_mask"):
        assert torch.equal(clean.tokens[name], dirty.tokens[name])
    assert torch.equal(clean.samples["loss_weights"], dirty.samples["loss_weights"])
    assert {name: metric.value for name, metric in one_way.items()} == {n: m.value for n, m in other.items()}
    assert clean.tokens["advantages"].any()


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"])
@pytest.mark.parametrize("cut", ["one each", "two ranks", "three ranks"])
def test_no_split_changes_the_loss(mode, cut):
    """Weights and advantages are those of the whole batch, so the shares of any cut add up to one loss."""
    scored, batch = random_step()
    assign_credit(batch, scored, ALL, CreditState(ALL), step=0)
    loss, counts = PolicyLoss(LossOptions(loss_agg_mode=mode)), denominators(batch)
    batch.tokens["log_probs"] = batch.tokens["old_log_probs"] + 0.1

    def value(part: TrainBatch) -> float:
        return float(loss(PolicyOutput(part.tokens["log_probs"]), part, counts)[0])

    whole = value(batch)
    cuts = {"one each": [[row] for row in range(12)], "two ranks": balance(batch.lengths, 2)}
    cuts["three ranks"] = balance(batch.lengths, 3)
    assert sum(value(part) for part in scatter(batch, cuts[cut])) == pytest.approx(whole, rel=1e-5)
    assert abs(whole) > 1e-3
