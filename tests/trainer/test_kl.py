"""KL estimators: values, gradients, and what they do in expectation."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer.kl import kl_estimate, penalised_rewards


def value_and_grad(name, log_prob, ref):
    log_probs = torch.tensor([float(log_prob)], requires_grad=True)
    value = kl_estimate(log_probs, torch.tensor([float(ref)]), name)
    (grad,) = torch.autograd.grad(value.sum(), log_probs)
    return value.item(), grad.item()


@pytest.mark.parametrize(
    ("name", "log_prob", "ref", "value", "grad"),
    [
        ("k1", -1, -2, 1, 1),
        ("kl", -2, -1, -1, 1),
        ("abs", -2, -1, 1, -1),
        ("k2", -1, -2, 0.5, 1),
        ("mse", -2, -1, 0.5, -1),
        ("k3", -1, -2, 0.36788, 0.63212),
        ("low_var_kl", -2, -1, 0.71828, -1.71828),
        ("k3+", -1, -2, 0.36788, 1),
        ("low_var_kl+", -2, -1, 0.71828, -1),
        ("k1+", -1, -2, 1, 1),
        ("k3", -200, -1, 10, 0),
        ("k3+", -200, -1, 10, -20),
        ("k3", -1, -200, 10, 0),
    ],
)
def test_values_and_gradients(name, log_prob, ref, value, grad):
    assert value_and_grad(name, log_prob, ref) == pytest.approx((value, grad), abs=1e-5)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("k2", [-0.014765, -0.193599, 0.208364]),
        ("k2+", [-0.014765, -0.193599, 0.208364]),
        ("k3+", [-0.014765, -0.193599, 0.208364]),
        ("k1+", [-0.014765, -0.193599, 0.208364]),
        ("k3", [0.036186, -0.245467, 0.209281]),
        ("k1", [0.0, 0.0, 0.0]),
    ],
)
def test_expected_gradient_over_a_categorical(name, expected):
    """Sum over all three outcomes of p(a) * gradient of the estimate at a; the exact KL is .156799."""
    theta = torch.tensor([0.2, -0.3, 0.5], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([0.0, 0.4, -0.2], dtype=torch.float64).log_softmax(0)
    log_probs = theta.log_softmax(0)
    assert (log_probs.exp() * (log_probs - reference)).sum().item() == pytest.approx(0.156799, abs=1e-6)
    loss = (log_probs.exp().detach() * kl_estimate(log_probs, reference, name)).sum()
    (grad,) = torch.autograd.grad(loss, theta)
    assert grad.tolist() == pytest.approx(expected, abs=1e-6)


@given(st.floats(-30, 0, width=32), st.floats(-30, 0, width=32))
def test_k3_is_never_negative(log_prob, ref):
    assert 0 <= value_and_grad("k3", log_prob, ref)[0] <= 10


def test_k3_of_a_tiny_difference_is_not_noise():
    assert value_and_grad("k3", -1.0, -1.0 - 2**-13)[0] == pytest.approx(0.5 * 2**-26, rel=2e-3)


def test_kl_in_reward():
    old, ref = torch.tensor([-1.0, -2.0, float("nan")]), torch.tensor([-1.5, -1.8, 0.0])
    rewards = torch.tensor([0.0, 1.0, 0.0], dtype=torch.float64)
    for name in ("kl", "kl+"):
        result = penalised_rewards(rewards, old, ref, torch.tensor([1, 1, 0]), name, 0.1)
        assert result.tolist() == pytest.approx([-0.05, 1.02, 0.0], abs=1e-6)


@pytest.mark.parametrize("name", ["full", "k4", "+", "k3++"])
def test_unknown_names(name):
    with pytest.raises(ValueError, match="expected one of"):
        kl_estimate(torch.zeros(1), torch.zeros(1), name)
