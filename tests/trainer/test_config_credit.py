"""From arguments to the options of room 4: what fits, what is refused, and what is said."""

import pytest

from tests.trainer.config_bench import ACTOR, ROLLOUT, errors, load
from trainer import wiring_credit
from trainer.credit.assign import CreditOptions
from trainer.credit.length_penalty import LengthPenaltyOptions
from trainer.credit.sample_masks import MaskOptions
from trainer.credit.sample_weights import WeightOptions
from trainer.kl_control import KlControl

A, PENALTY, FILTER = "algorithm", "reward.length_penalty", "algorithm.filter_groups"


def options(folder, *argv) -> CreditOptions:
    return wiring_credit.credit_options(load(folder, *argv).config)


def test_defaults_are_plain_grpo(tmp_path):
    assert options(tmp_path) == CreditOptions()
    assert options(tmp_path, f"{ROLLOUT}.n=1").advantage.singleton == "reward"
    assert wiring_credit.dynamic_sampling(load(tmp_path).config) is None


def test_the_recipe_of_roll(tmp_path):
    found = options(
        tmp_path,
        *(f"{A}.adv_estimator=reinforce", f"{A}.norm_mean_type=group", f"{A}.norm_std_type=batch", f"{A}.gamma=0.9"),
        *(f"{A}.reward_clip=5", f"{A}.advantage_clip=2", f"{A}.whiten_advantages=True", f"{A}.whiten_scope=domain"),
        *(f"{A}.max_len_mask=True", f"{A}.difficulty_mask=True", f"{A}.error_max_len_clip=True"),
        *(f"{A}.difficulty_low_threshold=0.1", f"{A}.difficulty_high_threshold=0.95"),
        *(f"{A}.error_max_len_threshold=800", f"{A}.correct_threshold=0.5"),
        *(f"{A}.difficulty_loss_weight=True", f"{A}.difficulty_source=field", f"{A}.difficulty_range=[4,8]"),
        f"{A}.length_loss_weight=True",
    )
    assert (found.estimator, found.norm.mean, found.norm.std, found.norm.clip) == ("reinforce", "group", "batch", 5.0)
    advantage = found.advantage
    assert (advantage.gamma, advantage.whiten_advantages, advantage.whiten_scope) == (0.9, True, "domain")
    assert advantage.advantage_clip == 2.0
    assert found.masks == MaskOptions(True, (0.1, 0.95), 800, 0.5)
    assert found.weights == WeightOptions("field", (4.0, 8.0), length=True)


def test_kl_in_the_reward_loads_a_reference(tmp_path):
    kl = (f"{A}.use_kl_in_reward=True", f"{A}.kl_penalty=k3", f"{A}.kl_ctrl.type=schedule")
    schedule = (f"{A}.kl_ctrl.schedule=[[0,0.05],[300,0.01]]", f"{A}.kl_ctrl.interp=cosine")
    loaded = load(tmp_path, *kl, *schedule)
    assert loaded.config.derived.needs_reference
    found = wiring_credit.credit_options(loaded.config).reward_kl
    control = KlControl("schedule", schedule=((0, 0.05), (300, 0.01)), interp="cosine")
    assert (found.estimator, found.control) == ("k3", control)
    assert options(tmp_path).reward_kl is None


def test_length_penalty(tmp_path):
    given = (
        f"{PENALTY}.coef=0.5",
        f"{PENALTY}.stage=advantage",
        f"{PENALTY}.free_len=100",
        f"{PENALTY}.only_correct=True",
    )
    expected = LengthPenaltyOptions(0.5, max_len=512, free_len=100, stage="advantage", only_correct=True)
    assert options(tmp_path, *given).length_penalty == expected
    scheduled = options(tmp_path, f"{PENALTY}.schedule=[[0,0],[10,1]]", f"{PENALTY}.max_len=64").length_penalty
    assert (scheduled.max_len, scheduled.schedule) == (64, ((0, 0.0), (10, 1.0)))
    assert options(tmp_path).length_penalty is None


