"""Normalised rewards against numbers worked out by hand."""

import itertools
import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.credit.reward_norm import Moments, RewardNormOptions, normalise

KINDS = ("none", "batch", "group", "running")


def norm(rewards, uids="aabb", mean="none", std="none", *, domains=None, baseline=None, running=None, **options):
    domains, baseline = domains or ["d"] * len(rewards), baseline or [True] * len(rewards)
    running = {} if running is None else running
    return normalise(rewards, uids, domains, baseline, RewardNormOptions(mean, std, **options), running)[0]


@pytest.mark.parametrize(
    ("mean", "std", "expected"),
    [
        ("none", "none", [1, 0, 1, 1]),
        ("batch", "none", [0.25, -0.75, 0.25, 0.25]),
        ("batch", "batch", [0.5, -1.5, 0.5, 0.5]),
        ("group", "none", [0.5, -0.5, 0, 0]),
        ("group", "group", [0.707106, -0.707106, 0, 0]),
        ("group", "batch", [1, -1, 0, 0]),
        ("batch", "group", [0.353553, -1.060659, 0.25, 0.25]),
        ("none", "group", [1.414212, 0, 1, 1]),  # group b: scale 1
        ("none", "batch", [2, 0, 2, 2]),
        ("running", "running", [0.5, -1.5, 0.5, 0.5]),
        ("running", "group", [0.353553, -1.060659, 0.25, 0.25]),
        ("group", "running", [1, -1, 0, 0]),
    ],
)
def test_table(mean, std, expected):
    assert norm([1, 0, 1, 1], mean=mean, std=std) == pytest.approx(expected, abs=4e-6)


def test_running_moments_take_in_this_step_before_use():
    running = {}
    norm([1, 0, 1, 1], mean="running", std="running", running=running)
    second = norm([0, 0, 0, 0], mean="running", std="running", running=running)
    assert (running["d"].mean, running["d"].scale) == (0.375, pytest.approx(0.517549, abs=1e-6))
    assert second == pytest.approx([-0.724567] * 4, abs=2e-6)


def test_running_moments_are_kept_when_only_one_side_reads_them_and_untouched_otherwise():
    for mean, std in itertools.product(KINDS, KINDS):
        running = {}
        norm([1, 0, 1, 1], mean=mean, std=std, running=running)
        assert bool(running) == ("running" in (mean, std))


@pytest.mark.parametrize(("mean", "std"), list(itertools.product(KINDS, KINDS)))
def test_all_sixteen_combinations_agree_with_their_definition(mean, std):
    """Two domains, three groups, an outsider; the sets are computed again in the plainest way."""
    rewards, uids = [1.0, 0.0, 4.0, 3.0, 0.5, 99.0], list("aabbcc")
    domains, baseline = list("xxxxyy"), [True] * 5 + [False]
    earlier = {"x": [2.0, 5.0], "y": [1.5, 1.5]}
    running = {name: Moments.of(values) for name, values in earlier.items()}
    found = norm(rewards, uids, mean, std, domains=domains, baseline=baseline, running=running)

    def members(kind, row):
        same = domains if kind in ("batch", "running") else uids
        values = [r for r, name, flag in zip(rewards, same, baseline, strict=True) if flag and name == same[row]]
        return values + (earlier[domains[row]] if kind == "running" else [])

    for row in range(5):
        value = rewards[row]
        if mean != "none":
            value -= sum(members(mean, row)) / len(members(mean, row))
        if std != "none" and len(set(members(std, row))) > 1:
            values = members(std, row)
            centre = sum(values) / len(values)
            value /= math.sqrt(sum((v - centre) ** 2 for v in values) / (len(values) - 1)) + 1e-6
        assert found[row] == pytest.approx(value, rel=1e-9, abs=1e-12)
    assert found[5] == 0.0


def test_the_clip_bounds_and_counts():
    options = RewardNormOptions("batch", "batch", clip=1.0)
    values, metrics = normalise([1, 0, 1, 1], "aabb", ["d"] * 4, [True] * 4, options, {})
    assert values == pytest.approx([0.5, -1.0, 0.5, 0.5], abs=1e-5) and values[1] == -1.0
    assert metrics["critic/reward_clip_frac"].value == 0.25
    assert norm([3.0, -3.0], "ab", clip=0) == [3.0, -3.0]  # 0 is off, as null is


def test_equal_values_are_exactly_zero_and_have_no_scale():
    """This value's mean over seven samples rounds to another number."""
    value = 0.7602257126352243
    assert sum([value] * 7) / 7 != value
    assert norm([value] * 7, "aaaaaaa", "group", "group") == [0.0] * 7
    moments = Moments.of([value] * 3).merge(Moments.of([value] * 4))
    assert (moments.mean, moments.scale) == (value, None)


def test_one_sample_per_prompt_has_no_group_baseline():
    assert norm([3.0, 1.0], "ab", "group", "group", singleton="reward") == [3.0, 1.0]
    assert norm([3.0, 1.0], "ab", "group", "group") == [0.0, 0.0]


@settings(max_examples=60)
@given(st.lists(st.floats(-100, 100), min_size=2, max_size=20), st.integers(1, 19))
def test_merged_moments_are_those_of_the_union(values, cut):
    cut = min(cut, len(values) - 1)
    merged, whole = Moments.of(values[:cut]).merge(Moments.of(values[cut:])), Moments.of(values)
    assert merged.mean == pytest.approx(whole.mean, rel=1e-9, abs=1e-9)
    assert merged.squares == pytest.approx(whole.squares, rel=1e-9, abs=1e-6)
    assert Moments(**json.loads(json.dumps(merged.state_dict()))) == merged


@settings(max_examples=40)
@given(
    st.lists(st.tuples(st.floats(-5, 5), st.sampled_from("abc"), st.sampled_from("xy")), min_size=1, max_size=10),
    st.sampled_from(KINDS),
    st.sampled_from(KINDS),
    st.randoms(),
)
def test_the_order_of_samples_does_not_matter(rows, mean, std, rng):
    order = rng.sample(range(len(rows)), len(rows))

    def run(rows):
        rewards, uids, domains = zip(*rows, strict=True)
        return norm(rewards, uids, mean, std, domains=domains)

    one, two = run(rows), run([rows[i] for i in order])
    assert two == [one[i] for i in order]
