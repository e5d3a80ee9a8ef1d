"""Advantages against numbers worked out by hand."""

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.batch import TrainBatch
from trainer.credit.advantage import (
    ADVANTAGES,
    AdvantageInput,
    AdvantageOptions,
    compute_advantages,
    find_estimator,
    whiten,
)

PROMPT = 2


def make_batch(lengths, **tokens):
    """One prompt of two tokens before every response; extra rows speak about the response."""
    sequences = [[1] * (PROMPT + length) for length in lengths]
    padded = {name: [[0.0] * PROMPT + list(row) for row in rows] for name, rows in tokens.items()}
    padded.setdefault("loss_mask", [[0.0] * PROMPT + [1.0] * length for length in lengths])
    return TrainBatch.pack(sequences, **padded)


def per_sample(name, scores, uids, lengths=None, **options):
    """First model token's advantage of each sample; checks that every model token carries it."""
    lengths = lengths or [2] * len(scores)
    batch = make_batch(lengths)
    result = compute_advantages(name, AdvantageInput.from_batch(batch, scores, uids), AdvantageOptions(**options))
    values = []
    for row in batch.rows(result.advantages_T):
        assert torch.equal(row[:PROMPT], torch.zeros(PROMPT))
        assert (row[PROMPT:] == row[PROMPT]).all()
        values.append(row[PROMPT].item())
    return values


def per_token(name, rewards, lengths, uids, options=None, **extras):
    """Token advantages and returns with hand-made token rewards; prompts stripped."""
    batch = make_batch(lengths, **extras)
    samples = AdvantageInput.from_batch(batch, [0.0] * len(lengths), uids)
    rewards_T = torch.tensor([r for row in rewards for r in [0.0] * PROMPT + row], dtype=torch.float64)
    samples = AdvantageInput(**{**vars(samples), "rewards_T": rewards_T})
    result = compute_advantages(name, samples, options or AdvantageOptions())
    strip = [[round(v, 6) for v in row[PROMPT:].tolist()] for row in batch.rows(result.advantages_T)]
    return strip, [row[PROMPT:].tolist() for row in batch.rows(result.returns_T)]


A_B = ([1, 5, 0, 0, 3, 0], ["a", "b", "a", "a", "b", "a"])  # a: 1 0 0 0, b: 5 3, interleaved


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("grpo", {}, [1.499997, 0.707106, -0.499999, -0.499999, -0.707106, -0.499999]),
        ("grpo", {"norm_adv_by_std_in_grpo": False}, [0.75, 1, -0.25, -0.25, -1, -0.25]),
        ("rloo", {}, [1, 2, -1 / 3, -1 / 3, -2, -1 / 3]),
    ],
)
def test_groups_follow_uids_not_positions(name, options, expected):
    assert per_sample(name, *A_B, **options) == pytest.approx(expected, abs=1e-6)


def test_grpo_half_right():
    assert per_sample("grpo", [1, 1, 0, 0], "aaaa") == pytest.approx([0.866024] * 2 + [-0.866024] * 2, abs=1e-6)


def test_opo_weights_the_baseline_by_length():
    values = per_sample("opo", [1, 0, 0], "aaa", lengths=[2, 4, 6])
    assert values == pytest.approx([0.833333, -0.166667, -0.166667], abs=1e-6)


def test_gpg_scales_by_samples_with_signal_not_by_correct_answers():
    values = per_sample("gpg", [1, 0, 0, 0, 1, 1, 1, 1], "aaaabbbb")
    assert values == pytest.approx([1.5, -0.5, -0.5, -0.5, 0, 0, 0, 0])
    assert per_sample("gpg", [1, 1, 0, 0], "aabb") == [0, 0, 0, 0]
    assert per_sample("gpg", [1, 0], "aa", f_norm=2.0) == pytest.approx([0.25, -0.25])


def test_passk_rewards_the_lead_of_the_best():
    assert per_sample("grpo_passk", [0, 1, 0.25, 0], "aaaa") == pytest.approx([0, 1.584808, 0, 0], abs=1e-6)
    assert per_sample("grpo_passk", [1, 0.25, 0, 0], "aaaa", norm_adv_by_std_in_grpo=False) == [0.75, 0, 0, 0]
    assert per_sample("grpo_passk", [1, 1, 0, 0], "aaaa") == [0, 0, 0, 0]
    with pytest.raises(ValueError, match=r"rollout\.n"):
        per_sample("grpo_passk", [1.0], "a", singleton="reward")


