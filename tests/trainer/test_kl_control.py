"""The KL coefficient over the run."""

import math

import pytest
import torch

from engines.batch import TrainBatch
from trainer.kl_control import KlControl, KlController, mean_kl, scheduled


def test_fixed_never_moves():
    controller = KlController(KlControl(kl_coef=0.05))
    controller.update(3.0, 256)
    assert [controller.coefficient(step) for step in (0, 9)] == [0.05, 0.05] and controller.state_dict() == {}


@pytest.mark.parametrize(
    ("kl", "expected"), [(0.2, 0.100512), (0.05, 0.099488), (0.101, 0.1000256), (math.nan, 0.1), (math.inf, 0.1)]
)
def test_adaptive_moves_towards_the_target(kl, expected):
    control = KlControl(type="adaptive", kl_coef=0.1, target_kl=0.1, horizon=10000)
    controller = KlController(control)
    assert controller.coefficient(0) == 0.1  # used before it moves
    controller.update(kl, 256)
    assert controller.coefficient(1) == pytest.approx(expected, rel=1e-9)
    resumed = KlController(control)
    resumed.load_state_dict(controller.state_dict())
    for each in (controller, resumed):
        each.update(0.3, 100)
    assert resumed.coefficient(2) == controller.coefficient(2) != pytest.approx(expected)


def test_a_schedule_counts_completed_updates():
    controller = KlController(KlControl(type="schedule", schedule=((0, 0.05), (300, 0.01))))
    assert [controller.coefficient(k) for k in (0, 299, 300, 9999)] == [0.05, 0.05, 0.01, 0.01]
    controller.update(1.0, 256)
    assert controller.coefficient(299) == 0.05 and controller.state_dict() == {}


@pytest.mark.parametrize(
    ("interp", "at_150", "at_200"),
    [("step", 0.05, 0.05), ("linear", 0.04, 0.03), ("cosine", 0.03 + 0.02 * math.cos(math.pi / 4), 0.03)],
)
def test_between_two_pairs(interp, at_150, at_200):
    pairs = ((100, 0.05), (300, 0.01))
    values = [scheduled(pairs, interp, k) for k in (0, 100, 150, 200, 300, 400)]
    assert values == pytest.approx([0.05, 0.05, at_150, at_200, 0.01, 0.01])


@pytest.mark.parametrize("pairs", [(), ((5, 0.1), (5, 0.2)), ((9, 0.1), (3, 0.2)), ((-1, 0.1),)])
def test_a_schedule_that_is_none(pairs):
    with pytest.raises(ValueError, match=r"kl_ctrl\.schedule"):
        KlControl(type="schedule", schedule=pairs)


@pytest.mark.parametrize("wrong", [{"horizon": 0}, {"target_kl": 0.0}])
def test_adaptive_needs_a_target_and_a_horizon(wrong):
    with pytest.raises(ValueError, match="above 0"):
        KlControl(type="adaptive", **wrong)


def test_mean_kl_is_a_mean_of_sample_means():
    """old [-1,-2], ref [-1.5,-1.8]: k1 .5 and -.2, mean .15; a sample of one token with .45; an empty one."""
    nan = math.nan
    batch = TrainBatch.pack(
        [[1] * 3, [1] * 2, [1] * 2],
        response_mask=[[0, 1, 1], [0, 1], [0, 0]],
        old_log_probs=[[nan, -1.0, -2.0], [nan, -1.0], [nan, nan]],
        ref_log_probs=[[nan, -1.5, -1.8], [nan, -1.45], [nan, nan]],
    )
    assert mean_kl(batch, "kl") == pytest.approx(0.3) == mean_kl(batch, "k1+")
    assert mean_kl(batch, "k2") == pytest.approx(((0.125 + 0.02) / 2 + 0.45**2 / 2) / 2)
    assert math.isnan(mean_kl(batch.select([2]), "kl"))
    assert torch.isnan(batch.tokens["old_log_probs"][0])  # nothing was written
