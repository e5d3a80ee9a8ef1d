"""Known answers for the row layouts, worked out by hand."""

from __future__ import annotations

import pytest
import torch

from bridge.ops import QKV, GateUp, HeadRows, IndexerRows, Op, PadVocab, PerExpert, Rename, RopeRows
from bridge.ops.mla import indexer_order
from bridge.rules import Place, Rule


def labels(op: Op, rows: list[list[str]], live_rows: int, parts: int, part: int) -> str:
    """The shard's row labels, from the blocks, with _ for padding."""
    shapes = [(len(source), 3) for source in rows]
    shard = ["_"] * live_rows
    for block in op.split_for((live_rows, 3), shapes, parts, part):
        source = rows[block.source][block.hf_start : block.hf_start + block.length]
        shard[block.live_start : block.live_start + block.length] = source
    return " ".join(shard)


def fill(op: Op, hf: list[torch.Tensor], live_shape: tuple[int, ...], parts: int, part: int) -> torch.Tensor:
    """The shard, from the blocks; NaN where no block writes."""
    live = torch.full(live_shape, torch.nan, dtype=hf[0].dtype)
    for block in op.split_for(live_shape, [tuple(source.shape) for source in hf], parts, part):
        block.of_live(live).copy_(block.of_hf(hf[block.source]))
    return live


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


def test_kv_b_rows_are_split_head_by_head():
    """Two heads of two key rows and one value row: never the first four rows and the rest."""
    rows = [[str(row) for row in range(6)]]
    keys = HeadRows(heads=2, head_rows=3, first=0, rows=2)
    values = HeadRows(heads=2, head_rows=3, first=2, rows=1)
    assert (labels(keys, rows, 4, 1, 0), labels(values, rows, 2, 1, 0)) == ("0 1 3 4", "2 5")
    assert [labels(keys, rows, 2, 2, t) for t in range(2)] == ["0 1", "3 4"]
    assert [labels(values, rows, 1, 2, t) for t in range(2)] == ["2", "5"]


@pytest.mark.parametrize(("dn", "dv"), [(2, 5), (5, 2)])
def test_kv_b_halves_equal_a_view_by_heads_and_go_back(dn, dv):
    hf = torch.arange(4 * (dn + dv) * 3.0).view(-1, 3)
    by_head = hf.view(4, dn + dv, 3)
    back = torch.full_like(hf, torch.nan)
    for first, count, want in ((0, dn, by_head[:, :dn]), (dn, dv, by_head[:, dn:])):
        op = HeadRows(heads=4, head_rows=dn + dv, first=first, rows=count)
        for rank in range(2):
            live = fill(op, [hf], (2 * count, 3), 2, rank)
            assert torch.equal(live, want.flatten(0, 1).chunk(2)[rank])
            for block in op.split_for((2 * count, 3), [tuple(hf.shape)], 2, rank):
                block.of_hf(back).copy_(block.of_live(live))
    assert torch.equal(back, hf)


def test_heads_are_never_cut():
    whole, half = HeadRows.whole(3, 4), HeadRows(heads=3, head_rows=4, first=0, rows=2)
    assert whole.parts_of((6, 5), [(12, 5)], 2) is None  # 12 rows divide, 3 heads do not
    assert half.parts_of((3, 5), [(12, 5)], 2) is None
    assert whole.parts_of((4, 5), [(12, 5)], 3) == half.parts_of((2, 5), [(12, 5)], 3) == 3


FIRST_PAIRS, FIRST_HALVES = RopeRows(first=True, interleaved=True), RopeRows(first=True, interleaved=False)
LAST_PAIRS, LAST_HALVES = RopeRows(first=False, interleaved=True), RopeRows(first=False, interleaved=False)
ROPE_ROWS = [FIRST_PAIRS, FIRST_HALVES, LAST_PAIRS, LAST_HALVES]


@pytest.mark.parametrize(
    ("source", "target", "order"),
    [
        (FIRST_PAIRS, FIRST_PAIRS, "0 1 2 3 4 5 6 7 8 9"),
        (FIRST_PAIRS, LAST_PAIRS, "8 9 0 1 2 3 4 5 6 7"),
        (FIRST_HALVES, LAST_PAIRS, "8 9 0 4 1 5 2 6 3 7"),
        (FIRST_HALVES, FIRST_PAIRS, "0 4 1 5 2 6 3 7 8 9"),
        (FIRST_PAIRS, FIRST_HALVES, "0 2 4 6 1 3 5 7 8 9"),
        (LAST_PAIRS, FIRST_PAIRS, "2 3 4 5 6 7 8 9 0 1"),
        (LAST_PAIRS, FIRST_HALVES, "2 4 6 8 3 5 7 9 0 1"),
    ],
)
def test_indexer_rows_of_a_head_of_ten_with_eight_turning(source, target, order):
    op = IndexerRows(heads=2, order=indexer_order(source, target, dim=10, rope=8))
    rows = [[f"{head}{row}" for head in "ab" for row in range(10)]]
    assert labels(op, rows, 20, 1, 0) == " ".join(f"{head}{row}" for head in "ab" for row in order.split())


