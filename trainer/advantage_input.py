"""What an advantage estimator may read: rewards, masks and groups of a packed batch.

Shape legend: T packed tokens, B samples.

Three masks meet here. The *model mask* marks tokens sampled by the policy. The *final mask* (the batch's
`loss_mask`) marks the tokens that may learn; filters and rejection shrink it. The *baseline set* holds the
samples whose reward may enter the statistics of their group; the others get advantage 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from engines.batch import TrainBatch


@dataclass(frozen=True)
class AdvantageOptions:
    """norm_adv_by_std_in_grpo  divide by the group's deviation (grpo, grpo_passk); False is Dr.GRPO
    singleton                what a group with one sample gets: its `reward` (no baseline exists; for n=1) or `zero`
    gamma                    discount per model token (reinforce_plus_plus)
    f_norm                   constant divisor of gpg
    whiten_scope             statistics of the whitening estimators over the `batch` or per `domain`
    """

    norm_adv_by_std_in_grpo: bool = True
    singleton: Literal["reward", "zero"] = "zero"
    gamma: float = 1.0
    f_norm: float = 1.0
    whiten_scope: Literal["batch", "domain"] = "batch"


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
    extras_T                further [T] tensors: old_log_probs, sum_pi_squared, rollout_is_weights
    """

    rewards_T: Tensor
    model_mask_T: Tensor
    mask_T: Tensor
    lengths: tuple[int, ...]
    uids: tuple[str, ...]
    baseline: tuple[bool, ...]
    domains: tuple[str, ...] | None = None
    greedy_scores: tuple[float, ...] | None = None
    extras_T: dict[str, Tensor] | None = None

    @classmethod
    def from_batch(
        cls,
        batch: TrainBatch,
        scores: Sequence[float | None],
        uids: Sequence[str],
        domains: Sequence[str] | None = None,
        greedy_scores: Sequence[float] | None = None,
    ) -> AdvantageInput:
        """Put each score on the last model token of its sample and find the baseline set.

        `tokens["loss_mask"]` is the final mask. `tokens["response_mask"]` is the model mask and `tokens["rs_mask"]`
        what rejection left of it; both default to the mask before them. A score of None or nan means that
        no valid reward exists. A score of a sample without model tokens is written nowhere.
        """
        assert len(scores) == len(uids) == len(batch), f"{len(scores)} scores, {len(uids)} uids, {len(batch)} samples"
        final_T = batch.tokens["loss_mask"].bool()
        model_T = batch.tokens["response_mask"].bool() if "response_mask" in batch.tokens else final_T
        kept_T = batch.tokens["rs_mask"].bool() if "rs_mask" in batch.tokens else model_T
        rewards_T = torch.zeros(batch.num_tokens, dtype=torch.float64)
        baseline = []
        starts = batch.cu_seqlens[:-1].tolist()
        for score, start, row_mask in zip(scores, starts, batch.rows(model_T), strict=True):
            positions = row_mask.nonzero().flatten()
            usable = score is not None and math.isfinite(score) and len(positions) > 0
            if usable:
                carrier = start + int(positions[-1])
                rewards_T[carrier] = float(score)
                usable = bool(kept_T[carrier])
            baseline.append(usable)
        return cls(
            rewards_T=rewards_T,
            model_mask_T=model_T,
            mask_T=final_T & model_T,
            lengths=tuple(batch.lengths),
            uids=tuple(uids),
            baseline=tuple(baseline),
            domains=None if domains is None else tuple(domains),
            greedy_scores=None if greedy_scores is None else tuple(greedy_scores),
            extras_T=dict(batch.tokens),
        )

    def rows(self, values_T: Tensor) -> list[Tensor]:
        return list(torch.split(values_T, self.lengths))

    @cached_property
    def rewards(self) -> list[float]:
        """B sample rewards: sums of token rewards over model tokens."""
        return [math.fsum(row[row != 0].tolist()) for row in self.rows(self.rewards_T * self.model_mask_T)]

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

    def broadcast(self, values: Sequence[float]) -> Tensor:
        """[T] float64: each sample's value on its model tokens, 0 elsewhere."""
        values_B = torch.tensor(values, dtype=torch.float64)
        return torch.repeat_interleave(values_B, torch.tensor(self.lengths)) * self.model_mask_T
