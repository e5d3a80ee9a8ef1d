"""Who gets the credit? Everything between the scored, re-scored samples of a step and its first optimizer step.

    rollout correction -> sample masks -> reward normalisation and clip -> KL in the reward -> advantages
    -> whitening -> length shift -> clip -> sample weights

The order is fixed: whitening, masks and clips do not commute. All of it runs once, on the whole batch, before ranks
and micro-batches exist, so none of them can change it.

Shape legend: T packed tokens, B samples.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from engines.batch import TrainBatch
from engines.metric import Metric, Metrics
from trainer.by_sample import sample_of_token
from trainer.credit.advantage import compute_advantages
from trainer.credit.advantage_input import AdvantageInput, AdvantageOptions
from trainer.credit.correction import CorrectionOptions, correct
from trainer.credit.length_penalty import LengthPenaltyOptions, advantage_shift
from trainer.credit.reward_norm import Moments, RewardNormOptions, normalise
from trainer.credit.sample_masks import MaskOptions, sample_masks
from trainer.credit.sample_weights import WeightOptions, sample_weights
from trainer.kl import penalised_rewards
from trainer.kl_control import KlControl, KlController, mean_kl
from trainer.rollout.scored import Scored


@dataclass(frozen=True)
class RewardKl:
    """KL to the reference inside the reward: its estimator (trainer/kl.py) and its coefficient over the run."""

    estimator: str = "kl"
    control: KlControl = field(default_factory=KlControl)


@dataclass(frozen=True)
class CreditOptions:
    """estimator       name in ADVANTAGES or "module:function"
    length_penalty  acts here in stage `advantage`; in stage `reward` it has acted on the scores
    """

    estimator: str = "grpo"
    advantage: AdvantageOptions = field(default_factory=AdvantageOptions)
    norm: RewardNormOptions = field(default_factory=RewardNormOptions)
    correction: CorrectionOptions | None = None
    masks: MaskOptions = field(default_factory=MaskOptions)
    reward_kl: RewardKl | None = None
    length_penalty: LengthPenaltyOptions | None = None
    weights: WeightOptions = field(default_factory=WeightOptions)


class CreditState:
    """What a step leaves to the next: moments of the rewards so far per domain, and the KL coefficient."""

    def __init__(self, options: CreditOptions) -> None:
        self.running: dict[str, Moments] = {}
        self.kl = KlController(options.reward_kl.control) if options.reward_kl is not None else None

    def state_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {
            "running": {domain: moments.state_dict() for domain, moments in self.running.items()},
            "kl": self.kl.state_dict() if self.kl is not None else {},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.running = {domain: Moments(**moments) for domain, moments in state["running"].items()}
        if self.kl is not None:
            self.kl.load_state_dict(state["kl"])


def assign_credit(
    batch: TrainBatch,
    scored: Sequence[Scored],
    options: CreditOptions,
    state: CreditState,
    *,
    step: int,
    greedy_scores: Sequence[float | None] | None = None,
) -> Metrics:
    """Sets tokens advantages, returns (both 0 outside the final mask) and loss_mask, and samples loss_weights.

    batch          in the order of `scored`; tokens response_mask and loss_mask (0 on samples that do not count),
                   old_log_probs, and what the options read: rollout_log_probs, ref_log_probs, values, sum_pi_squared
    step           completed updates
    greedy_scores  per sample, the score of the greedy answer to the same prompt (remax); None where it was aborted
    """
    metrics = correct(batch, options.correction) if options.correction is not None else {}
    kept, more = sample_masks(scored, options.masks)
    metrics |= more | _apply_masks(batch, kept)
    samples = AdvantageInput.from_batch(
        batch,
        [each.result.score if each.counts else None for each in scored],
        [each.item.uid for each in scored],
        [each.item.row.domain for each in scored],
        greedy_scores,
    )
    samples, more = _token_rewards(batch, samples, options, state, step)
    metrics |= more
    if options.length_penalty is not None and options.length_penalty.stage == "advantage":
        shift, more = advantage_shift(scored, samples.baseline, options.length_penalty, step)
        samples, metrics = replace(samples, shift=tuple(shift)), metrics | more
    result = compute_advantages(options.estimator, samples, options.advantage)
    batch.tokens["advantages"], batch.tokens["returns"] = result.advantages_T, result.returns_T
    metrics |= result.metrics
    if options.weights.active:
        valid = [bool(row.any()) for row in batch.rows(batch.tokens["loss_mask"])]
        weights, more = sample_weights(scored, valid, options.weights)
        batch.samples["loss_weights"] = torch.tensor(weights, dtype=torch.float32)
        metrics |= more
    return metrics


def _apply_masks(batch: TrainBatch, kept: Sequence[bool]) -> Metrics:
    """final mask = loss_mask * rs_mask * sample_mask, written back to loss_mask; how many samples keep a token."""
    final_T = batch.tokens["loss_mask"].bool() & torch.tensor(kept)[sample_of_token(batch)]
    if "rs_mask" in batch.tokens:
        final_T &= batch.tokens["rs_mask"].bool()
    batch.tokens["loss_mask"] = final_T.float()
    used = sum(bool(row.any()) for row in batch.rows(final_T))
    return {
        "actor/final_mask_ratio": Metric("mean", used, len(batch)),
        "actor/samples_used": Metric("count", used),
    }


def _token_rewards(
    batch: TrainBatch, samples: AdvantageInput, options: CreditOptions, state: CreditState, step: int
) -> tuple[AdvantageInput, Metrics]:
    """Normalise and clip the sample rewards, subtract the KL from every token, clip again."""
    metrics: Metrics = {}
    if options.norm != RewardNormOptions(singleton=options.norm.singleton):
        values, metrics = normalise(
            samples.rewards, samples.uids, samples.domains, samples.baseline, options.norm, state.running
        )
        samples = samples.with_rewards(values)
    if options.reward_kl is not None:
        rewards_T, more = _subtract_kl(batch, samples, options.reward_kl, state.kl, step)
        samples, metrics = replace(samples, rewards_T=rewards_T), metrics | more
        if options.norm.clip:
            bound, valid = options.norm.clip, rewards_T[samples.mask_T]
            share = Metric("mean", float((valid.abs() > bound).sum()), valid.numel())
            samples = replace(samples, rewards_T=rewards_T.clamp(-bound, bound))
            metrics["critic/token_reward_clip_frac"] = share
    return samples, metrics


def _subtract_kl(
    batch: TrainBatch, samples: AdvantageInput, kl: RewardKl, controller: KlController, step: int
) -> tuple[Tensor, Metrics]:
    """[T] token rewards minus coefficient * KL; the controller moves after its coefficient was used."""
    coefficient, divergence = controller.coefficient(step), mean_kl(batch, kl.estimator)
    rewards_T = penalised_rewards(
        samples.rewards_T,
        batch.tokens["old_log_probs"],
        batch.tokens["ref_log_probs"],
        samples.model_mask_T,
        kl.estimator,
        coefficient,
    )
    metrics = {"actor/reward_kl_penalty_coeff": Metric("last", coefficient)}
    if math.isfinite(divergence):
        filled = sum(count > 0 for count in samples.model_tokens)
        metrics["actor/reward_kl_penalty"] = Metric("mean", divergence * filled, filled)
    controller.update(divergence, len(batch))
    return rewards_T, metrics
