"""Masks by end reason, difficulty and length against hand-made samples."""

from dataclasses import replace

import pytest

from tests.trainer.credit_bench import one
from trainer.credit.sample_masks import MaskOptions, sample_masks


def kept(scored, **options):
    return sample_masks(scored, MaskOptions(**options))[0]


def test_the_end_reason_decides_not_the_length():
    """Both answers have the full eight tokens; one ended in time."""
    scored = [one(length=8, finish="stop"), one(length=8, finish="length"), one(length=3)]
    flags, metrics = sample_masks(scored, MaskOptions(max_len=True))
    assert flags == [True, False, True]
    assert metrics["actor/max_len_mask_ratio"].value == pytest.approx(2 / 3)
    assert kept(scored) == [True] * 3


@pytest.mark.parametrize(("n", "counts"), [(8, range(1, 8)), (16, range(2, 16))])
def test_difficulty_keeps_groups_strictly_between_the_thresholds(n, counts):
    for correct in range(n + 1):
        group = [one(acc=float(i < correct), score=-3.0) for i in range(n)]
        assert kept(group, difficulty=(0.1, 0.95)) == [correct in counts] * n


def test_a_mean_on_a_threshold_is_outside():
    half, right = [one("a", acc=1.0), one("a", acc=0.0)], [one("b", acc=1.0)] * 2
    assert kept(half + right, difficulty=(0.5, 1.0)) == [False] * 4
    assert kept(half + right, difficulty=(0.0, 0.5)) == [False] * 4
    assert kept(half + right, difficulty=(0.4, 1.0)) == [True, True, False, False]


def test_difficulty_reads_groups_by_uid_and_only_samples_that_count():
    scored = [
        one("a", acc=1.0),
        one("b", acc=0.0),
        one("a", acc=0.0),
        one("b", acc=0.0),
        one("b", acc=1.0, failed=True),
    ]
    assert kept(scored, difficulty=(0.1, 0.95)) == [True, False, True, False, False]


def test_a_group_of_one_is_kept():
    assert kept([one("a", acc=1.0), one("b", acc=0.0)], difficulty=(0.1, 0.95)) == [True, True]


def test_wrong_and_long_answers_are_dropped():
    rows = [(1, 900), (0, 200), (0, 900), (0.5, 200), (0.5, 900), (-1, 200)]
    scored = [one(acc=acc, length=length) for acc, length in rows]
    assert kept(scored, error_max_len=800) == [True, True, False, True, False, True]
    assert kept(scored, error_max_len=800, correct_threshold=0.5) == [True, True, False, True, True, True]
    assert kept([one(acc=0.0, length=800)], error_max_len=800) == [False]


def test_rules_multiply():
    scored = [one(acc=1.0, length=9, finish="length"), one(acc=0.0, length=9), one(acc=0.0, length=2)]
    flags, metrics = sample_masks(scored, MaskOptions(max_len=True, error_max_len=8))
    assert flags == [False, False, True]
    assert metrics["actor/error_len_mask_ratio"].value == pytest.approx(2 / 3)


def test_a_missing_accuracy_is_an_error_that_names_the_key():
    each = one("q7", length=9)
    scored = [replace(each, result=replace(each.result, acc=None))] * 2
    with pytest.raises(ValueError, match=r"q7.*error_max_len_clip"):
        kept(scored, error_max_len=8)
    with pytest.raises(ValueError, match=r"q7.*difficulty_mask"):
        kept(scored, difficulty=(0.1, 0.9))
    assert kept(scored, error_max_len=10, max_len=True) == [True, True]  # nobody asks
