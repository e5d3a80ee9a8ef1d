"""Per-token policy losses, before aggregation: pure functions of one micro-batch and the LOSSES table.

Shape legend: T packed tokens, B samples. Notation: D = log_probs - old_log_probs, r = exp(D), A advantage,
lo and hi the clip distances. Each function returns the loss of every token [T] and, by metric name, [T]
tensors whose token means are logged. Values at masked positions are finite and mean nothing.

A loss of your own has the same signature and needs no change here. In `my_losses.py` somewhere on PYTHONPATH:

    def squared_ratio(x: LossInput, options: LossOptions) -> tuple[Tensor, dict[str, Tensor]]:
        loss_T = -x.advantages_T * x.ratio_T + (x.ratio_T - 1).square()
        return x.weighted(loss_T), {"actor/far_from_old": (x.ratio_T - 1).abs() > options.clip_ratio_high}

and `actor_rollout_ref.actor.policy_loss.loss_mode=my_losses:squared_ratio`. Masks, aggregation with the global
denominators, KL, entropy and metrics are added as for every other loss.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engines.batch import TrainBatch
from trainer.by_sample import mean_by_sample
from trainer.credit.importance import raw_weights
from trainer.own_function import load_function

if TYPE_CHECKING:
    from trainer.update.loss_options import LossOptions

LOG_RATIO_LIMIT = 20.0  # per-token log-ratios are clipped here before exp
SAMPLE_LOG_RATIO_LIMIT = 10.0  # upper clip of a sample's mean log-ratio (gspo)


@dataclass(frozen=True)
class LossInput:
    """One micro-batch with neutral numbers at masked positions (log-probs and advantages 0, weights 1).

    log_probs_T [T] carries gradient; old_log_probs_T, advantages_T, weights_T [T] do not; mask_T [T] bool;
    row_T [T] int64 is the sample of each token, of `num_samples`. `token` gives every other tensor of the batch.
    """

    log_probs_T: Tensor
    old_log_probs_T: Tensor
    advantages_T: Tensor
    weights_T: Tensor | None
    mask_T: Tensor
    row_T: Tensor
    num_samples: int
    batch: TrainBatch

    def token(self, name: str, neutral: float = 0.0) -> Tensor:
        """[T] the batch's token tensor of that name, detached, with `neutral` at masked positions."""
        return torch.where(self.mask_T, self.batch.tokens[name], neutral).detach()

    @cached_property
    def difference_T(self) -> Tensor:
        """D, clipped so that its exponential stays finite."""
        return (self.log_probs_T - self.old_log_probs_T).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)

    @cached_property
    def ratio_T(self) -> Tensor:
        return self.difference_T.exp()

    def weighted(self, loss_T: Tensor) -> Tensor:
        """Times the rollout importance weights, if there are any."""
        return loss_T if self.weights_T is None else loss_T * self.weights_T

    def sample_mean(self, values_T: Tensor) -> Tensor:
        """[T]: each token gets the mean over the unmasked tokens of its sample (0 if there are none)."""
        return mean_by_sample(values_T, self.mask_T, self.row_T, self.num_samples)[self.row_T]


LossTerms = tuple[Tensor, dict[str, Tensor]]


@dataclass(frozen=True)
class PolicyLossEntry:
    """`agg_mode` overrides loss_agg_mode for losses that are defined per sample."""

    function: Callable[[LossInput, LossOptions], LossTerms]
    agg_mode: str | None = None


def vanilla(x: LossInput, options: LossOptions) -> LossTerms:
    """PPO's clipped loss, max(-A r, -A clip(r, 1-lo, 1+hi)), with a dual clip for A < 0: at most -A c.

    arXiv 1707.06347; separate upper bound 2503.14476; dual clip 1912.09729.
    """
    loss_T, clipped_T = _clipped(x, x.ratio_T, options)
    metrics = {"actor/pg_clipfrac": clipped_T}
    if options.clip_ratio_c is not None:
        cap_T = -x.advantages_T * options.clip_ratio_c
        negative_T = x.advantages_T < 0
        metrics["actor/pg_clipfrac_lower"] = negative_T & (loss_T > cap_T)
        loss_T = torch.where(negative_T, torch.minimum(loss_T, cap_T), loss_T)
    return x.weighted(loss_T), metrics


