"""Configuration -> what turns scores into advantages (trainer/credit/assign.py) and which groups are worth it."""

from __future__ import annotations

from trainer.config import Config
from trainer.credit.advantage_input import AdvantageOptions
from trainer.credit.assign import CreditOptions, RewardKl
from trainer.credit.correction import CorrectionOptions
from trainer.credit.length_penalty import LengthPenaltyOptions
from trainer.credit.reward_norm import RewardNormOptions
from trainer.credit.sample_masks import MaskOptions
from trainer.credit.sample_weights import WeightOptions
from trainer.kl_control import KlControl
from trainer.rollout.group_filter import DynamicSampling, FilterOptions

CORRECT = 1.0  # accuracy of a right answer unless algorithm.correct_threshold says otherwise


def credit_options(config: Config, correction: CorrectionOptions | None = None) -> CreditOptions:
    algorithm = config.algorithm
    singleton = "reward" if config.actor_rollout_ref.rollout.n == 1 else "zero"
    weighted = algorithm.difficulty_loss_weight
    span = algorithm.difficulty_range
    return CreditOptions(
        estimator=algorithm.adv_estimator,
        advantage=AdvantageOptions(
            norm_adv_by_std_in_grpo=algorithm.norm_adv_by_std_in_grpo,
            singleton=singleton,
            gamma=algorithm.gamma,
            lam=algorithm.lam,
            whiten_advantages=algorithm.whiten_advantages,
            whiten_scope=algorithm.whiten_scope,
            advantage_clip=algorithm.advantage_clip,
        ),
        norm=RewardNormOptions(
            mean=algorithm.norm_mean_type or "none",
            std=algorithm.norm_std_type or "none",
            clip=algorithm.reward_clip,
            singleton=singleton,
        ),
        correction=correction,
        masks=_masks(config),
        reward_kl=_reward_kl(config),
        length_penalty=length_penalty_options(config),
        weights=WeightOptions(
            difficulty=algorithm.difficulty_source if weighted else None,
            difficulty_range=tuple(span) if weighted and span is not None else None,
            length=algorithm.length_loss_weight,
        ),
    )


def _masks(config: Config) -> MaskOptions:
    algorithm = config.algorithm
    difficulty = (algorithm.difficulty_low_threshold, algorithm.difficulty_high_threshold)
    return MaskOptions(
        max_len=algorithm.max_len_mask,
        difficulty=difficulty if algorithm.difficulty_mask else None,
        error_max_len=algorithm.error_max_len_threshold if algorithm.error_max_len_clip else None,
        correct_threshold=_correct_threshold(config),
    )


def _reward_kl(config: Config) -> RewardKl | None:
    algorithm = config.algorithm
    if not algorithm.use_kl_in_reward:
        return None
    control = algorithm.kl_ctrl
    return RewardKl(
        estimator=algorithm.kl_penalty,
        control=KlControl(
            type=control.type,
            kl_coef=control.kl_coef,
            horizon=control.horizon,
            target_kl=control.target_kl,
            schedule=_pairs(control.schedule),
            interp=control.interp,
        ),
    )


def length_penalty_options(config: Config) -> LengthPenaltyOptions | None:
    """None when it is off."""
    penalty = config.reward.length_penalty
    if not penalty.active:
        return None
    return LengthPenaltyOptions(
        coef=penalty.coef,
        max_len=penalty.max_len or config.data.max_response_length,
        free_len=penalty.free_len,
        stage=penalty.stage,
        only_correct=penalty.only_correct,
        correct_threshold=_correct_threshold(config),
        schedule=_pairs(penalty.schedule),
        interp=penalty.interp,
    )


def dynamic_sampling(config: Config) -> DynamicSampling | None:
    """None when groups are not filtered."""
    chosen = config.algorithm.filter_groups
    if not chosen.enable:
        return None
    options = FilterOptions(
        metric=chosen.metric,
        std_threshold=chosen.std_threshold,
        mean_low=chosen.mean_low,
        mean_high=chosen.mean_high,
        max_rounds=chosen.max_num_gen_batches,
        on_exhausted=chosen.on_exhausted,
        carry_over=chosen.carry_over,
        max_staleness=config.trainer.v1.sampler.max_off_policy_threshold,
    )
    return DynamicSampling(options, config.data.train_batch_size, config.data.gen_batch_size)


def _correct_threshold(config: Config) -> float:
    threshold = config.algorithm.correct_threshold
    return CORRECT if threshold is None else threshold


def _pairs(schedule: tuple | None) -> tuple[tuple[int, float], ...]:
    return tuple((int(step), float(value)) for step, value in schedule or ())