def test_reinforce_plus_plus_discounts_and_whitens():
    rewards, options = [[0.0, 0.0, 1.0], [0.0, -1.0]], AdvantageOptions(gamma=0.9)
    advantages, returns = per_token("reinforce_plus_plus", rewards, [3, 2], "ab", options)
    assert returns[0] == pytest.approx([0.81, 0.9, 1]) and returns[1] == pytest.approx([-0.9, -1])
    assert advantages[0] == pytest.approx([0.636574, 0.724987, 0.823224], abs=1e-6)
    assert advantages[1] == pytest.approx([-1.043274, -1.141511], abs=1e-6)


def test_gae_whitens_advantages_and_not_returns():
    options = AdvantageOptions(gamma=1.0, lam=0.95)
    values = {"values": [[0.5, 0.4, 0.8]]}
    advantages, returns = per_token("gae", [[0.0, 0.0, 1.0]], [3], "a", options, **values)
    assert advantages[0] == pytest.approx([0.219836, 0.871792, -1.091628], abs=1e-6)
    assert returns[0] == pytest.approx([0.9605, 0.99, 1.0])


def test_gae_in_plain_recursion():
    """Rows of different length against the definition, with a discount."""
    gamma, lam = 0.9, 0.8
    rewards, values = [[0.0, 0.3, 1.0], [-1.0]], [[0.5, 0.4, 0.8], [0.25]]
    _, returns = per_token("gae", rewards, [3, 1], "ab", AdvantageOptions(gamma=gamma, lam=lam), values=values)
    for r, v, found in zip(rewards, values, returns, strict=True):
        later, expected = 0.0, []
        for t in reversed(range(len(r))):
            later = r[t] + gamma * (v[t + 1] if t + 1 < len(v) else 0.0) - v[t] + gamma * lam * later
            expected.insert(0, later + v[t])
        assert found == pytest.approx(expected, abs=1e-6)


def test_gae_skips_tokens_of_tools_whatever_the_critic_says_there():
    """The same three model tokens with an observation between them."""
    extras = {"loss_mask": [[1, 0, 1, 1]], "values": [[0.5, math.nan, 0.4, 0.8]]}
    options = AdvantageOptions(gamma=1.0, lam=0.95)
    advantages, returns = per_token("gae", [[0.0, 0.0, 0.0, 1.0]], [4], "a", options, **extras)
    assert advantages[0] == pytest.approx([0.219836, 0, 0.871792, -1.091628], abs=1e-6)
    assert returns[0] == pytest.approx([0.9605, 0, 0.99, 1.0])


def test_gae_teaches_the_critic_nothing_from_a_lost_reward():
    """The reward-carrying token was rejected: the other token has advantage 0 and the critic's own value as return."""
    tokens = dict(loss_mask=[[1, 0], [1, 1]], rs_mask=[[1, 0], [1, 1]], response_mask=[[1, 1], [1, 1]])
    batch = make_batch([2, 2], values=[[0.25, 0.5], [0.0, 0.0]], **tokens)
    samples = AdvantageInput.from_batch(batch, [9.0, 1.0], ["a", "b"])
    result = compute_advantages("gae", samples, AdvantageOptions(gamma=1.0, lam=1.0))
    assert result.advantages_T[PROMPT : PROMPT + 2].tolist() == [0.0, 0.0]
    assert result.returns_T[PROMPT : PROMPT + 2].tolist() == [0.25, 0.0]
    assert result.metrics["critic/values/max"].value == 0.25


def test_reinforce_discounts_over_model_tokens():
    values = per_token("reinforce", [[0.0, 0.0, 1.0], [0.0, -1.0]], [3, 2], "ab", AdvantageOptions(gamma=0.9))
    assert values[0][0] == pytest.approx([0.81, 0.9, 1]) and values[0][1] == pytest.approx([-0.9, -1])


def test_whitening_and_the_clip_of_any_estimator():
    """Advantages +1 on four tokens, -1 on one."""
    options = {"whiten_advantages": True, "advantage_clip": 1.5}
    values = per_sample("reinforce", [1.0, -1.0], "ab", lengths=[4, 1], **options)
    assert values == pytest.approx([0.447214, -1.5], abs=1e-6)
    batch = make_batch([4, 1])
    samples = AdvantageInput.from_batch(batch, [1.0, -1.0], "ab")
    metrics = compute_advantages("reinforce", samples, AdvantageOptions(**options)).metrics
    assert metrics["critic/advantage_clip_frac"].value == 0.2
    assert per_sample("reinforce", [1.0, -1.0], "ab", lengths=[4, 1], whiten_advantages=True)[1] == pytest.approx(
        -1.788854, abs=1e-6
    )
    assert per_sample("reinforce", [3.0], "a", advantage_clip=0.0) == [3.0]  # 0 is off


