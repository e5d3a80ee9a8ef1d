"""Advantages with a value of their own for every token.

Shape legend: T packed tokens, B samples, G samples of one prompt, L model tokens of the longest sample.

Time counts model tokens only: what a tool wrote between two of them takes no time and gets no advantage.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from trainer.credit.advantage_input import AdvantageInput, AdvantageOptions


def gae(samples: AdvantageInput, options: AdvantageOptions) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (arXiv 1506.02438); whitened afterwards, which the returns are not.

    delta_t = r_t + gamma V_{t+1} - V_t, A_t = delta_t + gamma lam A_{t+1}, returns = A_t + V_t. V_t is the critic's
    value of the state before token t; after the last token it is 0. A sample whose reward does not count keeps
    A = 0, so its returns are what the critic says already.
    """
    extras = samples.extras_T or {}
    assert "values" in extras, "gae needs the token tensor 'values' of a critic"
    values_BL = samples.stacked(extras["values"].double())
    next_BL = torch.nn.functional.pad(values_BL, (0, 1))[:, 1:]
    delta_BL = samples.stacked(samples.rewards_T) + options.gamma * next_BL - values_BL
    advantages_BL = _discounted(delta_BL, options.gamma * options.lam)
    advantages_T = samples.unstacked(advantages_BL) * samples.baseline_T
    return advantages_T, advantages_T + samples.unstacked(values_BL)


def reinforce(samples: AdvantageInput, options: AdvantageOptions) -> tuple[Tensor, Tensor]:
    """Discounted reward to go, A_t = r_t + gamma A_{t+1}. Normalising the rewards first (trainer/credit/reward_norm.py)
    is what gives it a baseline."""
    returns_T = _returns(samples, options.gamma)
    return returns_T, returns_T


def reinforce_plus_plus(samples: AdvantageInput, options: AdvantageOptions) -> tuple[Tensor, Tensor]:
    """Discounted return of each token, whitened over the batch: ret_t = r_t + gamma ret_{t+1} (arXiv 2501.03262)."""
    returns_T = _returns(samples, options.gamma)
    return returns_T, returns_T


def remax(samples: AdvantageInput, options: AdvantageOptions) -> tuple[Tensor, Tensor]:
    """Return to go minus the score of one greedy answer to the same prompt (arXiv 2310.10505)."""
    assert samples.greedy_scores is not None, "remax needs greedy_scores: one greedy answer per prompt"
    returns_T = _returns(samples, 1.0)
    return returns_T - samples.broadcast(samples.greedy_scores) * samples.baseline_T, returns_T


def optimal_token_baseline(samples: AdvantageInput, options: AdvantageOptions) -> tuple[Tensor, Tensor]:
    """Return to go minus the variance-optimal baseline of each token position (arXiv 2602.07078).

    B_t = sum_j G_jt W_jt / sum_j W_jt over the samples of the group that have a t-th model token, with
    W_jt = sum_{s<=t} (1 - 2 pi_s + sum_v pi_v^2) rho_s^2. Where one sample alone still has tokens B_t = 0.
    """
    extras = samples.extras_T or {}
    missing = {"old_log_probs", "sum_pi_squared"} - extras.keys()
    assert not missing, f"optimal_token_baseline needs the token tensors {sorted(missing)}"
    rho_T = extras["rollout_is_weights"].double() if "rollout_is_weights" in extras else 1.0
    power_T = (1 - 2 * extras["old_log_probs"].double().exp() + extras["sum_pi_squared"].double()).clamp_min(0)
    weights_BL = samples.stacked(power_T * rho_T**2).cumsum(1)
    returns_T = _returns(samples, 1.0)
    returns_BL, present_BL = samples.stacked(returns_T), samples.stacked(samples.model_mask_T)
    advantages_BL = torch.zeros_like(returns_BL)
    for rows in samples.groups():
        if len(rows) > 1 or options.singleton == "reward":
            advantages_BL[rows] = _centre_positions(returns_BL[rows], weights_BL[rows], present_BL[rows])
    return samples.unstacked(advantages_BL), returns_T


def _centre_positions(returns_GL: Tensor, weights_GL: Tensor, present_GL: Tensor) -> Tensor:
    """Subtract the weighted mean of each column; equal columns are exactly 0, lone entries stay."""
    weights_GL = weights_GL * present_GL
    # A column of zero weight holds only certain tokens, whose gradient is zero: any baseline is right there.
    weights_GL = torch.where(weights_GL.sum(0) > 0, weights_GL, 1.0) * present_GL
    baseline_L = (returns_GL * weights_GL).sum(0) / weights_GL.sum(0).clamp_min(torch.finfo(torch.float64).tiny)
    highest_L = returns_GL.masked_fill(~present_GL, -math.inf).amax(0)
    lowest_L = returns_GL.masked_fill(~present_GL, math.inf).amin(0)
    baseline_L = torch.where(highest_L == lowest_L, highest_L, baseline_L)
    return returns_GL - torch.where(present_GL.sum(0) > 1, baseline_L, 0.0)


def _returns(samples: AdvantageInput, gamma: float) -> Tensor:
    """[T] float64 discounted reward to go of the samples in the baseline set, 0 elsewhere."""
    return samples.unstacked(_discounted(samples.stacked(samples.rewards_T), gamma)) * samples.baseline_T


def _discounted(values_BL: Tensor, factor: float) -> Tensor:
    """[B, L] with y_t = x_t + factor y_{t+1}."""
    result_BL = values_BL.clone()
    for t in reversed(range(values_BL.shape[1] - 1)):
        result_BL[:, t] += factor * result_BL[:, t + 1]
    return result_BL
