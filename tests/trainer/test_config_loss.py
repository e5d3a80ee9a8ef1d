"""Options of losses, correction and the KL coefficient: refused where wrong or unread, and handed on as meant."""

import pytest

from tests.trainer.config_bench import ACTOR, ROLLOUT, errors, load
from trainer import wiring
from trainer.config.thresholds import BadBounds, rejection_bounds, weight_bounds
from trainer.credit.correction import CorrectionOptions, Rejection
from trainer.credit.importance import WeightRule
from trainer.wiring_loss import clip_text, correction_options, leaves_out_old_pass, loss_kl, loss_options

LOSS, CORRECTION, CONTROL = f"{ACTOR}.policy_loss", "algorithm.rollout_correction", "algorithm.kl_ctrl"
ONE_STEP = ("data.train_batch_size=8", f"{ACTOR}.ppo_mini_batch_size=8")
BYPASS = f"{CORRECTION}.bypass_mode=True"
NO_LOG_PROBS = f"{ROLLOUT}.calculate_log_probs=False"


@pytest.mark.parametrize(
    ("value", "expected"), [(2.0, (None, 2)), ("2.0", (None, 2)), ("0.5_2", (0.5, 2)), ("0_1.5", (0, 1.5))]
)
def test_weight_bounds(value, expected):
    assert weight_bounds(value) == expected


@pytest.mark.parametrize("value", [None, 0.0, -1.0, "2_0.5", "a", "1_2_3", "", "-1_2", True])
def test_bounds_that_are_none(value):
    with pytest.raises(BadBounds):
        weight_bounds(value)


def test_rejection_bounds():
    both = [("token_k1", (0.5, 2.0)), ("seq_sum_k1", (0.5, 2.0))]
    assert rejection_bounds("token_k1, seq_sum_k1", 2.0) == both == rejection_bounds("token_k1,seq_sum_k1", "0.5_2,2")
    assert rejection_bounds("token_k1,seq_max_k2", "0.5_4.0,0.1") == [
        ("token_k1", (0.5, 4.0)),
        ("seq_max_k2", (None, 0.1)),
    ]


@pytest.mark.parametrize(
    ("rules", "thresholds", "expected"),
    [
        ("token_k4", 2.0, "comma-joined list"),
        ("seq_max_k1", 2.0, "comma-joined list"),
        ("token_k1,token_k1", 2.0, "at most once"),
        ("token_k1,token_k3,seq_sum_k3", "2.0,0.1", "one for each of"),
        ("token_k1", 0.5, "above 1"),
        ("token_k3", "0.1_0.5", "upper bound"),
        ("token_k3", 0.0, "upper bound"),
        ("token_k3", None, "a number"),
    ],
)
def test_rejection_bounds_that_are_none(rules, thresholds, expected):
    with pytest.raises(BadBounds, match=expected):
        rejection_bounds(rules, thresholds)


def test_loss_options_arrive(tmp_path):
    more = (f"{LOSS}.loss_mode=clip-cov", f"{LOSS}.clip_cov_ratio=0.01", f"{LOSS}.clip_cov_lb=0.5", "trainer.seed=7")
    config = load(tmp_path, *more, f"{ACTOR}.length_loss.coef=0.2", f"{ACTOR}.length_loss.free_len=10").config
    options = loss_options(config)
    assert (options.loss_mode, options.clip_cov_ratio, options.clip_cov_lb) == ("clip_cov", 0.01, 0.5)
    assert (options.length_loss_coef, options.seed) == (0.2, 7)
    assert not options.bypass and not options.old_is_current
    own = load(tmp_path, f"{LOSS}.loss_mode=tests.trainer.test_loss_terms:own_loss").config
    assert loss_options(own).loss_mode == "tests.trainer.test_loss_terms:own_loss"