def test_the_shift_comes_after_whitening_and_before_the_clip():
    batch = make_batch([4, 1])
    samples = AdvantageInput.from_batch(batch, [1.0, -1.0], "ab")
    samples = AdvantageInput(**{**vars(samples), "shift": (-0.447214, -5.0)})
    options = AdvantageOptions(whiten_advantages=True, advantage_clip=2.0)
    advantages_T = compute_advantages("reinforce", samples, options).advantages_T
    assert advantages_T[PROMPT].item() == pytest.approx(0.0, abs=1e-6) and advantages_T[-1].item() == -2.0


def test_time_skips_tokens_of_tools():
    """Four positions, the second and third are an observation: gamma acts once."""
    extras = {"loss_mask": [[1, 0, 0, 1], [1, 0, 0, 1]]}
    options = AdvantageOptions(gamma=0.5)
    _, returns = per_token("reinforce_plus_plus", [[0.0, 0, 0, 1]] * 2, [4, 4], "ab", options, **extras)
    assert returns[0] == [0.5, 0, 0, 1]


def test_whitening_over_tokens_lets_long_samples_weigh_more():
    values = per_sample("reinforce_plus_plus_baseline", [1, 0], "aa", lengths=[3, 1])
    assert values == pytest.approx([0.5, -1.5], abs=1e-6)


def test_remax_subtracts_the_greedy_score():
    batch = make_batch([3])
    samples = AdvantageInput.from_batch(batch, [1.0], ["a"], greedy_scores=[0.25])
    result = compute_advantages("remax", samples, AdvantageOptions())
    assert result.advantages_T.tolist() == [0, 0, 0.75, 0.75, 0.75]
    assert result.returns_T.tolist() == [0, 0, 1, 1, 1]


def test_remax_without_a_greedy_answer_drops_the_prompt():
    batch = make_batch([2, 2, 2])
    samples = AdvantageInput.from_batch(batch, [1.0, 0.0, 1.0], "aab", greedy_scores=[None, None, 0.25])
    result = compute_advantages("remax", samples, AdvantageOptions())
    assert samples.baseline == (False, False, True)
    assert result.advantages_T.tolist() == [0] * 8 + [0, 0, 0.75, 0.75]


def test_optimal_token_baseline_with_a_lone_tail():
    log = [[math.log(p) for p in row] for row in ([0.5, 0.8, 0.9], [0.5, 0.5])]
    advantages, returns = per_token(
        "optimal_token_baseline",
        [[0.0, 0, 1], [0.0, 0]],
        [3, 2],
        "aa",
        old_log_probs=log,
        sum_pi_squared=[[0.4, 0.66, 0.815], [0.4, 0.5]],
    )
    assert advantages[0] == pytest.approx([0.5, 0.661765, 1.0], abs=1e-6)
    assert advantages[1] == pytest.approx([-0.5, -0.338235], abs=1e-6)
    assert returns == [[1, 1, 1], [0, 0]]


def test_optimal_token_baseline_is_zero_for_equal_rewards_and_survives_certain_tokens():
    certain = {"old_log_probs": [[0.0, -0.3]] * 2, "sum_pi_squared": [[1.0, 0.6]] * 2}
    advantages, _ = per_token("optimal_token_baseline", [[0.0, 0.1]] * 2, [2, 2], "aa", **certain)
    assert advantages == [[0, 0], [0, 0]]
    advantages, _ = per_token("optimal_token_baseline", [[0.0, 1.0], [0.0, 0.0]], [2, 2], "aa", **certain)
    assert advantages == [[0.5, 0.5], [-0.5, -0.5]]


def test_a_sample_that_has_ended_no_longer_weighs_in_the_baseline():
    """At the second token two samples are left, both certain (weight 0): their plain mean is the baseline."""
    log = [[math.log(0.5)], [0.0, 0.0], [0.0, 0.0]]
    squares = [[0.5], [1.0, 1.0], [1.0, 1.0]]
    rewards = [[0.0], [0.0, 1.0], [0.0, 0.0]]
    advantages, _ = per_token(
        "optimal_token_baseline", rewards, [1, 2, 2], "aaa", old_log_probs=log, sum_pi_squared=squares
    )
    assert [row[1] for row in advantages[1:]] == [0.5, -0.5]


