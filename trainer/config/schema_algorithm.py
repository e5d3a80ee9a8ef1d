"""Rooms 4 and 5 of the data flow: advantages and what is corrected before the update."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from trainer.config.schema_actor import KlType

NormType = Literal["none", "batch", "group", "running"]


@dataclass(frozen=True)
class KlCtrl:
    type: Literal["fixed", "adaptive", "schedule"] = "fixed"  # how the coefficient moves
    kl_coef: float = 0.001  # coefficient at the start (of the KL loss: actor.kl_loss_coef)
    horizon: int = 10000  # adaptive: samples
    target_kl: float = 0.1  # adaptive: target
    schedule: list[Any] | None = None  # [[completed updates, coefficient], ...]
    interp: Literal["step", "linear", "cosine"] = "step"  # between two entries of the schedule


@dataclass(frozen=True)
class FilterGroups:
    enable: bool = False  # keep groups whose raw metric varies
    metric: str = "acc"  # raw metric
    max_num_gen_batches: int = 10  # generation rounds per step; 0 or less = capped at 64
    max_inflight_gen_batches: int = 1  # rounds at once
    std_threshold: float | None = None  # keep groups above this deviation
    mean_low: float | None = None  # keep groups above this mean
    mean_high: float | None = None  # keep groups below this mean
    on_exhausted: Literal["error", "fill_unfiltered"] = "error"  # when the rounds are used up
    carry_over: bool = False  # keep surplus groups for the next step


@dataclass(frozen=True)
class RolloutCorrection:
    rollout_is: Literal["token", "sequence", "geometric", "segment"] | None = None  # importance weights
    rollout_is_threshold: float | str | None = 2.0  # upper bound, or text "low_high"
    rollout_is_batch_normalize: bool = False  # mean weight 1
    rollout_rs: str | None = None  # rejection rules, comma-joined
    rollout_rs_threshold: float | str | None = None  # bounds, comma-joined
    bypass_mode: bool = False  # rollout log-probs take the place of the old ones
    loss_type: Literal["ppo_clip", "reinforce"] = "ppo_clip"  # loss in bypass mode
    rollout_token_veto_threshold: float | None = None  # reject samples with a token ratio below


@dataclass(frozen=True)
class Algorithm:
    adv_estimator: str = "gae"  # name of the estimator, or module:function
    gamma: float = 1.0  # discount
    lam: float = 1.0  # GAE lambda
    norm_adv_by_std_in_grpo: bool = True  # False = Dr.GRPO
    use_kl_in_reward: bool = False  # KL to the reference inside the reward
    kl_penalty: KlType = "kl"  # its estimator
    kl_ctrl: KlCtrl = field(default_factory=KlCtrl)
    filter_groups: FilterGroups = field(default_factory=FilterGroups)
    rollout_correction: RolloutCorrection = field(default_factory=RolloutCorrection)
    gdpo_reward_keys: list[str] | None = None  # rewards normalised one by one
    gdpo_reward_weights: list[float] | None = None  # their weights
    use_pf_ppo: bool = False  # preference feedback PPO
    pf_ppo: dict[str, Any] = field(default_factory=dict)  # its options
    norm_mean_type: NormType | None = None  # reinforce: what is subtracted
    norm_std_type: NormType | None = None  # reinforce: what is divided by
    reward_clip: float | None = None  # bound of the normalised reward
    advantage_clip: float | None = None  # bound of the advantage
    whiten_advantages: bool = False  # zero mean, unit variance over tokens
    whiten_scope: Literal["batch", "domain"] = "batch"  # over which samples
    max_len_mask: bool = False  # drop samples cut at the length limit
    difficulty_mask: bool = False  # drop groups outside the two thresholds
    difficulty_low_threshold: float | None = None  # mean accuracy
    difficulty_high_threshold: float | None = None  # mean accuracy
    error_max_len_clip: bool = False  # drop long wrong samples
    error_max_len_threshold: int | None = None  # tokens
    correct_threshold: float | None = None  # accuracy that counts as correct
    difficulty_loss_weight: bool = False  # weight samples by difficulty
    difficulty_source: Literal["field", "pass_rate"] | None = None  # where difficulty comes from
    difficulty_range: list[float] | None = None  # [low, high] of the field
    length_loss_weight: bool = False  # weight samples by length
