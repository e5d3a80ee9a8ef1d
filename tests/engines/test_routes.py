"""The rules of routing replay on plain tensors: numbers worked out by hand."""

from types import SimpleNamespace

import pytest
import torch

from engines.base import ForwardOptions
from engines.batch import TrainBatch
from engines.hf_routing import weigh
from engines.routes import LIVE, RoutePass, RouteShape, align, filler, matters, replay_metrics, replayed_rows

SHAPE = RouteShape(layers=3, moe_layers=(1, 2), experts=8, topk=2)


def _routes(rows: int, columns: int) -> torch.Tensor:
    """Column l holds experts l and l + 1."""
    column = torch.arange(columns)
    return torch.stack([column, column + 1], 1).expand(rows, columns, 2)


def test_columns_are_global_layers_and_dense_ones_are_ignored():
    whole = align(_routes(4, 3), 4, SHAPE)
    assert whole[0].tolist() == [[LIVE, LIVE], [1, 2], [2, 3]]
    garbage = _routes(4, 3).clone()
    garbage[:, 0] = 0  # what vLLM writes for a dense layer
    assert torch.equal(align(garbage, 4, SHAPE), whole)
    assert align(_routes(4, 2), 4, SHAPE)[0].tolist() == [[LIVE, LIVE], [0, 1], [1, 2]]  # experts' layers only
    with pytest.raises(ValueError, match="expected 3 layers or 2 with experts"):
        align(_routes(4, 4), 4, SHAPE)
    with pytest.raises(ValueError, match="2 of these each"):
        align(_routes(4, 3)[..., :1], 4, SHAPE)


def test_prompt_3_and_response_4_need_6_or_7_rows():
    full, short = align(_routes(7, 3), 7, SHAPE), align(_routes(6, 3), 7, SHAPE)
    assert full.shape == short.shape == (7, 3, 2) and full.dtype == torch.int16
    assert torch.equal(full[:6], short[:6])
    assert short[6].tolist() == [[LIVE, LIVE], [0, 1], [0, 1]]
    for rows in (8, 5):
        with pytest.raises(ValueError, match="expected 6 or 7 rows"):
            align(_routes(rows, 3), 7, SHAPE)
    with pytest.raises(ValueError, match="no routes"):
        align(None, 7, SHAPE)


@pytest.mark.parametrize(
    ("bad", "message"),
    [((8, 1), "ids 1..8; expected 0..7"), ((-1, 1), "ids -1..3"), ((3, 3), "one expert twice")],
)
def test_impossible_experts_are_refused(bad, message):
    routes = _routes(4, 3).clone()
    routes[2, 1] = torch.tensor(bad)
    with pytest.raises(ValueError, match=message):
        align(routes, 4, SHAPE)


def test_routes_that_were_never_written_are_refused():
    one = RouteShape(layers=1, moe_layers=(0,), experts=4, topk=1)
    with pytest.raises(ValueError, match="expert 0 for every token"):
        align(torch.zeros(3, 1, 1), 3, one)
    assert align(torch.tensor([0, 0, 1]).view(3, 1, 1), 3, one).flatten().tolist() == [0, 0, 1]


def test_fillers_are_distinct_and_flood_no_expert():
    shape = RouteShape(layers=1, moe_layers=(0,), experts=8, topk=3)
    rows = filler(8, shape)
    assert rows[:3].tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 0]]
    assert all(len(set(row)) == 3 for row in rows.tolist())
    assert rows.flatten().bincount().tolist() == [3] * 8


@pytest.mark.parametrize(
    ("config", "layers"),
    [
        (dict(num_experts=8, mlp_only_layers=[0, 3]), (1, 2, 4, 5)),
        (dict(num_experts=8, decoder_sparse_step=2), (1, 3, 5)),
        (dict(n_routed_experts=8, first_k_dense_replace=2), (2, 3, 4, 5)),
    ],
)
def test_shape_of_a_model(config, layers):
    shape = RouteShape.of(dict(num_hidden_layers=6, num_experts_per_tok=2, **config))
    assert shape == RouteShape(layers=6, moe_layers=layers, experts=8, topk=2)


def test_a_dense_model_has_no_routes():
    with pytest.raises(ValueError, match=r"got a dense model \(qwen3\).*router_replay.mode=disabled"):
        RouteShape.of({"model_type": "qwen3", "num_hidden_layers": 2})


def test_recording_and_replaying_exclude_each_other():
    with pytest.raises(AssertionError, match="not both"):
        ForwardOptions(micro_batch_size=1, record_routes=True, replay_routes=True)
    assert RoutePass.of(ForwardOptions(micro_batch_size=1)) is None