def turned(x_TND: torch.Tensor, layout: RopeRows, rope: int) -> torch.Tensor:
    """Rotary embedding as an implementation with this layout computes it: angle t * 50^(-2k/rope) for pair k."""
    start = 0 if layout.first else x_TND.shape[-1] - rope
    turning = x_TND[..., start : start + rope]
    if layout.interleaved:
        one, two = turning[..., 0::2], turning[..., 1::2]
    else:
        one, two = turning[..., : rope // 2], turning[..., rope // 2 :]
    angle = torch.arange(len(x_TND))[:, None, None] * 50.0 ** (-2 * torch.arange(rope // 2, dtype=torch.float64) / rope)
    pair = torch.stack([one * angle.cos() - two * angle.sin(), two * angle.cos() + one * angle.sin()])
    rest = torch.cat([x_TND[..., :start], x_TND[..., start + rope :]], dim=-1)
    return torch.cat([*pair, rest], dim=-1)  # any fixed order: only dot products follow


def index_scores(weights: dict[str, torch.Tensor], layout: RopeRows, x_TH: torch.Tensor) -> torch.Tensor:
    """[T, T, heads] dot products of queries and normalised keys, heads of 20 of which 8 turn."""
    q = (x_TH @ weights["wq_b"].T).unflatten(-1, (-1, 20))
    k = torch.layer_norm(x_TH @ weights["wk"].T, (20,), weights["norm"], weights["bias"], 1e-6)[:, None]
    return torch.einsum("tnd,snd->tsn", turned(q, layout, 8), turned(k, layout, 8).expand(-1, 3, -1))


@pytest.mark.parametrize("target", ROPE_ROWS, ids=str)
@pytest.mark.parametrize("source", ROPE_ROWS, ids=str)
def test_every_reordering_of_indexer_rows_keeps_the_scores_and_inverts(source, target):
    generator = torch.Generator().manual_seed(0)
    shapes = {"wq_b": (60, 7), "wk": (20, 7), "norm": (20,), "bias": (20,)}
    hf = {
        name: torch.randn(shape, generator=generator, dtype=torch.float64).mul_(0.4) for name, shape in shapes.items()
    }
    x = torch.randn(11, 7, generator=generator, dtype=torch.float64)
    live, back = {}, {}
    for name, tensor in hf.items():
        heads = 3 if name == "wq_b" else 1
        there, home = (
            IndexerRows(heads=heads, order=indexer_order(*pair, dim=20, rope=8))
            for pair in ((source, target), (target, source))
        )
        live[name] = fill(there, [tensor], tuple(tensor.shape), 1, 0)
        back[name] = fill(home, [live[name]], tuple(tensor.shape), 1, 0)
        assert torch.equal(back[name], tensor), name
    want = index_scores(hf, source, x)
    assert (index_scores(live, target, x) - want).abs().max() < 1e-12
    if source != target:  # without the reordering the scores are others
        assert (index_scores(hf, target, x) - want).abs().max() > 0.1


def test_indexer_row_layouts_are_named():
    assert [RopeRows.named(str(layout)) for layout in ROPE_ROWS] == ROPE_ROWS
    assert str(LAST_PAIRS) == "last-interleaved" and RopeRows.named("first-half") == FIRST_HALVES
    with pytest.raises(ValueError, match=r"'first'.*'first-half', 'first-interleaved', 'last-half'"):
        RopeRows.named("first")


@pytest.mark.parametrize(("ep", "etp"), [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (4, 2)])
def test_expert_parallel_ranks_hold_consecutive_experts_and_cut_each_like_a_dense_mlp(ep, etp):
    """Expert e has gate rows e.g0 .. e.g3 and up rows e.u0 .. e.u3."""
    block = 8 // ep
    matrices = {"experts.{e}.gate": (4, 3), "experts.{e}.up": (4, 3)}
    rule = Rule("experts.{j}", matrices, PerExpert.of(GateUp(), ep), experts=block)
    held = {}
    for j in range(block):
        sources = rule.sources(Place(0, j))
        numbers = [name.split(".")[1] for name in sources]
        rows = [[f"{e}.{part}{row}" for row in range(4)] for e, part in zip(numbers, "gu" * ep, strict=True)]
        for rank in range(ep):
            for piece in range(etp):
                found = labels(rule.op, rows, 8 // etp, ep * etp, rank * etp + piece)
                held[rank, j, piece] = found
    cut = [["g0 g1 g2 g3 u0 u1 u2 u3"], ["g0 g1 u0 u1", "g2 g3 u2 u3"]][etp - 1]
    assert held == {
        (e // block, e % block, piece): " ".join(f"{e}.{row}" for row in cut[piece].split())
        for e in range(8)
        for piece in range(etp)
    }


def test_columns_of_a_single_expert_are_cut_over_expert_tensor_ranks():
    op = PerExpert.of(Rename(dim=1), ep=2)
    hf = [torch.arange(12.0).view(2, 6) + 100 * expert for expert in (1, 5)]  # local expert 1 of 4 on both ranks
    shards = [fill(op, hf, (2, 3), 4, part) for part in range(4)]
    assert [shard[0].tolist() for shard in shards] == [
        [100.0, 101.0, 102.0],
        [103.0, 104.0, 105.0],
        [500.0, 501.0, 502.0],
        [503.0, 504.0, 505.0],
    ]


def test_experts_of_another_shape_or_cut_are_refused():
    op, one = PerExpert.of(GateUp(), ep=2), [(4, 3), (4, 3)]
    assert op.parts_of((8, 3), one * 2, 2) == 2 and op.parts_of((4, 3), one * 2, 4) == 4
    assert op.parts_of((4, 3), one * 2, 2) is None  # half an expert without expert-tensor parallelism
    assert op.parts_of((8, 3), one * 2, 4) is None  # a whole one with it
    assert op.parts_of((8, 4), one * 2, 2) is None
