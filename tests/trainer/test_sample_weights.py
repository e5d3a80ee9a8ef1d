"""Sample weights against numbers worked out by hand."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trainer.credit_bench import one
from trainer.credit.sample_weights import WeightOptions, check_difficulties, difficulty, sample_weights

FIELD = WeightOptions("field", (4.0, 8.0))


def weights(scored, options, valid=None):
    return sample_weights(scored, valid or [True] * len(scored), options)[0]


def hard(*values, lengths=(2, 2, 2)):
    return [one(str(i), length=n, difficulty=v) for i, (v, n) in enumerate(zip(values, lengths, strict=True))]


def test_difficulty_is_mapped_by_its_range_and_rescaled_to_mean_one():
    assert weights(hard(4.0, 6.0, 8.0), FIELD) == pytest.approx([0.4, 1.0, 1.6])  # from .5, 1.25, 2
    assert weights(hard(0.0, 6.0, 99.0), FIELD) == pytest.approx([0.4, 1.0, 1.6])


def test_weights_multiply_before_they_are_rescaled():
    both = WeightOptions("field", (4.0, 8.0), length=True)
    assert weights(hard(4.0, 6.0, 8.0, lengths=(10, 20, 30)), both) == pytest.approx([0.75, 1.25, 1.0])


def test_short_answers_weigh_more():
    scored = [one(str(n), length=n) for n in (10, 20, 30)]
    assert weights(scored, WeightOptions(length=True)) == pytest.approx([1.5, 1.0, 0.5])
    assert weights(scored[:1] * 2, WeightOptions(length=True)) == [1.0, 1.0]


def test_pass_rate_is_the_groups_own():
    scored = [one("a", acc=1.0), one("a", acc=1.0), one("b", acc=0.0), one("b", acc=1.0)]
    raw = [0.5, 0.5, 1.25, 1.25]
    assert weights(scored, WeightOptions("pass_rate")) == pytest.approx([w / (sum(raw) / 4) for w in raw])


def test_samples_that_learn_nothing_influence_nothing():
    scored = [one(str(n), length=n) for n in (10, 20, 30, 1000)]
    found, metrics = sample_weights(scored, [True, True, True, False], WeightOptions(length=True))
    assert found == pytest.approx([1.5, 1.0, 0.5, 1.0])
    assert metrics["actor/sample_weights_mean"].value == pytest.approx(1.0)
    assert metrics["actor/sample_weights_min"].value == pytest.approx(0.5)
    assert metrics["actor/sample_weights_max"].value == pytest.approx(1.5)
    assert sample_weights(scored, [False] * 4, WeightOptions(length=True)) == ([1.0] * 4, {})


@pytest.mark.parametrize(("text", "value"), [("8.0+", 8.0), (" 3 ", 3.0), ("4.5", 4.5)])
def test_difficulty_as_text(text, value):
    assert difficulty(one(difficulty_text=text).item.row) == value


@pytest.mark.parametrize("text", ["hard", "", "8.0++", "1e"])
def test_a_difficulty_that_is_no_number_is_named_with_its_place(text):
    row = one("q", difficulty_text=text, origin=("train.jsonl", 12)).item.row
    with pytest.raises(ValueError, match=r"train\.jsonl:12"):
        check_difficulties([row])


@settings(max_examples=40)
@given(st.lists(st.tuples(st.integers(1, 50), st.floats(0, 10), st.booleans()), min_size=1, max_size=12), st.randoms())
def test_mean_one_in_any_order(rows, rng):
    scored = [one(str(i), length=n, difficulty=d) for i, (n, d, _) in enumerate(rows)]
    valid, options = [flag for _, _, flag in rows], WeightOptions("field", (2.0, 7.0), length=True)
    found = weights(scored, options, valid)
    learning = [w for w, flag in zip(found, valid, strict=True) if flag]
    assert not learning or sum(learning) / len(learning) == pytest.approx(1.0)
    order = rng.sample(range(len(rows)), len(rows))
    assert weights([scored[i] for i in order], options, [valid[i] for i in order]) == [found[i] for i in order]
