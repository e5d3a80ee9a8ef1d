"""Train against rollout: the numbers and the thresholds."""

import math

import pytest
import torch

from engines.metric import Metric
from trainer.consistency import (
    DIFF,
    LOG_DIFF,
    PEARSON,
    ConsistencyError,
    ConsistencyLimits,
    ConsistencyMonitor,
    probability_difference,
)

OLD, ROLLOUT = torch.tensor([0.90, 0.50, 0.10, 0.75]).log(), torch.tensor([0.89, 0.52, 0.10, 0.74]).log()


def test_worked_example():
    metrics = probability_difference(OLD, ROLLOUT, torch.ones(4))
    values = {name: metric.value for name, metric in metrics.items()}
    assert values[f"{DIFF}_mean"] == pytest.approx(0.01, rel=1e-4)
    assert values[f"{DIFF}_max"] == pytest.approx(0.02, rel=1e-4)
    assert values[f"{DIFF}_std"] == pytest.approx(0.008165, rel=1e-4)
    assert values[PEARSON] == pytest.approx(0.999316, rel=1e-5)
    assert values[f"{DIFF}_valid"] == 1
    logs = [abs(math.log(a / b)) for a, b in ((0.9, 0.89), (0.5, 0.52), (0.75, 0.74))]
    assert values[f"{LOG_DIFF}_mean"] == pytest.approx(sum(logs) / 4, rel=1e-4)
    assert values[f"{LOG_DIFF}_max"] == pytest.approx(math.log(0.52 / 0.5), rel=1e-4)


def test_masked_and_unscored_tokens_are_left_out():
    old = torch.cat([OLD, torch.tensor([math.nan, -1.0])])
    rollout = torch.cat([ROLLOUT, torch.tensor([-9.0, math.nan])])
    metrics = probability_difference(old, rollout, torch.tensor([1.0, 1, 1, 1, 0, 1]))
    assert metrics == probability_difference(OLD, ROLLOUT, torch.ones(4))


def test_nothing_to_compare():
    expected = {f"{DIFF}_valid": Metric("last", 0.0)}
    assert probability_difference(OLD, ROLLOUT, torch.zeros(4)) == expected
    assert probability_difference(OLD, torch.full((4,), math.nan), torch.ones(4)) == expected
    assert ConsistencyMonitor().check(1, expected) == []


def test_correlation_needs_two_tokens_and_variation():
    single = probability_difference(OLD[:1], ROLLOUT[:1], torch.ones(1))
    assert single[f"{DIFF}_std"].value == 0.0 and PEARSON not in single
    assert PEARSON not in probability_difference(torch.full((4,), -1.0), ROLLOUT, torch.ones(4))


def step(mean, log_mean=0.0):
    return {f"{DIFF}_mean": Metric("mean", mean), f"{LOG_DIFF}_mean": Metric("mean", log_mean)}


def test_patience_counts_consecutive_steps_only():
    monitor = ConsistencyMonitor()
    warned = [bool(monitor.check(i, step(m))) for i, m in enumerate([0.02, 0.02, 0.01, 0.02, 0.02, 0.02, 0.02])]
    assert warned == [False, False, False, False, False, True, False]  # .01 itself is healthy


def test_the_warning_names_the_five_causes():
    monitor = ConsistencyMonitor(ConsistencyLimits(patience=1))
    (text,) = monitor.check(7, step(0.02))
    for word in (
        "step 7",
        "implementation",
        "precision",
        "hyper-parameters",
        "parallel split",
        "randomness",
        "grad_norm",
    ):
        assert word in text


def test_fail_mean_stops_the_run():
    monitor = ConsistencyMonitor(ConsistencyLimits(fail_mean=0.05))
    monitor.check(1, step(0.05))
    with pytest.raises(ConsistencyError, match=r"got .* 0\.06; expected at most trainer\.consistency\.fail_mean=0\.05"):
        monitor.check(2, step(0.06))
    with pytest.raises(ConsistencyError):
        monitor.check(3, step(math.nan))


def test_stale_weights_by_jump_or_by_log_mean():
    monitor = ConsistencyMonitor()
    assert not any(monitor.check(i, step(0.001)) for i in range(3))
    assert monitor.check(3, step(0.0051))[0].startswith("step 3: stale or wrong rollout weights?")
    assert monitor.check(4, step(0.0049)) == []
    assert "log-prob difference" in ConsistencyMonitor().check(1, step(0.001, log_mean=0.11))[0]


def test_a_jump_between_roundings_is_no_jump():
    monitor = ConsistencyMonitor()
    assert not any(monitor.check(i, step(m)) for i, m in enumerate([0.0, 0.0, 1e-8, 1e-6, 9e-5]))
    assert ConsistencyMonitor(recent_means=[0.0, 0.0, 0.0]).check(4, step(0.001)) != []


def test_state_survives_a_resume():
    first = ConsistencyMonitor()
    for i in range(2):
        first.check(i, step(0.02))
    second = ConsistencyMonitor()
    second.load_state_dict(first.state_dict())
    assert second == first and second.check(2, step(0.02)) != []
