"""How far is the policy from the reference? Per-token estimators of KL(policy || reference).

With D = log_probs - ref_log_probs of tokens sampled from the policy (J. Schulman, "Approximating KL divergence"):

    name              value                gradient with respect to log_probs
    k1, kl            D                    1: its expectation is zero, useless as a loss
    abs               |D|                  sign(D)
    k2, mse           D^2 / 2              D: the gradient of the true divergence, in expectation
    k3, low_var_kl    exp(-D) + D - 1      1 - exp(-D): biased
    name+             as the name          clip(D, -20, 20): the value of one, the gradient of k2

Every clip precedes its exponential, so values and gradients stay finite.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

LOG_LIMIT = 20.0  # exp(20) = 4.9e8 is still far from float32 overflow
K3_LIMIT = 10.0  # one token must not dominate the loss


def k1(difference_T: Tensor) -> Tensor:
    return difference_T


def k2(difference_T: Tensor) -> Tensor:
    return difference_T.square() / 2


def k3(difference_T: Tensor) -> Tensor:
    """exp(-D) + D - 1 >= 0, capped at 10; no gradient beyond the cap."""
    negative_T = (-difference_T).clamp(-LOG_LIMIT, LOG_LIMIT)
    # expm1 keeps small differences: exp(-D) + D - 1 cancels to noise (even below 0) for |D| < 1e-4 in float32.
    return (torch.expm1(negative_T) - negative_T).clamp(0.0, K3_LIMIT)


ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": k1,
    "kl": k1,
    "abs": torch.abs,
    "k2": k2,
    "mse": k2,
    "k3": k3,
    "low_var_kl": k3,
}


def check_kl_type(name: str) -> None:
    """ValueError unless `name`, without one trailing `+`, is an estimator."""
    if name.removesuffix("+") not in ESTIMATORS:
        raise ValueError(
            f"got KL estimator {name!r}; expected one of {sorted(ESTIMATORS)}, each also with a trailing '+'; "
            "set actor_rollout_ref.actor.kl_loss_type or algorithm.kl_penalty"
        )


def kl_estimate(log_probs_T: Tensor, ref_log_probs_T: Tensor, name: str) -> Tensor:
    """[T] estimate with gradient through `log_probs_T` only."""
    check_kl_type(name)
    difference_T = log_probs_T - ref_log_probs_T.detach()
    value_T = ESTIMATORS[name.removesuffix("+")](difference_T)
    if not name.endswith("+"):
        return value_T
    slope_T = difference_T.detach().clamp(-LOG_LIMIT, LOG_LIMIT)
    return value_T.detach() + slope_T * (log_probs_T - log_probs_T.detach())


def penalised_rewards(
    rewards_T: Tensor, old_log_probs_T: Tensor, ref_log_probs_T: Tensor, mask_T: Tensor, name: str, coef: float
) -> Tensor:
    """[T] token rewards minus `coef` times the estimate on model tokens; no gradient, a `+` changes nothing."""
    old_T, ref_T = old_log_probs_T.detach().double(), ref_log_probs_T.detach().double()
    return torch.where(mask_T.bool(), rewards_T - coef * kl_estimate(old_T, ref_T, name.removesuffix("+")), rewards_T)
