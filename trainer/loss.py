"""What the policy should minimise: the callable an engine gets, aggregation, and the LOSSES table.

Shape legend: T packed tokens of one micro-batch, B its samples.

Every value is this micro-batch's share of a global one: a sum over its tokens divided by counts of the whole
mini-batch (`Denominators`), so neither micro-batches nor ranks change the gradient. Whatever stands at masked
positions, even nan, reaches nothing: log-probs are replaced there before any arithmetic, which also stops
gradients, and aggregation selects the others instead of multiplying by zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from engines.batch import Denominators, PolicyOutput, TrainBatch
from engines.metric import Metric, Metrics
from trainer.kl import check_kl_type, kl_estimate
from trainer.policy_loss import LOSSES, LossInput, sample_of_token, sum_by_sample

AggMode = Literal["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
AGG_MODES: tuple[str, ...] = get_args(AggMode)


@dataclass(frozen=True)
class LossOptions:
    """Names follow `actor_rollout_ref.actor.*`.

    clip_ratio_low, clip_ratio_high  distances from 1 of the ratio interval (gspo: of the sample ratio; geo_mean: in
                                     log space; dppo_*: divergence bounds)
    clip_ratio_c                     dual clip of vanilla, None is off; ratio cap of dppo_*
    loss_scale_factor                constant divisor of seq-mean-token-sum-norm, usually max_response_length
    dro_beta                         strength of dro's quadratic penalty
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

    def __post_init__(self) -> None:
        if self.loss_mode not in LOSSES:
            raise ValueError(
                f"got policy_loss.loss_mode={self.loss_mode!r}; expected one of {sorted(LOSSES)}; correct the name"
            )
        if self.loss_agg_mode not in AGG_MODES:
            raise ValueError(
                f"got loss_agg_mode={self.loss_agg_mode!r}; expected one of {list(AGG_MODES)}; correct the name"
            )
        if self.loss_agg_mode == "seq-mean-token-sum-norm" and not (self.loss_scale_factor or 0) > 0:
            raise ValueError(
                f"got loss_agg_mode=seq-mean-token-sum-norm with loss_scale_factor={self.loss_scale_factor}; "
                "expected a positive constant; set loss_scale_factor, for example to data.max_response_length"
            )
        if self.clip_ratio_low <= 0 or self.clip_ratio_high < 0:
            raise ValueError(
                f"got clip_ratio_low={self.clip_ratio_low}, clip_ratio_high={self.clip_ratio_high}; expected distances "
                "from 1, low above 0 and high at least 0; correct them"
            )
        if self.loss_mode in ("vanilla", "gspo", "cispo") and self.clip_ratio_low > 1:
            raise ValueError(
                f"got clip_ratio_low={self.clip_ratio_low}; expected a distance in (0, 1], since a ratio is positive; "
                "lower it (a limit of 0.1 is the distance 0.9)"
            )
        if self.clip_ratio_c is not None and self.clip_ratio_c <= 1:
            raise ValueError(
                f"got clip_ratio_c={self.clip_ratio_c}; expected more than 1, or null; raise it or set it to null"
            )
        if self.loss_mode == "dro" and not (self.dro_beta or 0) > 0:
            raise ValueError(f"got loss_mode=dro with dro_beta={self.dro_beta}; expected a positive one; set dro_beta")
        check_kl_type(self.kl_loss_type)


@dataclass(frozen=True)
class PolicyLoss:
    """loss = policy loss + kl_loss_coef * KL - entropy_coeff * entropy; picklable, called by the engine.

    Reads tokens: loss_mask, old_log_probs, advantages, ref_log_probs (with use_kl_loss), rollout_is_weights
    (optional); samples: loss_weights (optional). Rollout and sample weights act on the policy loss only.
    """

    options: LossOptions

    def __call__(self, output: PolicyOutput, batch: TrainBatch, denominators: Denominators) -> tuple[Tensor, Metrics]:
        """The micro-batch's share of the global loss (a scalar with gradient) and its metrics."""
        options, mask_T = self.options, batch.tokens["loss_mask"].bool()
        x = _masked_input(output, batch, mask_T)
        policy = LOSSES[options.loss_mode]
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
        metrics = _metrics({**parts, "actor/loss": loss}, flags, x)
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


def _masked_input(output: PolicyOutput, batch: TrainBatch, mask_T: Tensor) -> LossInput:
    def clean(values_T: Tensor, neutral: float = 0.0) -> Tensor:
        return torch.where(mask_T, values_T, neutral)

    weights_T = batch.tokens.get("rollout_is_weights")
    return LossInput(
        log_probs_T=clean(output.log_probs),
        old_log_probs_T=clean(batch.tokens["old_log_probs"]).detach(),
        advantages_T=clean(batch.tokens["advantages"]).detach(),
        weights_T=None if weights_T is None else clean(weights_T, 1.0).detach(),
        mask_T=mask_T,
        row_T=sample_of_token(batch),
        num_samples=len(batch),
    )


def _metrics(parts: dict[str, Tensor], flags: dict[str, Tensor], x: LossInput) -> Metrics:
    """Partials and token means, moved off the device in one transfer."""
    count, ratio_T = x.mask_T.sum(), x.ratio_T.detach()
    means = {**flags, "actor/ppo_kl": -x.difference_T, "actor/ratio_mean": ratio_T}
    sums = [torch.where(x.mask_T, values_T.detach().float(), 0.0).sum() for values_T in means.values()]
    highest = ratio_T.masked_fill(~x.mask_T, -torch.inf).amax()
    lowest = ratio_T.masked_fill(~x.mask_T, torch.inf).amin()
    values = torch.stack([*(part.detach() for part in parts.values()), *sums, count.float(), highest, lowest]).tolist()
    tokens, top, bottom = values[-3:]
    metrics = {name: Metric("partial", value) for name, value in zip(parts, values, strict=False)}
    metrics |= {name: Metric("mean", v, tokens) for name, v in zip(means, values[len(parts) : -3], strict=True)}
    if tokens:
        metrics |= {"actor/ratio_max": Metric("max", top), "actor/ratio_min": Metric("min", bottom)}
    return metrics