def test_group_means_do_not_depend_on_the_order_of_samples():
    """Plain summation gives 1 here, or 2, by the order; the sum is 2."""
    scores = [1e16, 1.0, -1e16, 1.0]
    values = per_sample("grpo", scores, "aaaa", norm_adv_by_std_in_grpo=False)
    assert values[1] == values[3] == 0.5


GROUP_ESTIMATORS = ["grpo", "rloo", "opo", "gpg", "grpo_passk", "reinforce_plus_plus_baseline"]


@pytest.mark.parametrize("name", GROUP_ESTIMATORS)
@pytest.mark.parametrize("value", [0.1, torch.tensor(0.1).item(), -7.7, 1e6, 0.7602257126352243])
def test_equal_rewards_give_exactly_zero(name, value):
    """The last value is one whose mean over seven samples rounds to another number."""
    assert per_sample(name, [value] * 7, ["a"] * 7, lengths=[1, 2, 3, 4, 5, 6, 7]) == [0.0] * 7


@pytest.mark.parametrize("name", sorted(set(GROUP_ESTIMATORS) - {"grpo_passk", "reinforce_plus_plus_baseline"}))
def test_singletons(name):
    assert per_sample(name, [1.0], ["a"], singleton="reward") == [1.0]
    assert per_sample(name, [1.0], ["a"], singleton="zero") == [0.0]


def test_a_sample_whose_reward_token_was_rejected_leaves_the_group():
    batch = make_batch([2, 2], loss_mask=[[1, 0], [1, 1]], rs_mask=[[1, 0], [1, 1]], response_mask=[[1, 1], [1, 1]])
    samples = AdvantageInput.from_batch(batch, [1.0, 0.0], ["a", "a"])
    assert samples.baseline == (False, True)
    result = compute_advantages("grpo", samples, AdvantageOptions())
    assert not result.advantages_T.any()
    assert result.metrics["critic/singleton_groups"].value == 1
    assert result.metrics["critic/samples_outside_baseline"].value == 1


def test_a_sample_without_model_tokens_has_no_reward():
    batch = make_batch([3, 3], loss_mask=[[0, 0, 0], [1, 1, 0]])
    samples = AdvantageInput.from_batch(batch, [10.0, 0.0], ["a", "a"])
    assert not samples.rewards_T.any() and samples.baseline == (False, True)
    assert not compute_advantages("grpo", samples, AdvantageOptions()).advantages_T.any()


@pytest.mark.parametrize("missing", [None, math.nan])
def test_a_missing_score_leaves_the_group(missing):
    assert per_sample("rloo", [1.0, missing, 0.0], "aaa") == [1.0, 0.0, -1.0]
    # and whitening must not move it away from 0
    assert per_sample("reinforce_plus_plus_baseline", [3.0, missing, 0.0], "aaa", lengths=[1, 2, 5])[1] == 0.0


def test_filtered_samples_stay_in_the_baseline_but_learn_nothing():
    batch = make_batch([2, 2], loss_mask=[[0, 0], [1, 1]], response_mask=[[1, 1], [1, 1]])
    samples = AdvantageInput.from_batch(batch, [1.0, 0.0], ["a", "a"])
    result = compute_advantages("grpo", samples, AdvantageOptions(norm_adv_by_std_in_grpo=False))
    assert result.advantages_T.tolist() == [0, 0, 0, 0, 0, 0, -0.5, -0.5]


def test_the_score_sits_on_the_last_model_token():
    batch = make_batch([4], loss_mask=[[1, 1, 1, 0]])
    assert AdvantageInput.from_batch(batch, [0.5], ["a"]).rewards_T.tolist() == [0, 0, 0, 0, 0.5, 0]


def test_whiten_edge_cases():
    one = torch.tensor([3.0, 9.0], dtype=torch.float64)
    assert whiten(one, torch.tensor([True, False])).tolist() == [3.0, 0.0]
    assert whiten(torch.full((3,), 0.1, dtype=torch.float64), torch.ones(3, dtype=torch.bool)).tolist() == [0, 0, 0]


def test_whitening_per_domain():
    batch = make_batch([1, 1, 1, 1])
    samples = AdvantageInput.from_batch(batch, [1.0, 0.0, 50.0, 0.0], list("abcd"), domains=list("xxyy"))
    result = compute_advantages("reinforce_plus_plus", samples, AdvantageOptions(whiten_scope="domain"))
    half = math.sqrt(0.5)
    assert result.advantages_T[2::3].tolist() == pytest.approx([half, -half, half, -half], abs=1e-5)