def test_the_clip_interval_is_said(tmp_path):
    """0.1 and 1.1 are distances: [0.9, 2.1], not [0.1, 1.1]."""
    more = (f"{ACTOR}.clip_ratio_low=0.1", f"{ACTOR}.clip_ratio_high=1.1")
    said = clip_text(loss_options(load(tmp_path, *more).config))
    assert said == "loss_mode=vanilla: ratios are clipped to [0.9, 2.1], dual clip at 3"
    assert clip_text(loss_options(load(tmp_path, f"{LOSS}.loss_mode=gpg").config)) == "loss_mode=gpg"


@pytest.mark.parametrize(
    ("arguments", "id", "text"),
    [
        ((f"{LOSS}.loss_mode=vanila",), "algo.loss", "one of vanilla, gspo"),
        ((f"{LOSS}.clip_cov_ub=7",), "algo.unread", "clip_cov"),
        ((f"{LOSS}.ppo_kl_coef=1.0", f"{LOSS}.loss_mode=gspo"), "algo.unread", "kl_cov"),
        ((f"{ACTOR}.tau_pos=2.0",), "algo.unread", "sapo"),
        ((f"{LOSS}.dro_beta=0.2",), "algo.unread", "dro"),
        ((f"{LOSS}.loss_mode=kl_cov", f"{LOSS}.kl_cov_ratio=0"), "algo.loss", "share of tokens"),
        ((f"{LOSS}.loss_mode=clip_cov", f"{LOSS}.clip_cov_lb=6"), "algo.loss", "lower bound < upper bound"),
        ((f"{ACTOR}.length_loss.free_len=5",), "algo.unread", "length_loss.coef"),
        ((f"{ACTOR}.length_loss.coef=-0.1",), "algo.loss", "shortens"),
        (
            (f"{ACTOR}.length_loss.coef=1", f"{ACTOR}.length_loss.free_len=512", "data.max_response_length=512"),
            "algo.loss",
            "free_len < max_response_length",
        ),
        ((f"{ACTOR}.calculate_sum_pi_squared=True",), "algo.unread", "optimal_token_baseline"),
        (("algorithm.adv_estimator=optimal_token_baseline",), "algo.adv", "calculate_sum_pi_squared=True"),
        ((f"{CORRECTION}.rollout_is=token", NO_LOG_PROBS), "algo.corr", "calculate_log_probs=True"),
        ((f"{CORRECTION}.rollout_is_threshold=3.0",), "algo.unread", "rollout_is"),
        ((f"{CORRECTION}.rollout_rs_threshold=3.0",), "algo.unread", "rollout_rs"),
        ((f"{CORRECTION}.rollout_is_batch_normalize=True",), "algo.unread", "rollout_is"),
        ((f"{CORRECTION}.rollout_rs=token_k1",), "algo.corr", "a number"),
        ((f"{CORRECTION}.rollout_is=token", f"{CORRECTION}.rollout_is_threshold=2_1"), "algo.corr", "low < high"),
        ((f"{CORRECTION}.rollout_token_veto_threshold=1.5",), "algo.corr", "in (0, 1)"),
        ((f"{CORRECTION}.loss_type=reinforce",), "algo.unread", "bypass_mode=True"),
        ((BYPASS, f"{CORRECTION}.rollout_is=token"), "algo.corr", "against the rollout"),
        (
            (BYPASS, f"{CORRECTION}.rollout_rs=token_k3", f"{CORRECTION}.rollout_rs_threshold=1"),
            "not.built",
            "not built",
        ),
        ((BYPASS, f"{LOSS}.loss_mode=gspo"), "algo.corr", "vanilla"),
        ((f"{CONTROL}.type=schedule", f"{ACTOR}.use_kl_loss=True"), "algo.kl", "completed updates"),
        ((f"{CONTROL}.type=adaptive", f"{CONTROL}.horizon=0"), "algo.kl", "above 0"),
    ],
)
def test_wrong_and_unread_options_are_refused(tmp_path, arguments, id, text):
    assert text in errors(tmp_path, *arguments)[id]


