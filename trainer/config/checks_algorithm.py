"""Estimators, losses and KL terms."""

from __future__ import annotations

from trainer.config.inspection import ACTOR, Inspection

ESTIMATORS = (
    "gae",
    "grpo",
    "grpo_passk",
    "rloo",
    "reinforce",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "remax",
    "gpg",
    "opo",
    "optimal_token_baseline",
    "gdpo",
)
GROUPED = ("grpo", "rloo", "opo", "gpg", "reinforce_plus_plus_baseline")


def check(view: Inspection) -> None:
    estimator(view)
    kl(view)
    loss(view)


def estimator(view: Inspection) -> None:
    name, n = view.config.algorithm.adv_estimator, view.rollout.n
    if name not in ESTIMATORS and ":" not in name:
        view.error(
            "algo.adv",
            "algorithm.adv_estimator",
            f"adv_estimator={name}",
            f"one of {', '.join(ESTIMATORS)}, or module:function",
            "algorithm.adv_estimator=grpo",
        )
    if name == "grpo_passk" and n < 2:
        view.error(
            "algo.adv", "actor_rollout_ref.rollout.n", f"n={n}, {name}", "n >= 2", "actor_rollout_ref.rollout.n=2"
        )
    if name in GROUPED and n == 1:
        view.notices.append(f"algorithm.adv_estimator={name} with rollout.n=1: a group of one has no baseline")


def kl(view: Inspection) -> None:
    actor, algorithm = view.actor, view.config.algorithm
    if actor.use_kl_loss and actor.kl_loss_coef == 0:
        view.notices.append(f"{ACTOR}.use_kl_loss=True with kl_loss_coef=0: a reference is loaded for nothing")
    if algorithm.use_kl_in_reward and algorithm.kl_ctrl.kl_coef == 0:
        view.notices.append("algorithm.use_kl_in_reward=True with kl_coef=0: a reference is loaded for nothing")
    if actor.use_kl_loss and algorithm.use_kl_in_reward:
        view.notices.append("use_kl_loss and use_kl_in_reward are both on: the KL counts twice")


def loss(view: Inspection) -> None:
    actor = view.actor
    if actor.loss_scale_factor is not None and actor.loss_agg_mode != "seq-mean-token-sum-norm":
        view.error(
            "algo.loss",
            f"{ACTOR}.loss_scale_factor",
            f"loss_scale_factor={actor.loss_scale_factor}, loss_agg_mode={actor.loss_agg_mode}",
            "null, or loss_agg_mode=seq-mean-token-sum-norm",
            f"{ACTOR}.loss_scale_factor=null",
        )
    bounds = {"clip_ratio_low": actor.clip_ratio_low, "clip_ratio_high": actor.clip_ratio_high}
    for name, value in bounds.items():
        if value < 0 or (name == "clip_ratio_low" and not 0 < value <= 1):
            expected = "in (0, 1]" if name == "clip_ratio_low" else "0 or more"
            view.error("algo.loss", f"{ACTOR}.{name}", f"{name}={value}", expected, f"{ACTOR}.{name}=0.2")
    if actor.clip_ratio_c is not None and actor.clip_ratio_c <= 1:
        view.error(
            "algo.loss",
            f"{ACTOR}.clip_ratio_c",
            f"clip_ratio_c={actor.clip_ratio_c}",
            "more than 1, or null (off)",
            f"{ACTOR}.clip_ratio_c=3.0",
        )
    if actor.policy_loss.loss_mode == "dro" and not (actor.policy_loss.dro_beta or 0) > 0:
        key = f"{ACTOR}.policy_loss.dro_beta"
        view.error(
            "algo.loss", key, f"dro_beta={actor.policy_loss.dro_beta}, loss_mode=dro", "more than 0", f"{key}=0.1"
        )