def gspo(x: LossInput, options: LossOptions) -> LossTerms:
    """Clip the ratio of the whole sample: s = exp(mean_t D), its gradient shared by the tokens (arXiv 2507.18071).

    Only the mean is clipped, at +10: token outliers that cancel must cancel.
    """
    mean_T = x.sample_mean((x.log_probs_T - x.old_log_probs_T).detach()).clamp_max(SAMPLE_LOG_RATIO_LIMIT)
    ratio_T = (x.log_probs_T - x.log_probs_T.detach() + mean_T).exp()
    loss_T, clipped_T = _clipped(x, ratio_T, options)
    return x.weighted(loss_T), {"actor/pg_clipfrac": clipped_T}


def sapo(x: LossInput, options: LossOptions) -> LossTerms:
    """A soft gate instead of a clip: -A sigmoid(tau (r - 1)) 4 / tau, tau by the sign of A (arXiv 2511.20347).

    At r = 1 the gradient with respect to log_probs is -A.
    """
    tau_T = torch.where(x.advantages_T > 0, options.tau_pos, options.tau_neg)
    return x.weighted(-x.advantages_T * torch.sigmoid(tau_T * (x.ratio_T - 1)) * 4 / tau_T), {}


def cispo(x: LossInput, options: LossOptions) -> LossTerms:
    """Clip the weight, keep every token's gradient: -sg(clip(r, 1-lo, 1+hi)) A log_probs (arXiv 2506.13585)."""
    ratio_T = x.ratio_T.detach()
    bounded_T = ratio_T.clamp(1 - options.clip_ratio_low, 1 + options.clip_ratio_high)
    loss_T = -bounded_T * x.advantages_T * x.log_probs_T
    return x.weighted(loss_T), {"actor/pg_clipfrac": ratio_T != bounded_T}


def gpg(x: LossInput, options: LossOptions) -> LossTerms:
    """Plain policy gradient, -A log_probs (arXiv 2504.02546)."""
    return x.weighted(-x.advantages_T * x.log_probs_T), {}


def clip_cov(x: LossInput, options: LossOptions) -> LossTerms:
    """PPO's clipped loss without the tokens that would cost most entropy (arXiv 2505.22617; covariance.py).

    A selected token that is clipped anyway keeps its loss, which has no gradient.
    """
    loss_T, clipped_T = _clipped(x, x.ratio_T, options)
    cut_T = x.token("cov_selected").bool() & ~clipped_T
    loss_T = torch.where(cut_T, 0.0, loss_T)
    return x.weighted(loss_T), {"actor/pg_clipfrac": clipped_T, "actor/cov_selected_frac": cut_T}


def kl_cov(x: LossInput, options: LossOptions) -> LossTerms:
    """-A r, and coef |D| on the tokens that would cost most entropy (arXiv 2505.22617; covariance.py)."""
    selected_T = x.token("cov_selected")
    distance_T = x.difference_T.abs()
    loss_T = -x.advantages_T * x.ratio_T + options.ppo_kl_coef * selected_T * distance_T
    return x.weighted(loss_T), {"actor/ppo_kl": distance_T, "actor/cov_selected_frac": selected_T}


def geo_mean(x: LossInput, options: LossOptions) -> LossTerms:
    """GMPO: one value per sample, -mean(A) exp(mean_t m_t), clipped in log space (arXiv 2507.20673).

    m_t = sgn(A) min(sgn(A) D, sgn(A) clip(D, -lo, hi)). Rollout weights enter by their geometric mean.
    """
    sign_T = torch.sign(x.advantages_T)
    bounded_T = x.difference_T.clamp(-options.clip_ratio_low, options.clip_ratio_high)
    exponent_T = sign_T * torch.minimum(sign_T * x.difference_T, sign_T * bounded_T)
    loss_T = -x.sample_mean(x.advantages_T) * x.sample_mean(exponent_T).exp()
    if x.weights_T is not None:
        loss_T = loss_T * x.sample_mean(x.weights_T.log()).exp()
    return loss_T, {"actor/pg_clipfrac": sign_T * x.difference_T > sign_T * bounded_T}


def dppo_tv(x: LossInput, options: LossOptions) -> LossTerms:
    """Drop tokens that already moved too far in probability, |p - p_old|, the way A pushes (arXiv 2602.04879)."""
    moved_T = x.log_probs_T.detach().exp() - x.old_log_probs_T.exp()
    keep_T = torch.where(x.advantages_T > 0, moved_T <= options.clip_ratio_high, moved_T >= -options.clip_ratio_low)
    return _divergence_gate(x, keep_T, options)


