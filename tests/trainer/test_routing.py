"""Routes that come back from the rollout: usable, dropped, live, or the end of the run."""

import pytest
import torch

from engines.base import Sample
from engines.routes import RouteShape
from trainer.reward.result import RewardResult
from trainer.rollout.scored import Scored
from trainer.routing import RouteOptions, check_routes

SHAPE = RouteShape(layers=3, moe_layers=(1, 2), experts=8, topk=2)


def _sample(rows: int | None, response: int = 4, finish: str = "stop") -> Sample:
    routes = None if rows is None else torch.tensor([[0, 0], [1, 2], [5, 3]]).expand(rows, 3, 2).to(torch.int16)
    return Sample("p", 0, (7, 8, 9), [1] * response, [-1.0] * response, finish, 0, routes)


def test_good_samples_pass_and_keep_their_rows():
    routes = check_routes([_sample(6), _sample(7)], RouteOptions(SHAPE))
    assert [row.shape for row in routes.rows] == [(7, 3, 2)] * 2 and routes.invalid == {}
    assert routes.rows[0][0].tolist() == [[-1, -1], [1, 2], [5, 3]]
    assert routes.metrics["routing/invalid_ratio"].value == 0.0


def test_a_bad_sample_is_counted_and_routes_live():
    routes = check_routes([_sample(6)] * 3 + [_sample(8)], RouteOptions(SHAPE, max_invalid_ratio=0.25))
    assert list(routes.invalid) == [3] and "expected 6 or 7 rows" in routes.invalid[3]
    assert bool((routes.rows[3] == -1).all()) and routes.rows[3].shape == (7, 3, 2)
    assert routes.metrics["routing/invalid_samples"].value == 1
    assert routes.metrics["routing/invalid_ratio"].value == 0.25


@pytest.mark.parametrize(("policy", "ratio"), [("drop", 0.2), ("live", 0.2), ("error", 1.0)])
def test_too_many_bad_samples_end_the_step_with_an_example(policy, ratio):
    with pytest.raises(RuntimeError, match=r"1 of 4 samples.*sample 0 of 'p': got no routes.*max_invalid_ratio"):
        check_routes([_sample(6)] * 3 + [_sample(None)], RouteOptions(SHAPE, policy, ratio))


def test_an_aborted_sample_without_tokens_is_not_at_fault():
    routes = check_routes([_sample(None, 0, "abort")], RouteOptions(SHAPE, "error"))
    assert routes.invalid == {} and routes.rows[0].shape == (3, 3, 2)
    with pytest.raises(RuntimeError, match="no routes"):
        check_routes([_sample(None, 2, "abort")], RouteOptions(SHAPE, "error"))


def test_a_dropped_sample_is_no_evidence():
    result = RewardResult(score=1.0)
    assert Scored(None, _sample(6), "", result).counts
    assert not Scored(None, _sample(6), "", result, routable=False).counts
