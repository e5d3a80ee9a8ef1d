"""Options of the policy loss, of rollout correction and of the KL coefficient: known, complete, and read."""

from __future__ import annotations

from typing import Any

from trainer.config.inspection import ACTOR, Inspection
from trainer.config.schema_actor import Actor, PolicyLoss
from trainer.config.schema_algorithm import RolloutCorrection
from trainer.config.thresholds import BadBounds, rejection_bounds, weight_bounds

LOSS_MODES = (
    *("vanilla", "gspo", "dppo_tv", "dppo_kl", "sapo", "gpg", "clip_cov", "kl_cov", "geo_mean", "dro", "cispo"),
)
# option of policy_loss or of the actor -> the loss that reads it; a function of the user's own may read anything
READERS = {
    "policy_loss.clip_cov_ratio": "clip_cov",
    "policy_loss.clip_cov_lb": "clip_cov",
    "policy_loss.clip_cov_ub": "clip_cov",
    "policy_loss.kl_cov_ratio": "kl_cov",
    "policy_loss.ppo_kl_coef": "kl_cov",
    "policy_loss.dro_beta": "dro",
    "tau_pos": "sapo",
    "tau_neg": "sapo",
}
# Public recipes set these beside losses that ignore them: said, not refused.
CLIPS = ("clip_ratio_low", "clip_ratio_high", "clip_ratio_c")
UNCLIPPED = {
    "gspo": ("clip_ratio_c",),
    "cispo": ("clip_ratio_c",),
    "clip_cov": ("clip_ratio_c",),
    "geo_mean": ("clip_ratio_c",),
    **dict.fromkeys(("sapo", "gpg", "kl_cov", "dro"), CLIPS),
}
_REJECTS = (
    "no rejection: the masks would follow the current policy, so that the counts which losses are divided by were "
    "known only after the forward passes; not built yet"
)
# option of rollout correction -> error and what is expected beside bypass_mode
BYPASS_LACKS = {
    "rollout_rs": ("not.built", _REJECTS),
    "rollout_token_veto_threshold": ("not.built", _REJECTS),
    "rollout_is_batch_normalize": (
        *("not.built", "False: a micro-batch does not know the mean weight of the batch; not built yet"),
    ),
    "rollout_is": ("algo.corr", "null: the ratio of loss_type=ppo_clip is taken against the rollout already"),
}
CORRECTION, CONTROL = "algorithm.rollout_correction", "algorithm.kl_ctrl"
LOG_PROBS = "actor_rollout_ref.rollout.calculate_log_probs"


def check(view: Inspection) -> None:
    loss_mode(view)
    covariance(view)
    length_loss(view)
    squared_probabilities(view)
    correction(view)
    bypass(view)
    kl_control(view)


def loss_mode(view: Inspection) -> None:
    key, mode = f"{ACTOR}.policy_loss.loss_mode", view.actor.policy_loss.loss_mode
    if ":" in mode:
        return
    if mode not in LOSS_MODES:
        expected = f"one of {', '.join(LOSS_MODES)}, or module:function"
        view.error("algo.loss", key, f"loss_mode={mode}", expected, f"{key}=vanilla")
        return
    usual = {f"policy_loss.{name}": value for name, value in vars(PolicyLoss()).items()} | vars(Actor())
    given = {f"policy_loss.{name}": value for name, value in vars(view.actor.policy_loss).items()} | vars(view.actor)
    for option, reader in READERS.items():
        if mode != reader and given[option] != usual[option]:
            _unread(view, f"{ACTOR}.{option}", given[option], f"loss_mode={mode}", f"{key}={reader}", usual[option])
    idle = [option for option in UNCLIPPED.get(mode, ()) if f"{ACTOR}.{option}" in view.explicit]
    if idle:
        view.notices.append(f"{ACTOR}.{{{','.join(idle)}}} has no effect: loss_mode={mode}")


def _unread(view: Inspection, key: str, value: Any, because: str, reader: str, usual: Any) -> None:
    option = key.rpartition(".")[2]
    view.error(
        "algo.unread",
        key,
        f"{option}={value}{view.where(key)}, {because}",
        f"read with {reader} only",
        f"{key}={'null' if usual is None else usual}   (or {reader})",
    )


def covariance(view: Inspection) -> None:
    options, key = view.actor.policy_loss, f"{ACTOR}.policy_loss"
    for name in ("clip_cov_ratio", "kl_cov_ratio"):
        if not 0 < vars(options)[name] <= 1:
            got = f"{name}={vars(options)[name]}"
            view.error("algo.loss", f"{key}.{name}", got, "a share of tokens in (0, 1]", f"{key}.{name}=0.0002")
    if not options.clip_cov_lb < options.clip_cov_ub:
        got = f"clip_cov_lb={options.clip_cov_lb}, clip_cov_ub={options.clip_cov_ub}"
        view.error("algo.loss", f"{key}.clip_cov_lb", got, "lower bound < upper bound", f"{key}.clip_cov_lb=1.0")


def length_loss(view: Inspection) -> None:
    options, key = view.actor.length_loss, f"{ACTOR}.length_loss"
    longest = view.config.data.max_response_length
    if options.coef < 0:
        got = f"length_loss.coef={options.coef}"
        view.error("algo.loss", f"{key}.coef", got, "0 (off) or more: it shortens answers", f"{key}.coef=0.0")
    if options.coef == 0 and options.free_len != 0:
        _unread(view, f"{key}.free_len", options.free_len, "length_loss.coef=0.0", f"{key}.coef > 0", 0)
    if not 0 <= options.free_len < longest:
        got = f"free_len={options.free_len}, data.max_response_length={longest}"
        view.error("algo.loss", f"{key}.free_len", got, "0 <= free_len < max_response_length", f"{key}.free_len=0")


