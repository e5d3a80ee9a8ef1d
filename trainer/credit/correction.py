"""Rollout correction: the sampler is not quite the policy that learns from its tokens.

Shape legend: T packed tokens, B samples.

Three policies are told apart (arXiv 2110.00641): *rollout* sampled, *old* is the training engine's view of the same
weights, *current* is being updated. With rho = exp(old - rollout), once per step and before any split:

- importance weights multiply the policy loss of each token (trainer/credit/importance.py);
- rejection rules edit the mask, so that denominators shrink and a sample may leave its group's statistics;
- a sample whose rollout log-probs are missing is dropped.

In *bypass* mode there is no pass for the old policy: old := rollout, and the loss does the rest.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from engines.batch import TrainBatch
from engines.metric import Metric, Metrics
from trainer.by_sample import mean_by_sample, sample_of_token, sum_by_sample
from trainer.credit.importance import LOG_LIMIT, WeightRule, raw_weights

PREFIX = "rollout_corr"
BY_SAMPLE = ("sequence", "geometric")  # weight kinds with one value per sample


@dataclass(frozen=True)
class Rejection:
    """Keep what lies in [low, high].

    `name` is level_measure. Levels: token, or the sample's seq_sum, seq_mean, seq_max. Measures: k2 = (log rho)^2 / 2
    and k3 = rho - 1 - log rho, which have no `low`; k1 bounds the ratio itself (rho, its product over the sample, or
    its geometric mean).
    """

    name: str
    high: float
    low: float | None = None


@dataclass(frozen=True)
class CorrectionOptions:
    """weights          importance weights of the policy loss; None: all 1
    batch_normalize  divide them by their mean over the batch's tokens (samples for kinds sequence and geometric)
    rejections       rules that must all hold
    veto             reject samples with any token ratio below it; None: off
    bypass           rollout log-probs take the place of the old ones
    """

    weights: WeightRule | None = None
    batch_normalize: bool = False
    rejections: tuple[Rejection, ...] = ()
    veto: float | None = None
    bypass: bool = False

    def __post_init__(self) -> None:
        assert not (self.bypass and (self.weights or self.rejections or self.veto)), "bypass leaves all to the loss"


def correct(batch: TrainBatch, options: CorrectionOptions) -> Metrics:
    """Adds tokens rs_mask (1 on model tokens that stay) and, with weights, rollout_is_weights (float32, detached).

    Reads tokens response_mask (or else loss_mask), rollout_log_probs (nan where the rollout gave none) and
    old_log_probs, which bypass mode sets instead.
    """
    model_T = batch.tokens["response_mask" if "response_mask" in batch.tokens else "loss_mask"].bool()
    row_T, count = sample_of_token(batch), len(batch)
    rollout_T = batch.tokens["rollout_log_probs"]
    missing_B = sum_by_sample((rollout_T.isnan() & model_T).double(), row_T, count) > 0
    usable_T = model_T & ~missing_B[row_T]
    metrics = {f"{PREFIX}/samples_without_log_probs": Metric("count", float(missing_B.sum()))}
    batch.tokens["rs_mask"] = usable_T.float()
    if options.bypass:
        batch.tokens["old_log_probs"] = torch.where(usable_T, rollout_T, 0.0)
    if options.bypass or not usable_T.any():
        return metrics
    old_T = batch.tokens["old_log_probs"].detach()
    ratios = Ratios(old_T.double(), rollout_T.double(), usable_T, row_T, count)
    metrics |= _off_policy_metrics(ratios)
    if options.weights is not None:
        weights_T, more = importance_weights(ratios, options.weights, options.batch_normalize)
        batch.tokens["rollout_is_weights"] = weights_T.float()
        metrics |= more
    if options.rejections or options.veto is not None:
        keep_T, more = reject(ratios, options)
        batch.tokens["rs_mask"] = keep_T.float()
        metrics |= more
    return metrics


@dataclass(frozen=True)
class Ratios:
    """Log-probs of the model tokens (mask_T) under both policies, [T] float64; row_T is the sample of each token."""

    old_T: Tensor
    rollout_T: Tensor
    mask_T: Tensor
    row_T: Tensor
    num_samples: int

    @cached_property
    def log_T(self) -> Tensor:
        """[T] log rho, unclipped; 0 outside the mask."""
        return torch.where(self.mask_T, self.old_T - self.rollout_T, 0.0)

    @cached_property
    def filled_B(self) -> Tensor:
        """[B] bool: samples with a model token; statistics of samples skip the others."""
        return self.sum(self.mask_T.double()) > 0

    def tokens(self, values_T: Tensor) -> Tensor:
        return values_T[self.mask_T]

    def sum(self, values_T: Tensor) -> Tensor:
        """[B] over model tokens."""
        return sum_by_sample(torch.where(self.mask_T, values_T, 0.0), self.row_T, self.num_samples)

    def mean(self, values_T: Tensor) -> Tensor:
        """[B] over model tokens."""
        return mean_by_sample(values_T, self.mask_T, self.row_T, self.num_samples)

    def any(self, flags_T: Tensor) -> Tensor:
        """[B] bool: a model token of the sample is flagged."""
        return self.sum(flags_T.double()) > 0


# --- weights --------------------------------------------------------------------------------------------------


def importance_weights(ratios: Ratios, rule: WeightRule, batch_normalize: bool = False) -> tuple[Tensor, Metrics]:
    """[T] weights (1 outside the mask) and their metrics, which describe them before normalisation."""
    raw_T = raw_weights(ratios.log_T, ratios.mask_T, ratios.row_T, ratios.num_samples, rule.kind)
    weights_T = torch.where(ratios.mask_T, rule.apply(raw_T), 1.0)
    metrics = _weight_metrics(ratios, rule, raw_T, weights_T)
    if batch_normalize:
        by_sample = ratios.mean(weights_T)[ratios.filled_B]
        values = by_sample if rule.kind in BY_SAMPLE else ratios.tokens(weights_T)
        # All weights dropped: there is nothing to rescale.
        factor = float(values.mean()) or 1.0
        weights_T = torch.where(ratios.mask_T, weights_T / factor, 1.0)
        metrics[f"{PREFIX}/rollout_is_batch_norm_factor"] = Metric("last", factor)
    return weights_T, metrics


def _weight_metrics(ratios: Ratios, rule: WeightRule, raw_T: Tensor, weights_T: Tensor) -> Metrics:
    raw, weights = ratios.tokens(raw_T), ratios.tokens(weights_T)
    raw_B, mean_B = (ratios.mean(values_T)[ratios.filled_B] for values_T in (raw_T, weights_T))
    low = 1 / rule.high if rule.low is None else rule.low
    units = raw_B if rule.kind in BY_SAMPLE else raw  # what has a weight of its own
    square = float(weights.square().mean())
    values = {
        **_spread("rollout_is", weights),
        "rollout_is_ratio_fraction_high": _share(units > rule.high),
        "rollout_is_ratio_fraction_low": _share(units < low),
        "rollout_is_eff_sample_size": float(weights.mean()) ** 2 / square if square else 0.0,
        **_spread("rollout_is_seq", mean_B),
        "rollout_is_seq_max_deviation": float((mean_B - 1).abs().max()),
        "rollout_is_seq_fraction_high": _share(raw_B > rule.high),
        "rollout_is_seq_fraction_low": _share(raw_B < low),
    }
    if rule.low is not None:
        values["rollout_is_oob_ratio"] = _share((raw < rule.low) | (raw > rule.high))
    return _named(values)


# --- rejection ------------------------------------------------------------------------------------------------


def reject(ratios: Ratios, options: CorrectionOptions) -> tuple[Tensor, Metrics]:
    """[T] bool: the model tokens that every rule keeps; and what each rule saw and took away."""
    keep_T, metrics = ratios.mask_T, {}
    for rule in options.rejections:
        kept_T, more = _apply_rule(ratios, rule)
        keep_T, metrics = keep_T & kept_T, metrics | more
    if options.veto is not None:
        vetoed_B = ratios.any(ratios.log_T.clamp(-LOG_LIMIT, LOG_LIMIT).exp() < options.veto)
        keep_T = keep_T & ~vetoed_B[ratios.row_T]
        metrics[f"{PREFIX}/rollout_rs_veto_seq_masked_fraction"] = Metric("last", _share(vetoed_B[ratios.filled_B]))
    return keep_T, metrics | _named(_taken("rollout_rs", ratios, keep_T))


def _apply_rule(ratios: Ratios, rule: Rejection) -> tuple[Tensor, Metrics]:
    """[T] bool verdict on every token, and metrics of the compared numbers (of tokens, or of samples)."""
    level, _, measure = rule.name.rpartition("_")
    values = _statistic(ratios, level, measure)
    keep = (values <= rule.high) & (values >= (-torch.inf if rule.low is None else rule.low))
    seen = ratios.tokens(values) if level == "token" else values[ratios.filled_B]
    keep_T = (keep if level == "token" else keep[ratios.row_T]) & ratios.mask_T
    name = f"rollout_rs_{rule.name}"
    return keep_T, _named(
        {
            **_spread(name, seen),
            f"{name}_fraction_high": _share(seen > rule.high),
            f"{name}_fraction_low": 0.0 if rule.low is None else _share(seen < rule.low),
            **_taken(name, ratios, keep_T),
        }
    )


def _statistic(ratios: Ratios, level: str, measure: str) -> Tensor:
    """[T] at token level, else [B]."""
    if measure == "k1":  # a ratio: aggregated as a logarithm
        log = {"token": lambda x: x, "seq_sum": ratios.sum, "seq_mean": ratios.mean}[level](ratios.log_T)
        return log.clamp(-LOG_LIMIT, LOG_LIMIT).exp()
    log_T = ratios.log_T.clamp(-LOG_LIMIT, LOG_LIMIT)
    values_T = log_T.square() / 2 if measure == "k2" else torch.expm1(log_T) - log_T
    if level == "seq_max":  # measures are at least 0, so masked positions cannot win
        start_B = values_T.new_zeros(ratios.num_samples)
        return start_B.scatter_reduce(0, ratios.row_T, torch.where(ratios.mask_T, values_T, 0.0), "amax")
    return {"token": lambda x: x, "seq_sum": ratios.sum, "seq_mean": ratios.mean}[level](values_T)


def _taken(name: str, ratios: Ratios, keep_T: Tensor) -> dict[str, float]:
    """Share of tokens that are rejected, and of samples that lost at least one."""
    lost_T = ratios.mask_T & ~keep_T
    return {
        f"{name}_masked_fraction": _share(ratios.tokens(lost_T)),
        f"{name}_seq_masked_fraction": _share(ratios.any(lost_T)[ratios.filled_B]),
    }


# --- how far are the two policies apart? ----------------------------------------------------------------------


def _off_policy_metrics(ratios: Ratios) -> Metrics:
    """Divergence and perplexities; ppl = exp(-mean log-prob of a sample), averaged over samples."""
    log_T = ratios.log_T.clamp(-LOG_LIMIT, LOG_LIMIT)
    old_B, rollout_B = (-ratios.mean(values_T)[ratios.filled_B] for values_T in (ratios.old_T, ratios.rollout_T))
    difference_B = old_B - rollout_B
    product_B = ratios.sum(ratios.log_T)[ratios.filled_B].clamp(-LOG_LIMIT, LOG_LIMIT)
    return _named(
        {
            "kl": -_mean(ratios.tokens(ratios.log_T)),
            "k3_kl": _mean(ratios.tokens(torch.expm1(log_T) - log_T)),
            "training_ppl": _mean(old_B.exp()),
            "rollout_ppl": _mean(rollout_B.exp()),
            "training_log_ppl": _mean(old_B),
            "rollout_log_ppl": _mean(rollout_B),
            "log_ppl_diff": _mean(difference_B),
            "log_ppl_abs_diff": _mean(difference_B.abs()),
            "log_ppl_diff_max": float(difference_B.max()),
            "log_ppl_diff_min": float(difference_B.min()),
            "ppl_ratio": _mean(difference_B.exp()),
            "chi2_token": _mean(ratios.tokens((2 * log_T).exp())) - 1,
            "chi2_seq": _mean((2 * product_B).exp()) - 1,
        }
    )


def _spread(name: str, values: Tensor) -> dict[str, float]:
    """Mean, extremes and unbiased deviation (0 for a single value) of at least one value."""
    return {
        f"{name}_mean": _mean(values),
        f"{name}_max": float(values.max()),
        f"{name}_min": float(values.min()),
        f"{name}_std": float(values.std()) if len(values) > 1 else 0.0,
    }


def _mean(values: Tensor) -> float:
    return float(values.mean())


def _share(flags: Tensor) -> float:
    return _mean(flags.double())


def _named(values: dict[str, float]) -> Metrics:
    """Computed over the whole step at once: nothing is left to merge."""
    return {f"{PREFIX}/{name}": Metric("last", value) for name, value in values.items()}