def test_group_filter(tmp_path):
    given = (f"{FILTER}.enable=True", f"{FILTER}.max_num_gen_batches=3", f"{FILTER}.on_exhausted=fill_unfiltered")
    sampling = wiring_credit.dynamic_sampling(load(tmp_path, *given, f"{FILTER}.mean_high=0.9").config)
    assert (sampling.num_groups, sampling.prompts_per_round) == (8, 8)
    sampling = wiring_credit.dynamic_sampling(load(tmp_path, f"{FILTER}.enable=True", "data.gen_batch_size=12").config)
    assert (sampling.num_groups, sampling.prompts_per_round, sampling.options.max_rounds) == (8, 12, 10)
    sampling = wiring_credit.dynamic_sampling(load(tmp_path, *given, f"{FILTER}.mean_high=0.9").config)
    found = sampling.options
    assert (found.metric, found.max_rounds, found.on_exhausted, found.mean_high) == ("acc", 3, "fill_unfiltered", 0.9)


@pytest.mark.parametrize(
    ("given", "id", "got", "fix"),
    [
        ([f"{A}.gamma=0.9"], "algo.unread", "gamma=0.9", f"{A}.gamma=1.0"),
        ([f"{A}.lam=0.95"], "algo.unread", "adv_estimator=grpo", f"{A}.lam=1.0"),
        ([f"{A}.lam=0.95", f"{A}.adv_estimator=reinforce"], "algo.unread", "lam=0.95", f"{A}.lam=1.0"),
        ([f"{A}.norm_mean_type=group"], "algo.unread", "norm_mean_type=group", f"{A}.norm_mean_type=null"),
        ([f"{A}.norm_std_type=batch"], "algo.unread", "norm_std_type=batch", f"{A}.norm_std_type=null"),
        (
            [f"{A}.norm_adv_by_std_in_grpo=False", f"{A}.adv_estimator=rloo"],
            "algo.unread",
            "adv_estimator=rloo",
            f"{A}.norm_adv_by_std_in_grpo=True",
        ),
        ([f"{A}.whiten_scope=domain"], "algo.unread", "whiten_advantages=False", f"{A}.whiten_scope=batch"),
        ([f"{A}.gamma=1.5", f"{A}.adv_estimator=reinforce"], "algo.adv", "gamma=1.5", f"{A}.gamma=1.0"),
        ([f"{A}.reward_clip=-1"], "value.range", "reward_clip=-1", f"{A}.reward_clip=0"),
        ([f"{A}.advantage_clip=-1"], "value.range", "advantage_clip=-1", f"{A}.advantage_clip=0"),
        ([f"{A}.error_max_len_clip=True"], "algo.mask", "no threshold", f"{A}.error_max_len_threshold=256"),
        ([f"{A}.difficulty_mask=True"], "algo.mask", "low_threshold=None", f"{A}.difficulty_low_threshold=0.1"),
        (
            [f"{A}.difficulty_mask=True", f"{A}.difficulty_low_threshold=0.9", f"{A}.difficulty_high_threshold=0.1"],
            "algo.mask",
            "difficulty_low_threshold=0.9",
            f"{A}.difficulty_high_threshold=0.95",
        ),
        ([f"{A}.difficulty_loss_weight=True"], "algo.weight", "no source", f"{A}.difficulty_source=pass_rate"),
        (
            [f"{A}.difficulty_loss_weight=True", f"{A}.difficulty_source=field", f"{A}.difficulty_range=[8,4]"],
            "algo.weight",
            "difficulty_range=[8.0, 4.0]",
            f"{A}.difficulty_range=[0,10]",
        ),
        (
            [f"{A}.difficulty_loss_weight=True", f"{A}.difficulty_source=pass_rate", f"{A}.difficulty_range=[4,8]"],
            "algo.unread",
            "difficulty_source=pass_rate",
            f"{A}.difficulty_range=null",
        ),
        ([f"{PENALTY}.coef=0.5", f"{PENALTY}.free_len=600"], "len.penalty", "free_len=600, max_len=512", "free_len=0"),
        (
            [f"{PENALTY}.coef=0.5", f"{A}.adv_estimator=remax"],
            "len.penalty",
            "adv_estimator=remax",
            f"{PENALTY}.stage=advantage",
        ),
        ([f"{PENALTY}.coef=-1"], "value.range", "coef=-1", f"{PENALTY}.coef=0"),
        ([f"{PENALTY}.schedule=[[5,1],[0,0]]"], "algo.schedule", "[5, 1]", f"{PENALTY}.schedule=[[0,"),
        ([f"{PENALTY}.schedule=[0.5,0.1]"], "algo.schedule", "0.5", f"{PENALTY}.schedule=[[0,"),
        ([f"{A}.kl_ctrl.schedule=[[0.5,1]]"], "algo.schedule", "0.5", f"{A}.kl_ctrl.schedule=[[0,"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path, given, id, got, fix):
    lines = errors(tmp_path, *given)[id].split("\n")
    assert got in lines[1] and lines[2].startswith("  expected: ") and fix in lines[3]


@pytest.mark.parametrize(
    ("given", "got"),
    [
        ([f"{ROLLOUT}.n=1"], "n=1, filter_groups.enable=True"),
        ([f"{FILTER}.carry_over=True", f"{A}.adv_estimator=remax"], "adv_estimator=remax"),
        ([f"{FILTER}.max_num_gen_batches=2", "data.gen_batch_size=3"], "2 rounds x data.gen_batch_size=3 = 6 groups"),
        ([f"{FILTER}.mean_low=0.5", f"{FILTER}.mean_high=0.5"], "mean_low=0.5, mean_high=0.5"),
    ],
)
def test_filters_that_cannot_work(tmp_path, given, got):
    assert got in errors(tmp_path, f"{FILTER}.enable=True", *given)["algo.filter"]


def test_both_forms_of_a_length_penalty_are_one_too_many(tmp_path):
    found = errors(tmp_path, f"{PENALTY}.coef=0.5", f"{ACTOR}.length_loss.coef=0.1")["len.penalty"]
    assert "length_loss.coef=0.1" in found


def test_an_own_estimator_may_read_everything(tmp_path):
    own = f"{A}.adv_estimator=tests.trainer.test_advantage:double_rewards"
    options(tmp_path, own, f"{A}.gamma=0.9", f"{A}.lam=0.5", f"{A}.norm_mean_type=batch", f"{A}.whiten_scope=domain")


@pytest.mark.parametrize(
    ("given", "part"),
    [
        (
            [
                *(f"{A}.difficulty_mask=True", f"{ROLLOUT}.n=16"),
                *(f"{A}.difficulty_low_threshold=0.1", f"{A}.difficulty_high_threshold=0.95"),
            ],
            "keeps groups with 2 to 15 of 16 answers right",
        ),
        (
            [f"{A}.difficulty_mask=True", f"{A}.difficulty_low_threshold=0.3", f"{A}.difficulty_high_threshold=0.4"],
            "keeps no group",
        ),
        ([f"{A}.error_max_len_threshold=8"], "error_max_len_clip=False"),
        ([f"{A}.difficulty_source=field"], "difficulty_loss_weight=False"),
        ([f"{A}.correct_threshold=0.5"], "nothing asks which answers are right"),
        ([f"{PENALTY}.coef=0.5"], "loses its size"),
        ([f"{PENALTY}.free_len=5"], f"{PENALTY}.{{free_len}} has no effect: coef=0"),
        ([f"{ROLLOUT}.n=1", f"{A}.adv_estimator=opo"], "a group of one has no baseline"),
    ],
)
def test_notices(tmp_path, given, part):
    assert len([notice for notice in load(tmp_path, *given).notices if part in notice]) == 1