def test_targets_are_kept_by_micro_batch_and_layer_and_reading_changes_nothing():
    routes = RoutePass(replay=True)
    live = torch.tensor([[0, 1], [2, 3], [4, 5]])
    targets = {n: {1: torch.full((3, 2), n) + torch.tensor([0, 1]), 2: live.flip(1)} for n in (0, 1)}
    for number, columns in targets.items():
        routes.dictate(number, columns, torch.ones(3, dtype=torch.bool))
    for number in (0, 1, 0, 1, 1, 0):  # forward, forward, recomputation in any order
        routes.enter(number)
        assert routes.choose(1, live).tolist() == [[number, number + 1]] * 3
        assert torch.equal(routes.choose(2, live), live.flip(1))
    # Layer 1: {0,1} of micro-batch 0 agrees with live in row 0 (2 experts), {1,2} with 0,1 in one and 2,3 in one.
    # Layer 2 agrees everywhere (6 per micro-batch): the order inside a token does not matter.
    assert routes.overlap() == (2 + 2 + 6 + 6, 24)
    routes.check_asked([0, 1], [1, 2])
    with pytest.raises(AssertionError, match=r"\[\(0, 3\), \(1, 3\)\]"):
        routes.check_asked([0, 1], [1, 2, 3])


def test_rows_without_a_route_go_live_and_do_not_count():
    routes = RoutePass(replay=True)
    live = torch.tensor([[0, 1], [2, 3], [4, 5]])
    target = torch.tensor([[6, 7], [LIVE, LIVE], [4, 0]], dtype=torch.int16)
    routes.dictate(0, {0: target}, torch.tensor([True, True, False]))
    routes.enter(0)
    assert routes.choose(0, live).tolist() == [[6, 7], [2, 3], [4, 0]]
    assert routes.overlap() == (0, 2)


def test_a_router_outside_every_micro_batch_is_an_error():
    with pytest.raises(AssertionError, match="outside any micro-batch"):
        RoutePass(replay=False).choose(0, torch.tensor([[0, 1]]))


def test_routes_travel_with_their_tokens_through_a_batch():
    batch = TrainBatch.pack([[7, 8, 9], [5, 6], [4]])
    batch.tokens["routes"] = torch.arange(6).view(6, 1, 1).expand(6, 3, 2).to(torch.int16).contiguous()
    part = batch.select([2, 0])
    assert part.tokens["routes"][:, 0, 0].tolist() == [5, 0, 1, 2]
    assert part.tokens["routes"].shape == (4, 3, 2) and part.tokens["routes"].dtype == torch.int16
    assert [row.shape[0] for row in part.rows(part.tokens["routes"])] == [1, 3]
    assert torch.equal(part.masked().to("cpu").tokens["routes"], part.tokens["routes"])
    assert matters(part).tolist() == [False, True, True, False]


def test_rows_that_count_and_the_metrics():
    batch = TrainBatch.pack([[7, 8, 9], [5, 6]])
    routes = torch.cat([align(_routes(2, 3), 3, SHAPE), torch.full((2, 3, 2), LIVE, dtype=torch.int16)])
    assert replayed_rows(batch, routes) == 2  # not the last row, not the sample that goes live
    metrics = replay_metrics(3, 4, 2)
    assert metrics["routing/overlap_ratio"].value == 0.75 and metrics["routing/replayed_rows"].value == 2


@pytest.mark.parametrize(("renormalise", "expected"), [(False, [0.087144, 0.032059]), (True, [0.731059, 0.268941])])
def test_forced_experts_weigh_what_the_live_router_gives_them(renormalise, expected):
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]], requires_grad=True)
    weights = weigh(SimpleNamespace(norm_topk_prob=renormalise), logits, torch.tensor([[2, 3]]))
    assert weights[0].tolist() == pytest.approx(expected, abs=1e-6)
    weights[0, 0].backward()
    assert bool((logits.grad[0, 2:].abs() > 1e-3).all())


def test_the_correction_bias_chooses_and_does_not_weigh():
    gate = SimpleNamespace(e_score_correction_bias=torch.tensor([9.0, 9.0, 0.0, 0.0]), norm_topk_prob=True)
    gate.routed_scaling_factor = 2.5
    weights = weigh(gate, torch.tensor([[0.0, 1.0, 2.0, 3.0]]), torch.tensor([[0, 1]]))
    scores = torch.tensor([0.0, 1.0]).sigmoid()
    torch.testing.assert_close(weights[0], 2.5 * scores / scores.sum())
