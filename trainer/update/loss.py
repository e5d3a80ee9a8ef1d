"""What the policy should minimise: the callable an engine gets, aggregation, and the LOSSES table.

Shape legend: T packed tokens of one micro-batch, B its samples.

Every value is this micro-batch's share of a global one: a sum over its tokens divided by counts of the whole
mini-batch (`Denominators`), so neither micro-batches nor ranks change the gradient. Whatever stands at masked
positions, even nan, reaches nothing: log-probs are replaced there before any arithmetic, which also stops
gradients, and aggregation selects the others instead of multiplying by zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engines.batch import Denominators, PolicyOutput, TrainBatch
from engines.metric import Metric, Metrics
from trainer.by_sample import sample_of_token, sum_by_sample
from trainer.consistency import DIFF, LOG_DIFF
from trainer.kl import kl_estimate
from trainer.update.covariance import select_cov
from trainer.update.length_loss import length_weights
from trainer.update.loss_options import AGG_MODES, AggMode, LossOptions
from trainer.update.policy_loss import LOSSES, SELECT_BY_COVARIANCE, LossInput, find_loss

__all__ = ["AGG_MODES", "LOSSES", "AggMode", "LossOptions", "PolicyLoss", "aggregate"]


@dataclass(frozen=True)
class PolicyLoss:
    """loss = policy loss + kl_loss_coef * KL - entropy_coeff * entropy + length_loss_coef * length term; picklable,
    called by the engine.

    Reads tokens: loss_mask, old_log_probs, advantages, ref_log_probs (with use_kl_loss), cov_selected (clip_cov,
    kl_cov: `prepare_mini`), rollout_is_weights (optional); samples: loss_weights (optional), length_weights (with a
    length loss: `prepare_batch`). Rollout and sample weights act on the policy loss only.
    """

    options: LossOptions

    def with_kl_coef(self, coefficient: float) -> PolicyLoss:
        """The same loss in a step whose KL coefficient is `coefficient`."""
        return replace(self, options=replace(self.options, kl_loss_coef=coefficient))

    def prepare_batch(self, batch: TrainBatch, uids: Sequence[str]) -> None:
        """Add what must be computed over a whole step: the length weights, from the response mask."""
        options = self.options
        if options.length_loss_coef != 0:
            weights_B = length_weights(batch, uids, options.length_free_len, options.length_max_len)
            batch.samples["length_weights"] = weights_B

    def prepare_mini(self, mini: TrainBatch, step: int, number: int) -> None:
        """Add what must be chosen over a whole mini-batch, before it is cut: number `number` of training step `step`
        (over all epochs)."""
        if self.options.loss_mode in SELECT_BY_COVARIANCE:
            mini.tokens["cov_selected"] = select_cov(mini, self.options, (self.options.seed, step, number))

    def __call__(self, output: PolicyOutput, batch: TrainBatch, denominators: Denominators) -> tuple[Tensor, Metrics]:
        """The micro-batch's share of the global loss (a scalar with gradient) and its metrics."""
        options, mask_T = self.options, batch.tokens["loss_mask"].bool()
        x = _masked_input(output, batch, mask_T, options.old_is_current)
        policy = find_loss(options.loss_mode)
        loss_T, flags = policy.function(x, options)

        def total(values_T: Tensor, mode: str, weights_B: Tensor | None = None) -> Tensor:
            return aggregate(values_T, mask_T, batch, denominators, mode, options.loss_scale_factor, weights_B)

        mode = policy.agg_mode or options.loss_agg_mode
        loss = pg_loss = total(loss_T, mode, batch.samples.get("loss_weights"))
        parts = {"actor/pg_loss": pg_loss}
        if options.use_kl_loss:
            kl_T = kl_estimate(x.log_probs_T, batch.tokens["ref_log_probs"], options.kl_loss_type)
            parts["actor/kl_loss"] = total(kl_T, options.loss_agg_mode)
            loss = loss + options.kl_loss_coef * parts["actor/kl_loss"]
        if output.entropy is not None:
            parts["actor/entropy_loss"] = total(output.entropy, options.loss_agg_mode)
            flags = {**flags, "actor/entropy": output.entropy}
        if options.entropy_coeff != 0:
            assert output.entropy is not None, "entropy_coeff needs ForwardOptions(entropy=True, entropy_grad=True)"
            loss = loss - options.entropy_coeff * parts["actor/entropy_loss"]
        if options.length_loss_coef != 0:
            length_T = batch.samples["length_weights"][x.row_T] * x.log_probs_T
            parts["actor/length_loss"] = options.length_loss_coef * total(length_T, options.loss_agg_mode)
            loss = loss + parts["actor/length_loss"]
        metrics = _metrics({**parts, "actor/loss": loss}, flags, x, options.bypass)
        if options.use_kl_loss:
            metrics["actor/kl_coef"] = Metric("last", options.kl_loss_coef)
        return loss, metrics


