"""Configuration -> the policy loss, rollout correction, and what decides about the pass for the old policy."""

from __future__ import annotations

from trainer.config import Config
from trainer.config.thresholds import rejection_bounds, weight_bounds
from trainer.credit.correction import CorrectionOptions, Rejection
from trainer.credit.importance import WeightRule
from trainer.kl_control import KlControl
from trainer.update.loss_options import RATIO_CLIPPING, LossOptions


def loss_options(config: Config) -> LossOptions:
    """ValueError for what the loss itself cannot use, a function that cannot be imported among it."""
    actor, policy = config.actor_rollout_ref.actor, config.actor_rollout_ref.actor.policy_loss
    correction = config.algorithm.rollout_correction
    reinforce = correction.bypass_mode and correction.loss_type == "reinforce"
    return LossOptions(
        loss_mode="bypass_reinforce" if reinforce else policy.loss_mode,
        clip_ratio_low=actor.clip_ratio_low,
        clip_ratio_high=actor.clip_ratio_high,
        clip_ratio_c=actor.clip_ratio_c,
        loss_agg_mode=actor.loss_agg_mode,
        loss_scale_factor=actor.loss_scale_factor or config.data.max_response_length,
        use_kl_loss=actor.use_kl_loss,
        kl_loss_coef=actor.kl_loss_coef,
        kl_loss_type=actor.kl_loss_type,
        entropy_coeff=actor.entropy_coeff,
        tau_pos=actor.tau_pos,
        tau_neg=actor.tau_neg,
        dro_beta=policy.dro_beta,
        clip_cov_ratio=policy.clip_cov_ratio,
        clip_cov_lb=policy.clip_cov_lb,
        clip_cov_ub=policy.clip_cov_ub,
        kl_cov_ratio=policy.kl_cov_ratio,
        ppo_kl_coef=policy.ppo_kl_coef,
        length_loss_coef=actor.length_loss.coef,
        length_free_len=actor.length_loss.free_len,
        length_max_len=config.data.max_response_length,
        rollout_weights=_weights(config) if reinforce else None,
        bypass=correction.bypass_mode,
        old_is_current=not correction.bypass_mode and leaves_out_old_pass(config),
        seed=config.trainer.seed,
    )


def clip_text(options: LossOptions) -> str:
    """What the clip distances mean, to be said at start: they are distances from 1, never limits."""
    low, high = options.clip_ratio_low, options.clip_ratio_high
    if options.loss_mode not in RATIO_CLIPPING:
        return f"loss_mode={options.loss_mode}"
    dual = f", dual clip at {options.clip_ratio_c:g}" if options.loss_mode == "vanilla" and options.clip_ratio_c else ""
    return f"loss_mode={options.loss_mode}: ratios are clipped to [{1 - low:g}, {1 + high:g}]{dual}"


def correction_options(config: Config) -> CorrectionOptions | None:
    """None when nothing is corrected."""
    chosen = config.algorithm.rollout_correction
    if chosen.bypass_mode:
        return CorrectionOptions(bypass=True)
    if chosen.rollout_is is None and chosen.rollout_rs is None and chosen.rollout_token_veto_threshold is None:
        return None
    rules = rejection_bounds(chosen.rollout_rs, chosen.rollout_rs_threshold) if chosen.rollout_rs is not None else []
    return CorrectionOptions(
        weights=_weights(config),
        batch_normalize=chosen.rollout_is_batch_normalize,
        rejections=tuple(Rejection(name, bounds.high, bounds.low) for name, bounds in rules),
        veto=chosen.rollout_token_veto_threshold,
    )


def _weights(config: Config) -> WeightRule | None:
    chosen = config.algorithm.rollout_correction
    if chosen.rollout_is is None:
        return None
    bounds = weight_bounds(chosen.rollout_is_threshold)
    return WeightRule(chosen.rollout_is, bounds.high, bounds.low)


def leaves_out_old_pass(config: Config) -> bool:
    """Whether the batch is trained on without a forward pass for the old policy: in bypass mode, where the rollout's
    log-probs take its place, and where one optimizer step follows the rollout (reuse_old_log_probs=auto), whose own
    forward pass gives the same numbers. The second needs that nobody else reads them before the update."""
    actor, algorithm = config.actor_rollout_ref.actor, config.algorithm
    if algorithm.rollout_correction.bypass_mode:
        return True
    one_step = config.derived.optimizer_steps_per_train_step == 1
    read_before = (
        config.actor_rollout_ref.rollout.calculate_log_probs  # consistency metrics, correction
        or actor.router_replay.mode == "R2"
        or algorithm.use_kl_in_reward
        or algorithm.kl_ctrl.type == "adaptive"
        or actor.calculate_sum_pi_squared
        or actor.policy_loss.loss_mode in ("clip_cov", "kl_cov")
        or ":" in algorithm.adv_estimator
    )
    return actor.reuse_old_log_probs == "auto" and one_step and not read_before


def loss_kl(config: Config) -> KlControl | None:
    """How the coefficient of the KL loss moves; None when it is fixed or `kl_ctrl` belongs to the KL in the reward."""
    actor, control = config.actor_rollout_ref.actor, config.algorithm.kl_ctrl
    if not actor.use_kl_loss or config.algorithm.use_kl_in_reward or control.type == "fixed":
        return None
    return KlControl(
        type=control.type,
        kl_coef=actor.kl_loss_coef,
        horizon=control.horizon,
        target_kl=control.target_kl,
        schedule=tuple((int(step), float(value)) for step, value in control.schedule or ()),
        interp=control.interp,
    )
