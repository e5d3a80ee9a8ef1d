"""Which layers stand where: known answers, and the stages of models that share indexers."""

from __future__ import annotations

from itertools import accumulate

import pytest

from bridge.models import full_indexer_layers
from bridge.pipeline import balanced, check_indexer_starts, legal_sizes, stage_layers

GLM_52 = {"num_hidden_layers": 78, "index_topk_freq": 4, "index_skip_topk_offset": 3}
GLM_52_FULL = [0, 1, 2, *range(6, 75, 4)]


def layers(*arguments: object) -> list[list[list[int]]]:
    return [[list(chunk) for chunk in chunks] for chunks in stage_layers(*arguments)]


def test_even_stages():
    assert layers(6, 3) == [[[0, 1]], [[2, 3]], [[4, 5]]]


def test_virtual_chunks_go_round_the_stages():
    assert layers(8, 2, 2) == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]


def test_uneven_stages():
    assert layers(7, 2, 1, [3, 4]) == [[[0, 1, 2]], [[3, 4, 5, 6]]]


def test_uneven_stages_of_several_chunks_are_cut_evenly():
    assert layers(6, 2, 2, [4, 2]) == [[[0, 1], [3, 4]], [[2], [5]]]


def test_every_chunk_may_have_its_own_size():
    assert layers(7, 2, 2, [3, 1, 2, 1]) == [[[0, 1, 2], [4, 5]], [[3], [6]]]
    assert layers(4, 2, 2, [2, 1, 1, 0]) == [[[0, 1], [3]], [[2], []]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((7, 2), r"7 layers for 2 pipeline stages.*such as 4,3; set them \(--layers\)"),
        ((8, 2, 1, [3, 4]), r"\[3, 4\].*7 together.*add up to 8"),
        ((8, 2, 1, [4, 2, 2]), r"expected 2 stages"),
        ((8, 2, 2, [5, 3]), r"expected 2 stages \(multiples of 2\) or 4 chunks"),
        ((8, 2, 1, [9, -1]), r"\[9, -1\]"),
    ],
)
def test_layers_that_do_not_fit_name_what_to_change(arguments, message):
    with pytest.raises(ValueError, match=message):
        stage_layers(*arguments)


def test_balanced_sizes_differ_by_at_most_one():
    assert balanced(78, 4) == [20, 20, 19, 19] and balanced(8, 2) == [4, 4]


@pytest.mark.parametrize(
    ("fields", "full"),
    [
        ({}, list(range(8))),
        ({"indexer_types": ["full", "shared", "full", "shared"] * 2}, [0, 2, 4, 6]),
        ({"index_topk_pattern": "FSSFSSFS"}, [0, 3, 6]),
        ({"index_topk_freq": 4, "index_skip_topk_offset": 3}, [0, 1, 2, 6]),
        ({"index_topk_freq": 2}, [0, 1, 3, 5, 7]),  # the offset is 2 where the file does not say
        ({"index_topk_freq": 2, "index_skip_topk_offset": 0}, [1, 3, 5, 7]),
        ({"index_topk_freq": 1, "index_skip_topk_offset": 3}, list(range(8))),
        ({"index_topk_freq": None, "index_skip_topk_offset": None, "indexer_types": None}, list(range(8))),
        # the list is the truth, whatever the formula says
        ({"indexer_types": ["full"] + ["shared"] * 7, "index_topk_freq": 4, "index_topk_pattern": "F" * 8}, [0]),
    ],
)
def test_layers_with_an_indexer_of_their_own(fields, full):
    assert full_indexer_layers({"num_hidden_layers": 8, **fields}) == full


@pytest.mark.parametrize("fields", [{"indexer_types": ["full"] * 7}, {"index_topk_pattern": "F" * 9}])
def test_a_list_of_another_length_is_refused(fields):
    with pytest.raises(ValueError, match=rf"{next(iter(fields))} of [79] entries with num_hidden_layers=8"):
        full_indexer_layers({"num_hidden_layers": 8, **fields})


def test_glm_52_has_21_indexers():
    full = full_indexer_layers(GLM_52)
    assert full == GLM_52_FULL and len(full) == 21 and full[-1] == 74


def test_glm_52_stages_start_on_layers_with_an_indexer():
    check_indexer_starts(stage_layers(78, 4, 1, [18, 20, 20, 20]), GLM_52_FULL)
    with pytest.raises(ValueError, match=r"start on layers \[20, 40, 59\]") as error:
        check_indexer_starts(stage_layers(78, 4, 1, [20, 20, 19, 19]), GLM_52_FULL)
    named = [int(size) for size in str(error.value).rsplit("such as ", 1)[1].split(",")]
    check_indexer_starts(stage_layers(78, 4, 1, named), GLM_52_FULL)
    assert max(named) - min(named) <= 4


def test_virtual_chunks_start_on_layers_with_an_indexer_too():
    check_indexer_starts(stage_layers(8, 2, 2, [2, 2, 2, 2]), [0, 2, 4, 6])
    with pytest.raises(ValueError, match=r"start on layers \[3, 5\]"):
        check_indexer_starts(stage_layers(8, 2, 2, [2, 1, 2, 3]), [0, 2, 4, 6])


def test_an_empty_chunk_starts_nowhere():
    check_indexer_starts(stage_layers(4, 2, 2, [2, 1, 1, 0]), [0, 2, 3])


@pytest.mark.parametrize("pp", [2, 3, 4, 6, 8])
def test_legal_sizes_are_legal(pp):
    sizes = legal_sizes(78, pp, GLM_52_FULL)
    assert len(sizes) == pp and sum(sizes) == 78 and set(accumulate(sizes[:-1])) <= set(GLM_52_FULL)


def test_more_stages_than_indexers_have_no_legal_sizes():
    assert legal_sizes(8, 4, [0, 3]) == []
    with pytest.raises(ValueError, match=r"set the layers of each chunk \(--layers\)$"):
        check_indexer_starts(stage_layers(8, 4), [0, 3])