def test_clips_that_a_loss_ignores_are_said(tmp_path):
    notices = load(tmp_path, f"{LOSS}.loss_mode=gspo", f"{ACTOR}.clip_ratio_c=10.0").notices
    assert any("clip_ratio_c" in notice and "no effect" in notice for notice in notices)


def test_correction_arrives(tmp_path):
    assert correction_options(load(tmp_path).config) is None
    more = (
        f"{CORRECTION}.rollout_is=sequence",
        f'{CORRECTION}.rollout_is_threshold="0.5_2"',
        f"{CORRECTION}.rollout_is_batch_normalize=True",
        f"{CORRECTION}.rollout_rs='token_k1,seq_mean_k3'",
        f'{CORRECTION}.rollout_rs_threshold="0.6_1.4,0.01"',
        f"{CORRECTION}.rollout_token_veto_threshold=1e-4",
    )
    assert correction_options(load(tmp_path, *more).config) == CorrectionOptions(
        weights=WeightRule("sequence", 2.0, 0.5),
        batch_normalize=True,
        rejections=(Rejection("token_k1", 1.4, 0.6), Rejection("seq_mean_k3", 0.01)),
        veto=1e-4,
    )


def test_bypass_leaves_out_the_old_pass_and_chooses_the_loss(tmp_path):
    config = load(tmp_path, BYPASS).config
    assert wiring.old_log_prob_options(config) is None and correction_options(config) == CorrectionOptions(bypass=True)
    assert loss_options(config).loss_mode == "vanilla" and loss_options(config).bypass
    assert not loss_options(config).old_is_current  # the batch has the rollout's
    more = (BYPASS, f"{CORRECTION}.loss_type=reinforce", f"{CORRECTION}.rollout_is=token")
    options = loss_options(load(tmp_path, *more).config)
    assert (options.loss_mode, options.rollout_weights) == ("bypass_reinforce", WeightRule("token", 2.0))


@pytest.mark.parametrize(
    ("more", "left_out"),
    [
        ((), True),
        ((f"{ACTOR}.reuse_old_log_probs=never",), False),
        ((f"{ROLLOUT}.calculate_log_probs=True",), False),
        (("data.train_batch_size=16",), False),
        ((f"{ACTOR}.ppo_epochs=2",), False),
        (("algorithm.use_kl_in_reward=True",), False),
        ((f"{LOSS}.loss_mode=kl_cov",), False),
        (("algorithm.adv_estimator=optimal_token_baseline", f"{ACTOR}.calculate_sum_pi_squared=True"), False),
    ],
)
def test_one_update_needs_no_old_pass_unless_somebody_reads_it(tmp_path, more, left_out):
    config = load(tmp_path, *ONE_STEP, NO_LOG_PROBS, *more).config
    assert leaves_out_old_pass(config) is left_out is loss_options(config).old_is_current
    assert (wiring.old_log_prob_options(config) is None) is left_out


def test_sum_pi_squared_is_asked_of_the_old_pass(tmp_path):
    assert not wiring.old_log_prob_options(load(tmp_path).config).sum_pi_squared
    more = ("algorithm.adv_estimator=optimal_token_baseline", f"{ACTOR}.calculate_sum_pi_squared=True")
    assert wiring.old_log_prob_options(load(tmp_path, *more).config).sum_pi_squared


def test_who_owns_the_kl_controller(tmp_path):
    schedule = (f"{CONTROL}.type=schedule", f"{CONTROL}.schedule=[[0,0.05],[300,0.01]]")
    loss = (f"{ACTOR}.use_kl_loss=True", f"{ACTOR}.kl_loss_coef=0.3")
    assert loss_kl(load(tmp_path, *loss).config) is None
    control = loss_kl(load(tmp_path, *loss, *schedule).config)
    assert (control.type, control.schedule) == ("schedule", ((0, 0.05), (300, 0.01)))
    assert loss_kl(load(tmp_path, *loss, f"{CONTROL}.type=adaptive").config).kl_coef == 0.3
    assert loss_kl(load(tmp_path, *loss, *schedule, "algorithm.use_kl_in_reward=True").config) is None
