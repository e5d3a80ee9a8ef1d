"""What an advantage estimator may read: rewards, masks and groups of a packed batch.

Shape legend: T packed tokens, B samples.

Three masks meet here. The *model mask* marks tokens sampled by the policy. The *final mask* (the batch's
`loss_mask`) marks the tokens that may learn; filters and rejection shrink it. The *baseline set* holds the
samples whose reward may enter the statistics of their group; the others get advantage 0.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from engines.batch import TrainBatch


@dataclass(frozen=True)
class AdvantageOptions:
    """norm_adv_by_std_in_grpo  divide by the group's deviation (grpo, grpo_passk); False is Dr.GRPO
    singleton                what a group with one sample gets: its `reward` (no baseline exists; for n=1) or `zero`
    gamma                    discount per model token (gae, reinforce, reinforce_plus_plus)
    lam                      decay of later errors (gae)
    f_norm                   constant divisor of gpg
    whiten_advantages        whiten whatever the estimator; some always do
    whiten_scope             statistics of whitening over the `batch` or per `domain`
    advantage_clip           bound of the finished advantage, None is off
    """

    norm_adv_by_std_in_grpo: bool = True
    singleton: Literal["reward", "zero"] = "zero"
    gamma: float = 1.0
    lam: float = 1.0
    f_norm: float = 1.0
    whiten_advantages: bool = False
    whiten_scope: Literal["batch", "domain"] = "batch"
    advantage_clip: float | None = None


@dataclass(frozen=True)
class AdvantageInput:
    """What an estimator may read.

    rewards_T [T] float64   token rewards, 0 outside model tokens; a sample's reward is their sum
    model_mask_T [T] bool   tokens sampled by the policy
    mask_T [T] bool         final mask, a subset of the model mask
    lengths                 B tokens per sequence (prompt included)
    uids                    B group names; the order of samples means nothing
    baseline                B flags: in the baseline set of its group
    domains                 B domain names, for whiten_scope=domain
    greedy_scores           B scores of the greedy answer to the same prompt, for remax
    shift                   B values added to the whitened advantages of a sample; 0 outside the baseline set
    extras_T                further [T] tensors: old_log_probs, values, sum_pi_squared, rollout_is_weights
    """

    rewards_T: Tensor
    model_mask_T: Tensor
    mask_T: Tensor
    lengths: tuple[int, ...]
    uids: tuple[str, ...]
    baseline: tuple[bool, ...]
    domains: tuple[str, ...] | None = None
    greedy_scores: tuple[float, ...] | None = None
    shift: tuple[float, ...] | None = None
    extras_T: dict[str, Tensor] | None = None

    @classmethod
    def from_batch(
        cls,
        batch: TrainBatch,
        scores: Sequence[float | None],
        uids: Sequence[str],
        domains: Sequence[str] | None = None,
        greedy_scores: Sequence[float | None] | None = None,
    ) -> AdvantageInput:
        """Put each score on the last model token of its sample and find the baseline set.

        `tokens["loss_mask"]` is the final mask. `tokens["response_mask"]` is the model mask and `tokens["rs_mask"]`
        what rejection left of it; both default to the mask before them. A score of None or nan means that
        no valid reward exists, and so does such a greedy score. A score of a sample without model tokens is written
        nowhere.
        """
        assert len(scores) == len(uids) == len(batch), f"{len(scores)} scores, {len(uids)} uids, {len(batch)} samples"
        final_T = batch.tokens["loss_mask"].bool()
        model_T = batch.tokens["response_mask"].bool() if "response_mask" in batch.tokens else final_T
        kept_T = batch.tokens["rs_mask"].bool() if "rs_mask" in batch.tokens else model_T
        greedy = [0.0] * len(scores) if greedy_scores is None else list(greedy_scores)
        valid = [_is_number(score) and _is_number(other) for score, other in zip(scores, greedy, strict=True)]
        samples = cls(
            rewards_T=torch.zeros(batch.num_tokens, dtype=torch.float64),
            model_mask_T=model_T,
            mask_T=final_T & model_T,
            lengths=tuple(batch.lengths),
            uids=tuple(uids),
            baseline=(),
            domains=None if domains is None else tuple(domains),
            greedy_scores=None if greedy_scores is None else tuple(s if _is_number(s) else 0.0 for s in greedy),
            extras_T=dict(batch.tokens),
        )
        baseline = tuple(
            flag and last is not None and bool(kept_T[last])
            for flag, last in zip(valid, samples.last_model_token, strict=True)
        )
        rewards = [float(score) if flag else 0.0 for score, flag in zip(scores, valid, strict=True)]
        return replace(samples, baseline=baseline).with_rewards(rewards)

    def with_rewards(self, rewards: Sequence[float]) -> AdvantageInput:
        """The same samples with other rewards (B numbers), each on the last model token of its sample."""
        last_T = torch.zeros(len(self.rewards_T), dtype=torch.bool)
        last_T[[last for last in self.last_model_token if last is not None]] = True
        return replace(self, rewards_T=torch.where(last_T, self.broadcast(rewards), 0.0))

    def rows(self, values_T: Tensor) -> list[Tensor]:
        return list(torch.split(values_T, self.lengths))

    @cached_property
    def rewards(self) -> list[float]:
        """B sample rewards: sums of token rewards over model tokens."""
        return [math.fsum(row[row != 0].tolist()) for row in self.rows(self.rewards_T * self.model_mask_T)]

    @cached_property
    def last_model_token(self) -> list[int | None]:
        """B places in [0, T) of the token that carries a sample's reward; None without model tokens."""
        starts = itertools.accumulate(self.lengths, initial=0)
        places = [row.nonzero().flatten() for row in self.rows(self.model_mask_T)]
        return [start + int(place[-1]) if len(place) else None for start, place in zip(starts, places, strict=False)]

    @cached_property
    def model_tokens(self) -> list[int]:
        """B counts of model tokens."""
        return [int(row.sum()) for row in self.rows(self.model_mask_T)]

    def groups(self) -> list[list[int]]:
        """Row numbers of the baseline set, one list per uid in order of first appearance."""
        members: dict[str, list[int]] = {}
        for row, uid in enumerate(self.uids):
            if self.baseline[row]:
                members.setdefault(uid, []).append(row)
        return list(members.values())

    @property
    def baseline_T(self) -> Tensor:
        """[T] bool: model tokens of the samples in the baseline set."""
        return self.broadcast([float(flag) for flag in self.baseline]).bool()

    def stacked(self, values_T: Tensor) -> Tensor:
        """[B, L] of the values on model tokens: left-aligned rows, zero-padded to the longest."""
        rows = [row[mask] for row, mask in zip(self.rows(values_T), self.rows(self.model_mask_T), strict=True)]
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)

    def unstacked(self, values_BL: Tensor) -> Tensor:
        """[T] float64 inverse of `stacked`, 0 outside model tokens."""
        present_BL = torch.arange(values_BL.shape[1]) < torch.tensor(self.model_tokens).unsqueeze(1)
        values_T = torch.zeros_like(self.rewards_T)
        values_T[self.model_mask_T] = values_BL[present_BL]
        return values_T

    def broadcast(self, values: Sequence[float]) -> Tensor:
        """[T] float64: each sample's value on its model tokens, 0 elsewhere."""
        values_B = torch.tensor(values, dtype=torch.float64)
        return torch.repeat_interleave(values_B, torch.tensor(self.lengths)) * self.model_mask_T


def _is_number(score: float | None) -> bool:
    return score is not None and math.isfinite(score)