def dppo_kl(x: LossInput, options: LossOptions) -> LossTerms:
    """As dppo_tv, by the KL divergence of Bernoulli(p_old) from Bernoulli(p) (arXiv 2602.04879)."""
    log_p_T, log_old_T = x.log_probs_T.detach(), x.old_log_probs_T
    old_T = log_old_T.exp()
    divergence_T = old_T * (log_old_T - log_p_T) + (1 - old_T) * (_log_complement(log_old_T) - _log_complement(log_p_T))
    keep_T = torch.where(
        x.advantages_T > 0,
        (divergence_T <= options.clip_ratio_high) | (log_p_T <= log_old_T),
        (divergence_T <= options.clip_ratio_low) | (log_p_T >= log_old_T),
    )
    return _divergence_gate(x, keep_T, options)


def dro(x: LossInput, options: LossOptions) -> LossTerms:
    """Policy gradient with a quadratic log-ratio penalty: -(A log_probs - beta/2 D^2)."""
    return x.weighted(-x.advantages_T * x.log_probs_T + options.dro_beta / 2 * x.difference_T.square()), {}


def bypass_reinforce(x: LossInput, options: LossOptions) -> LossTerms:
    """-A w log_probs, w = the importance weight of the current policy against the sampler, detached.

    For a batch without old log-probs of its own: those it holds are the sampler's. Chosen by
    algorithm.rollout_correction, not by loss_mode.
    """
    loss_T = -x.advantages_T * x.log_probs_T
    rule = options.rollout_weights
    if rule is None:
        return loss_T, {}
    log_ratio_T = x.log_probs_T.detach() - x.old_log_probs_T
    raw_T = raw_weights(log_ratio_T, x.mask_T, x.row_T, x.num_samples, rule.kind)
    weights_T = rule.apply(raw_T)
    return loss_T * weights_T, {"rollout_corr/rollout_is_mean": weights_T, "actor/pg_clipfrac": raw_T > rule.high}


LOSSES: dict[str, PolicyLossEntry] = {
    "vanilla": PolicyLossEntry(vanilla),
    "gspo": PolicyLossEntry(gspo, agg_mode="seq-mean-token-mean"),
    "sapo": PolicyLossEntry(sapo, agg_mode="seq-mean-token-mean"),
    "cispo": PolicyLossEntry(cispo),
    "clip_cov": PolicyLossEntry(clip_cov),
    "kl_cov": PolicyLossEntry(kl_cov),
    "gpg": PolicyLossEntry(gpg),
    # Every token of a sample carries the sample's value, so the mean over its tokens is that value.
    "geo_mean": PolicyLossEntry(geo_mean, agg_mode="seq-mean-token-mean"),
    "dppo_tv": PolicyLossEntry(dppo_tv),
    "dppo_kl": PolicyLossEntry(dppo_kl),
    "dro": PolicyLossEntry(dro),
    "bypass_reinforce": PolicyLossEntry(bypass_reinforce),
}
SELECT_BY_COVARIANCE = frozenset({"clip_cov", "kl_cov"})  # they read tokens cov_selected


def find_loss(name: str) -> PolicyLossEntry:
    """A built-in loss, or "module:function" imported; call it at start so that a wrong name fails early."""
    if name in LOSSES:
        return LOSSES[name]
    key = "actor_rollout_ref.actor.policy_loss.loss_mode"
    signature = "(LossInput, LossOptions) -> (loss_T, {metric name: values_T})"
    return PolicyLossEntry(load_function(name, key, sorted(LOSSES), signature))


def _clipped(x: LossInput, ratio_T: Tensor, options: LossOptions) -> tuple[Tensor, Tensor]:
    """PPO's pessimistic loss [T] and where its clipped branch is strictly larger [T] bool."""
    free_T = -x.advantages_T * ratio_T
    bounded_T = -x.advantages_T * ratio_T.clamp(1 - options.clip_ratio_low, 1 + options.clip_ratio_high)
    return torch.maximum(free_T, bounded_T), bounded_T > free_T


def _divergence_gate(x: LossInput, keep_T: Tensor, options: LossOptions) -> LossTerms:
    """-A sg(min(r, c)) log_probs on kept tokens, 0 on dropped ones."""
    ratio_T = x.ratio_T.detach()
    if options.clip_ratio_c is not None:
        ratio_T = ratio_T.clamp_max(options.clip_ratio_c)
    loss_T = torch.where(keep_T, -x.advantages_T * ratio_T * x.log_probs_T, 0.0)
    return x.weighted(loss_T), {"actor/pg_clipfrac": ~keep_T}


def _log_complement(log_p_T: Tensor) -> Tensor:
    """log(1 - p), finite also at p = 1."""
    return torch.log((-torch.expm1(log_p_T)).clamp_min(torch.finfo(log_p_T.dtype).tiny))