def squared_probabilities(view: Inspection) -> None:
    key, wanted = f"{ACTOR}.calculate_sum_pi_squared", view.actor.calculate_sum_pi_squared
    estimator = view.config.algorithm.adv_estimator
    reads = estimator.endswith("optimal_token_baseline")
    if reads and not wanted:
        got = f"adv_estimator={estimator}, calculate_sum_pi_squared=False"
        view.error("algo.adv", key, got, "True: the baseline weighs tokens by it", f"{key}=True")
    if wanted and not reads and ":" not in estimator:
        _unread(view, key, True, f"adv_estimator={estimator}", "algorithm.adv_estimator=optimal_token_baseline", False)


def correction(view: Inspection) -> None:
    options, usual = view.config.algorithm.rollout_correction, RolloutCorrection()
    active = {
        "rollout_is": options.rollout_is is not None,
        "rollout_rs": options.rollout_rs is not None,
        "rollout_token_veto_threshold": options.rollout_token_veto_threshold is not None,
        "bypass_mode": options.bypass_mode,
    }
    on = [name for name, flag in active.items() if flag]
    if on and not view.rollout.calculate_log_probs:
        got = f"{', '.join(on)}; calculate_log_probs=False{view.where(LOG_PROBS)}"
        view.error("algo.corr", LOG_PROBS, got, "the rollout's log-probs", f"{LOG_PROBS}=True")
    for name, reader in (
        ("rollout_is_threshold", "rollout_is"),
        ("rollout_is_batch_normalize", "rollout_is"),
        ("rollout_rs_threshold", "rollout_rs"),
    ):
        if not active[reader] and vars(options)[name] not in (vars(usual)[name], None):
            key = f"{CORRECTION}.{name}"
            _unread(view, key, vars(options)[name], f"{reader}=null", f"{CORRECTION}.{reader}", vars(usual)[name])
    try:
        if active["rollout_is"]:
            key, value, fix = f"{CORRECTION}.rollout_is_threshold", options.rollout_is_threshold, "2.0"
            weight_bounds(value)
        if active["rollout_rs"]:
            key, value, fix = f"{CORRECTION}.rollout_rs_threshold", options.rollout_rs_threshold, "'\"0.5_2.0\"'"
            rejection_bounds(options.rollout_rs, value)
    except BadBounds as error:
        got = f"rollout_is={options.rollout_is}, rollout_rs={options.rollout_rs}, threshold {value}"
        view.error("algo.corr", key, got, str(error), f"{key}={fix}")
    veto = options.rollout_token_veto_threshold
    if veto is not None and not 0 < veto < 1:
        key = f"{CORRECTION}.rollout_token_veto_threshold"
        view.error("algo.corr", key, f"rollout_token_veto_threshold={veto}", "a ratio in (0, 1)", f"{key}=0.0001")


def bypass(view: Inspection) -> None:
    """Without a pass for the old policy, whatever reads one has nothing to read."""
    options, usual = view.config.algorithm.rollout_correction, RolloutCorrection()
    key = f"{CORRECTION}.bypass_mode"
    if not options.bypass_mode:
        if options.loss_type != usual.loss_type:
            name, reader = f"{CORRECTION}.loss_type", f"{key}=True"
            _unread(view, name, options.loss_type, "bypass_mode=False", reader, usual.loss_type)
        return
    for option, (id, expected) in BYPASS_LACKS.items():
        value, default = vars(options)[option], vars(usual)[option]
        weighs = option == "rollout_is" and options.loss_type == "reinforce"
        if value != default and not weighs:
            name = f"{CORRECTION}.{option}"
            fix = f"{name}={'null' if default is None else default}   (or {key}=False)"
            view.error(id, name, f"bypass_mode=True, {option}={value}", expected, fix)
    mode, estimator = view.actor.policy_loss.loss_mode, view.config.algorithm.adv_estimator
    if mode != "vanilla":
        got, expected = f"bypass_mode=True, loss_mode={mode}", f"vanilla: loss_type={options.loss_type} is the loss"
        view.error("algo.corr", key, got, expected, f"{ACTOR}.policy_loss.loss_mode=vanilla   (or {key}=False)")
    if estimator.endswith("optimal_token_baseline"):
        got = f"bypass_mode=True, adv_estimator={estimator}"
        view.error("algo.corr", key, got, "a pass for the old policy, which weighs the tokens", f"{key}=False")


def kl_control(view: Inspection) -> None:
    options = view.config.algorithm.kl_ctrl
    if options.type == "fixed":
        return
    if options.type == "schedule" and options.schedule is None:
        key = f"{CONTROL}.schedule"
        expected = "[[completed updates, coefficient], ...]"
        view.error("algo.kl", key, "type=schedule, schedule=null", expected, f"{key}=[[0,0.05],[300,0.01]]")
    if options.type == "adaptive" and not (options.horizon > 0 and options.target_kl > 0):
        got = f"type=adaptive, horizon={options.horizon}, target_kl={options.target_kl}"
        view.error("algo.kl", f"{CONTROL}.type", got, "both above 0", f"{CONTROL}.type=fixed")
    if not view.needs_reference:
        view.notices.append(f"{CONTROL}.type={options.type} has no effect: no KL is on")
