"""Known answers for the fused layouts, worked out by hand."""

from __future__ import annotations

import pytest
import torch

from bridge.ops import QKV, GateUp, Op, PadVocab, Rename


def labels(op: Op, rows: list[list[str]], live_rows: int, parts: int, part: int) -> str:
    """The shard's row labels, from the blocks, with _ for padding."""
    shapes = [(len(source), 3) for source in rows]
    shard = ["_"] * live_rows
    for block in op.split_for((live_rows, 3), shapes, parts, part):
        source = rows[block.source][block.hf_start : block.hf_start + block.length]
        shard[block.live_start : block.live_start + block.length] = source
    return " ".join(shard)


def heads(letter: str, count: int) -> list[str]:
    return [f"{letter}{i}" for i in range(count)]


@pytest.mark.parametrize(
    ("a", "g", "full"),
    [
        (4, 2, "q0 q1 k0 v0 q2 q3 k1 v1"),
        (2, 2, "q0 k0 v0 q1 k1 v1"),
        (3, 1, "q0 q1 q2 k0 v0"),
    ],
)
def test_qkv_rows_go_group_by_group(a, g, full):
    op = QKV(heads=a, groups=g, head_dim=1)
    rows = [heads("q", a), heads("k", g), heads("v", g)]
    assert labels(op, rows, a + 2 * g, 1, 0) == full


def test_qkv_is_cut_at_group_edges_and_inside_groups():
    op = QKV(heads=4, groups=2, head_dim=1)
    rows = [heads("q", 4), heads("k", 2), heads("v", 2)]
    assert [labels(op, rows, 4, 2, t) for t in range(2)] == ["q0 q1 k0 v0", "q2 q3 k1 v1"]
    assert [labels(op, rows, 2, 4, t) for t in range(4)] == ["q0 q1", "k0 v0", "q2 q3", "k1 v1"]


def test_qkv_chunk_may_end_inside_a_head():
    op = QKV(heads=4, groups=1, head_dim=24)
    shapes = [(96, 80), (24, 80), (24, 80)]
    assert op.parts_of((36, 80), shapes, 4) == 4
    blocks = [op.split_for((36, 80), shapes, 4, t) for t in range(4)]
    # rows 0..95 are q, 96..119 k, 120..143 v; chunks of 36 rows
    assert [[(b.source, b.hf_start, b.length) for b in shard] for shard in blocks] == [
        [(0, 0, 36)],
        [(0, 36, 36)],
        [(0, 72, 24), (1, 0, 12)],
        [(1, 12, 12), (2, 0, 24)],
    ]


def test_qkv_with_groups_and_ranks_that_do_not_divide_is_refused():
    assert QKV(heads=12, groups=6, head_dim=4).parts_of((24, 8), [(48, 8), (24, 8), (24, 8)], 4) is None


def test_gate_and_up_are_cut_before_they_are_fused():
    rows = [heads("g", 4), heads("u", 4)]
    assert labels(GateUp(), rows, 8, 1, 0) == "g0 g1 g2 g3 u0 u1 u2 u3"
    assert [labels(GateUp(), rows, 4, 2, t) for t in range(2)] == ["g0 g1 u0 u1", "g2 g3 u2 u3"]


def test_vocabulary_padding_falls_on_the_last_ranks():
    rows = [heads("t", 13)]
    assert labels(PadVocab(), rows, 8, 2, 0) == "t0 t1 t2 t3 t4 t5 t6 t7"
    assert labels(PadVocab(), rows, 8, 2, 1) == "t8 t9 t10 t11 t12 _ _ _"
    assert labels(PadVocab(), rows, 8, 4, 3) == "_ _ _ _ _ _ _ _"
    assert PadVocab().parts_of((6, 3), [(13, 3)], 2) is None  # 12 rows cannot hold 13


def test_column_cut_takes_columns():
    (block,) = Rename(dim=1).split_for((2, 3), [(2, 6)], 2, 1)
    hf = torch.arange(12).view(2, 6)
    assert block.of_hf(hf).tolist() == [[3, 4, 5], [9, 10, 11]]


def test_live_shape_decides_between_cut_and_copy():
    assert Rename(dim=0).parts_of((3, 5), [(6, 5)], 2) == 2
    assert Rename(dim=0).parts_of((6, 5), [(6, 5)], 2) == 1
    assert Rename(dim=1).parts_of((3, 5), [(6, 5)], 2) is None
    assert Rename().parts_of((3, 5), [(6, 5)], 2) is None
    assert Rename(dim=0).parts_of((2, 5), [(5, 5)], 2) is None
