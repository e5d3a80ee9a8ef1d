"""The price of length, at both stages, against numbers worked out by hand."""

import pytest

from tests.trainer.credit_bench import batch_of, one
from trainer.credit.advantage import AdvantageInput, AdvantageOptions, compute_advantages
from trainer.credit.length_penalty import LengthPenaltyOptions, advantage_shift, penalise_scores

HALF = dict(coef=0.5, free_len=1000, max_len=2048)
# three right answers of ratio 0, .25 and 1
QUARTERS = [one(length=n) for n in (1, 2, 5)]
RATIO = dict(free_len=1, max_len=5)


@pytest.mark.parametrize(("length", "penalty"), [(900, 0.0), (1500, -0.238550), (2048, -0.5), (3000, -0.5)])
def test_price_in_the_reward(length, penalty):
    [each] = penalise_scores([one(score=1.0, length=length)], LengthPenaltyOptions(**HALF), step=0)
    assert each.result.score == pytest.approx(1.0 + penalty, abs=1e-6)
    assert each.result.extra["length_penalty"] == pytest.approx(penalty, abs=1e-6)
    assert each.result.acc == 1.0


@pytest.mark.parametrize("coef", [0.5, 0.01])
def test_the_deviation_of_the_group_eats_the_price_in_the_reward(coef):
    scored = penalise_scores(QUARTERS, LengthPenaltyOptions(coef, **RATIO, stage="reward"), step=0)
    samples = AdvantageInput.from_batch(batch_of(scored), [each.result.score for each in scored], "aaa")
    result = compute_advantages("grpo", samples, AdvantageOptions())
    values = [row[-1].item() for row in batch_of(scored).rows(result.advantages_T)]
    assert values == pytest.approx([0.80, 0.32, -1.12], abs=5e-3)


def test_price_in_the_advantage():
    options = LengthPenaltyOptions(0.5, **RATIO, stage="advantage")
    shift, metrics = advantage_shift(QUARTERS, [True] * 3, options, step=0)
    assert shift == pytest.approx([0.208333, 0.083333, -0.291667], abs=1e-6)
    assert metrics["actor/length_shift_abs"].value == pytest.approx(0.583333 / 3, abs=1e-6)
    assert penalise_scores(QUARTERS, options, step=0) == QUARTERS


def test_only_right_answers_pay():
    mixed = [one(length=1), one(length=5), one(length=5, acc=0.0)]
    options = LengthPenaltyOptions(0.5, **RATIO, only_correct=True)
    assert [each.result.score for each in penalise_scores(mixed, options, 0)] == [1.0, 0.5, 1.0]
    options = LengthPenaltyOptions(0.5, **RATIO, stage="advantage", only_correct=True)
    assert advantage_shift(mixed, [True] * 3, options, 0)[0] == [0.25, -0.25, 0.0]


def test_samples_that_do_not_count_pay_nothing_and_move_no_mean():
    scored = [one(length=1), one(length=5), one(length=5, failed=True)]
    shift, _ = advantage_shift(scored, [True, True, False], LengthPenaltyOptions(1.0, **RATIO, stage="advantage"), 0)
    assert shift == [0.5, -0.5, 0.0]
    rejected = [one(length=1), one(length=5), one(length=5)]  # the last one lost its reward token
    shift, _ = advantage_shift(rejected, [True, True, False], LengthPenaltyOptions(1.0, **RATIO, stage="advantage"), 0)
    assert shift == [0.5, -0.5, 0.0]
    assert penalise_scores(scored, LengthPenaltyOptions(1.0, **RATIO), 0)[2].result.score == 1.0


def test_the_coefficient_follows_its_schedule():
    options = LengthPenaltyOptions(0.0, **RATIO, schedule=((0, 0.0), (10, 1.0)), interp="linear")
    scores = [penalise_scores([one(length=5)], options, step)[0].result.score for step in (0, 5, 10, 99)]
    assert scores == [1.0, 0.5, 0.0, 0.0]


def test_no_penalty_changes_nothing():
    assert penalise_scores(QUARTERS, None, 0) == QUARTERS


@pytest.mark.parametrize(
    "wrong", [dict(free_len=8, max_len=8), dict(free_len=-1, max_len=8), dict(max_len=8, schedule=((5, 1.0), (1, 0.0)))]
)
def test_impossible_settings_are_refused(wrong):
    with pytest.raises(ValueError, match=r"reward\.length_penalty"):
        LengthPenaltyOptions(0.5, **wrong)