def aggregate(
    loss_T: Tensor,
    mask_T: Tensor,
    batch: TrainBatch,
    denominators: Denominators,
    mode: str,
    loss_scale_factor: float | None = None,
    weights_B: Tensor | None = None,
) -> Tensor:
    """This micro-batch's share of the global mean (or sum) of per-token losses.

    With N_tok and N_seq the global counts, len_i the unmasked tokens of sample i and w_i its weight (default 1):

        token-mean               sum_i w_i sum_t l / N_tok
        token-sum                sum_i w_i sum_t l
        seq-mean-token-sum       sum_i w_i sum_t l / N_seq
        seq-mean-token-mean      sum_i w_i (sum_t l / len_i) / N_seq
        seq-mean-token-sum-norm  sum_i w_i sum_t l / (N_seq loss_scale_factor)

    All are one weighted sum of tokens, whose weights depend on masks and counts alone. Without any valid
    token the result is 0 with zero gradients.
    """
    row_T, valid_T = sample_of_token(batch), mask_T.bool()
    scale_B = torch.ones(len(batch), dtype=torch.float32, device=loss_T.device)
    if mode == "token-mean":
        scale_B = scale_B / max(denominators.tokens, 1.0)
    elif mode.startswith("seq-mean"):
        scale_B = scale_B / max(denominators.sequences, 1.0)
    if mode == "seq-mean-token-mean":
        scale_B = scale_B / sum_by_sample(valid_T.float(), row_T, len(batch)).clamp_min(1.0)
    if mode == "seq-mean-token-sum-norm":
        scale_B = scale_B / loss_scale_factor
    if weights_B is not None:
        scale_B = scale_B * weights_B
    # where, not a product: nan * 0 is nan.
    return torch.where(valid_T, loss_T * scale_B[row_T], 0.0).sum()


def _masked_input(output: PolicyOutput, batch: TrainBatch, mask_T: Tensor, old_is_current: bool) -> LossInput:
    old_T = output.log_probs if old_is_current else batch.tokens["old_log_probs"]

    def clean(values_T: Tensor, neutral: float = 0.0) -> Tensor:
        return torch.where(mask_T, values_T, neutral)

    weights_T = batch.tokens.get("rollout_is_weights")
    return LossInput(
        log_probs_T=clean(output.log_probs),
        old_log_probs_T=clean(old_T).detach(),
        advantages_T=clean(batch.tokens["advantages"]).detach(),
        weights_T=None if weights_T is None else clean(weights_T, 1.0).detach(),
        mask_T=mask_T,
        row_T=sample_of_token(batch),
        num_samples=len(batch),
        batch=batch,
    )


def _metrics(parts: dict[str, Tensor], flags: dict[str, Tensor], x: LossInput, bypass: bool) -> Metrics:
    """Partials, token means and extremes, moved off the device in one transfer."""
    ratio_T = x.ratio_T.detach()
    means = {"actor/ppo_kl": -x.difference_T, "actor/ratio_mean": ratio_T, **flags}
    highest = {"actor/ratio_max": ratio_T}
    if bypass:  # nobody else compares the trainer with the rollout
        differences = _rollout_differences(x)
        means |= {f"{name}_mean": values_T for name, values_T in differences.items()}
        highest |= {f"{name}_max": values_T for name, values_T in differences.items()}
    sums = [torch.where(x.mask_T, values_T.detach().float(), 0.0).sum() for values_T in means.values()]
    tops = [values_T.masked_fill(~x.mask_T, -torch.inf).amax() for values_T in highest.values()]
    lowest = ratio_T.masked_fill(~x.mask_T, torch.inf).amin()
    values = torch.stack([*(part.detach() for part in parts.values()), *sums, *tops, lowest, x.mask_T.sum().float()])
    *values, bottom, tokens = values.tolist()
    first, second = len(parts), len(parts) + len(means)
    metrics = {name: Metric("partial", value) for name, value in zip(parts, values[:first], strict=True)}
    metrics |= {name: Metric("mean", v, tokens) for name, v in zip(means, values[first:second], strict=True)}
    if tokens:
        metrics |= {name: Metric("max", value) for name, value in zip(highest, values[second:], strict=True)}
        metrics["actor/ratio_min"] = Metric("min", bottom)
    return metrics


def _rollout_differences(x: LossInput) -> dict[str, Tensor]:
    """[T] distances of probabilities and log-probs between the current policy and the rollout (in bypass mode)."""
    now_T, rollout_T = x.log_probs_T.detach(), x.old_log_probs_T
    return {DIFF: (now_T.exp() - rollout_T.exp()).abs(), LOG_DIFF: (now_T - rollout_T).abs()}
