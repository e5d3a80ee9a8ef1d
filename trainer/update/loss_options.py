"""What a policy loss can be told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from trainer.credit.importance import WeightRule
from trainer.kl import check_kl_type
from trainer.update.policy_loss import find_loss

AggMode = Literal["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
AGG_MODES: tuple[str, ...] = get_args(AggMode)
RATIO_CLIPPING = ("vanilla", "gspo", "cispo", "clip_cov")  # their interval is [1 - low, 1 + high] of a ratio


@dataclass(frozen=True)
class LossOptions:
    """Names follow `actor_rollout_ref.actor.*`.

    loss_mode                        a key of LOSSES, or "module:function" (trainer/update/policy_loss.py says how)
    clip_ratio_low, clip_ratio_high  distances from 1 of the ratio interval (gspo: of the sample ratio; geo_mean: in
                                     log space; dppo_*: divergence bounds)
    clip_ratio_c                     dual clip of vanilla, None is off; ratio cap of dppo_*
    loss_scale_factor                constant divisor of seq-mean-token-sum-norm, usually max_response_length
    dro_beta                         strength of dro's quadratic penalty
    clip_cov_*                       share of tokens without loss, and the covariances they may have
    kl_cov_ratio, ppo_kl_coef        share of tokens that get coef |D| on top
    length_loss_coef                 weight of the differentiable length loss (trainer/update/length_loss.py)
    length_free_len, length_max_len  response tokens at which its penalty begins and is full
    rollout_weights                  importance weights inside loss_mode bypass_reinforce; None: all 1
    bypass                           old log-probs are the rollout's: the loss reports how far the policy is from them
    old_is_current                   one optimizer step follows the rollout: the old log-probs are those of the
                                     update's own forward pass, and the batch holds none
    seed                             of the random choices of clip_cov
    """

    loss_mode: str = "vanilla"
    clip_ratio_low: float = 0.2
    clip_ratio_high: float = 0.2
    clip_ratio_c: float | None = 3.0
    loss_agg_mode: AggMode = "token-mean"
    loss_scale_factor: float | None = None
    use_kl_loss: bool = False
    kl_loss_coef: float = 0.001
    kl_loss_type: str = "low_var_kl"
    entropy_coeff: float = 0.0
    tau_pos: float = 1.0
    tau_neg: float = 1.05
    dro_beta: float | None = None
    clip_cov_ratio: float = 2e-4
    clip_cov_lb: float = 1.0
    clip_cov_ub: float = 5.0
    kl_cov_ratio: float = 2e-4
    ppo_kl_coef: float = 0.1
    length_loss_coef: float = 0.0
    length_free_len: int = 0
    length_max_len: int | None = None
    rollout_weights: WeightRule | None = None
    bypass: bool = False
    old_is_current: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        find_loss(self.loss_mode)
        self._check_aggregation()
        self._check_clips()
        if self.loss_mode == "dro" and not (self.dro_beta or 0) > 0:
            raise ValueError(f"got loss_mode=dro with dro_beta={self.dro_beta}; expected a positive one; set dro_beta")
        if self.length_loss_coef and not 0 <= self.length_free_len < (self.length_max_len or 0):
            raise ValueError(
                f"got length_free_len={self.length_free_len}, length_max_len={self.length_max_len}; expected "
                "0 <= free < max; set actor.length_loss.free_len below data.max_response_length"
            )
        check_kl_type(self.kl_loss_type)

    def _check_aggregation(self) -> None:
        if self.loss_agg_mode not in AGG_MODES:
            raise ValueError(
                f"got loss_agg_mode={self.loss_agg_mode!r}; expected one of {list(AGG_MODES)}; correct the name"
            )
        if self.loss_agg_mode == "seq-mean-token-sum-norm" and not (self.loss_scale_factor or 0) > 0:
            raise ValueError(
                f"got loss_agg_mode=seq-mean-token-sum-norm with loss_scale_factor={self.loss_scale_factor}; "
                "expected a positive constant; set loss_scale_factor, for example to data.max_response_length"
            )

    def _check_clips(self) -> None:
        if self.clip_ratio_low <= 0 or self.clip_ratio_high < 0:
            raise ValueError(
                f"got clip_ratio_low={self.clip_ratio_low}, clip_ratio_high={self.clip_ratio_high}; expected distances "
                "from 1, low above 0 and high at least 0; correct them"
            )
        if self.loss_mode in RATIO_CLIPPING and self.clip_ratio_low > 1:
            raise ValueError(
                f"got clip_ratio_low={self.clip_ratio_low}; expected a distance in (0, 1], since a ratio is positive; "
                "lower it (a limit of 0.1 is the distance 0.9)"
            )
        if self.clip_ratio_c is not None and self.clip_ratio_c <= 1:
            raise ValueError(
                f"got clip_ratio_c={self.clip_ratio_c}; expected more than 1, or null; raise it or set it to null"
            )
        if not self.clip_cov_lb < self.clip_cov_ub:
            raise ValueError(
                f"got clip_cov_lb={self.clip_cov_lb}, clip_cov_ub={self.clip_cov_ub}; expected a lower bound below "
                "the upper one; correct them"
            )