def test_metrics_describe_valid_tokens():
    batch = make_batch([3, 1])
    samples = AdvantageInput.from_batch(batch, [1.0, 0.0], ["a", "a"])
    metrics = compute_advantages("reinforce_plus_plus_baseline", samples, AdvantageOptions()).metrics
    assert metrics["critic/raw_advantages/mean"].value == 0.25  # 3 x .5 and 1 x -.5
    assert metrics["critic/advantages/mean"].value == pytest.approx(0.0)
    assert metrics["critic/advantages/min"].value == pytest.approx(-1.5, abs=1e-6)
    assert (metrics["critic/rewards/mean"].value, metrics["critic/rewards/max"].value) == (0.5, 1.0)
    assert metrics["critic/equal_reward_groups"].value == 0


NEEDS = {
    "values": [[0.5, 0.2, 0.1], [0.3, 0.4, 0.0], [0.1, 0.2, 0.3]],
    "old_log_probs": [[-0.5, -0.2, -0.1], [-0.3, -0.4, -0.9], [-0.1, -0.2, -0.3]],
    "sum_pi_squared": [[0.5, 0.7, 0.8], [0.6, 0.5, 0.4], [0.9, 0.7, 0.6]],
}


@pytest.mark.parametrize("name", sorted(ADVANTAGES))
def test_what_stands_at_masked_positions_reaches_nothing(name):
    """Prompts and tool tokens full of nan; the numbers of the model tokens stay as they were."""
    model = [[1, 0, 1], [1, 1, 0], [1, 1, 1]]

    def run(filler):
        masked = {
            key: [[v if m else filler for v, m in zip(*pair, strict=True)] for pair in zip(rows, model, strict=True)]
            for key, rows in NEEDS.items()
        }
        batch = make_batch([3, 3, 3], loss_mask=model, **masked)
        for key in NEEDS:
            batch.tokens[key].view(3, -1)[:, :PROMPT] = filler
        samples = AdvantageInput.from_batch(batch, [1.0, 0.0, 0.5], "aaa", greedy_scores=[0.2] * 3)
        return compute_advantages(name, samples, AdvantageOptions(gamma=0.9, lam=0.9))

    dirty, clean = run(math.nan), run(0.0)
    assert torch.equal(dirty.advantages_T, clean.advantages_T) and dirty.advantages_T.abs().sum() > 0
    assert torch.equal(dirty.returns_T, clean.returns_T)


def double_rewards(samples, options):
    values_T = samples.broadcast([2 * reward for reward in samples.rewards])
    return values_T, values_T


def test_custom_estimator_by_module_and_function():
    assert per_sample("tests.trainer.test_advantage:double_rewards", [1.5, 0.0], "ab") == [3.0, 0.0]


@pytest.mark.parametrize("name", ["grop", "no.such.module:f", "trainer.credit.advantage:no_such_function"])
def test_unknown_estimators_fail_by_name(name):
    with pytest.raises(ValueError, match=name.replace(".", r"\.")):
        find_estimator(name)


@settings(max_examples=40)
@given(
    st.lists(st.tuples(st.floats(-3, 3), st.integers(1, 5), st.sampled_from("abc")), min_size=2, max_size=12),
    st.randoms(),
)
def test_the_order_of_samples_does_not_matter(rows, rng: random.Random):
    order = rng.sample(range(len(rows)), len(rows))
    for name in sorted(set(ADVANTAGES) - {"gae", "remax", "optimal_token_baseline", "tir_optimal_token_baseline"}):
        one = per_sample_rows(name, rows)
        two = per_sample_rows(name, [rows[i] for i in order])
        for place, i in enumerate(order):
            if name in GROUP_ESTIMATORS[:5]:
                assert torch.equal(two[place], one[i])
            else:
                torch.testing.assert_close(two[place], one[i], rtol=1e-5, atol=1e-6)


def per_sample_rows(name, rows):
    scores, lengths, uids = zip(*rows, strict=True)
    batch = make_batch(list(lengths))
    result = compute_advantages(name, AdvantageInput.from_batch(batch, scores, uids), AdvantageOptions())
    return batch.rows(result.advantages_T)


@settings(max_examples=30)
@given(st.lists(st.integers(0, 5), min_size=2, max_size=8), st.floats(0.5, 50), st.floats(-10, 10))
def test_grpo_with_std_ignores_the_scale_of_rewards(scores, scale, shift):
    one = per_sample("grpo", scores, ["a"] * len(scores))
    two = per_sample("grpo", [scale * score + shift for score in scores], ["a"] * len(scores))
    assert two == pytest.approx(one, abs=2e-5)
