"""What turns rewards into advantages: options that fit the estimator, each other, and the group size."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from trainer.config.inspection import ACTOR, Inspection
from trainer.config.schema_algorithm import Algorithm

# option -> estimators that read it; a function of the user's own may read anything
READERS = {
    "gamma": ("gae", "reinforce", "reinforce_plus_plus"),
    "lam": ("gae",),
    "norm_adv_by_std_in_grpo": ("grpo", "grpo_passk"),
    "norm_mean_type": ("reinforce",),
    "norm_std_type": ("reinforce",),
}
WHITENED = ("gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline")
FILTER, PENALTY = "algorithm.filter_groups", "reward.length_penalty"
MOST_ROUNDS = 64  # per step, where max_num_gen_batches names no limit


def check(view: Inspection) -> None:
    readers(view)
    discounts(view)
    masks(view)
    weights(view)
    group_filter(view)
    length_penalty(view)
    schedules(view)
    switched_off(view)


def readers(view: Inspection) -> None:
    """An option that nothing reads would look as if it had been tried."""
    algorithm, usual = view.config.algorithm, Algorithm()
    name = algorithm.adv_estimator
    if ":" in name:
        return
    for option, who in READERS.items():
        value = getattr(algorithm, option)
        if name not in who and value not in (getattr(usual, option), "none"):
            _unread(view, option, value, f"adv_estimator={name}", f"adv_estimator={' or '.join(who)}")
    if algorithm.whiten_scope != "batch" and name not in WHITENED and not algorithm.whiten_advantages:
        got = f"adv_estimator={name}, whiten_advantages=False"
        _unread(view, "whiten_scope", algorithm.whiten_scope, got, "whiten_advantages=True")


def _unread(view: Inspection, option: str, value: Any, got: str, reader: str) -> None:
    key, usual = f"algorithm.{option}", getattr(Algorithm(), option)
    fix = f"{key}={'null' if usual is None else usual}   (or {reader})"
    view.error("algo.unread", key, f"{option}={value}{view.where(key)}, {got}", f"read with {reader} only", fix)


def discounts(view: Inspection) -> None:
    for option in ("gamma", "lam"):
        value = getattr(view.config.algorithm, option)
        if not 0 <= value <= 1:
            key = f"algorithm.{option}"
            view.error("algo.adv", key, f"{option}={value}", "in [0, 1]", f"{key}=1.0")


def masks(view: Inspection) -> None:
    algorithm, n = view.config.algorithm, view.rollout.n
    if algorithm.error_max_len_clip and algorithm.error_max_len_threshold is None:
        key = "algorithm.error_max_len_threshold"
        half = view.config.data.max_response_length // 2
        view.error("algo.mask", key, "error_max_len_clip=True, no threshold", "a number of tokens", f"{key}={half}")
    if not algorithm.difficulty_mask:
        return
    low, high = algorithm.difficulty_low_threshold, algorithm.difficulty_high_threshold
    if low is None or high is None or not low < high:
        view.error(
            "algo.mask",
            "algorithm.difficulty_mask",
            f"difficulty_low_threshold={low}, difficulty_high_threshold={high}",
            "two mean accuracies, low < high",
            "algorithm.difficulty_low_threshold=0.1 algorithm.difficulty_high_threshold=0.95",
        )
        return
    kept = [right for right in range(n + 1) if low < right / n < high]
    said = "every group: a group of one is not judged" if n == 1 else _kept_range(kept, n)
    view.notices.append(f"algorithm.difficulty_mask keeps {said}")


def _kept_range(kept: list[int], n: int) -> str:
    return (
        f"groups with {kept[0]} to {kept[-1]} of {n} answers right"
        if kept
        else f"no group of {n} right or wrong answers"
    )


def weights(view: Inspection) -> None:
    algorithm = view.config.algorithm
    if not algorithm.difficulty_loss_weight:
        return
    span = algorithm.difficulty_range
    if algorithm.difficulty_source is None:
        key = "algorithm.difficulty_source"
        view.error(
            "algo.weight", key, "difficulty_loss_weight=True, no source", "field or pass_rate", f"{key}=pass_rate"
        )
    elif algorithm.difficulty_source == "field" and (span is None or len(span) != 2 or not span[0] < span[1]):
        key = "algorithm.difficulty_range"
        got = f"difficulty_source=field, difficulty_range={None if span is None else list(span)}"
        view.error("algo.weight", key, got, "[easiest, hardest] of the data field", f"{key}=[0,10]")
    elif algorithm.difficulty_source == "pass_rate" and span is not None:
        key = "algorithm.difficulty_range"
        got = f"difficulty_range={list(span)}, difficulty_source=pass_rate"
        view.error("algo.unread", key, got, "read with difficulty_source=field only", f"{key}=null")


def group_filter(view: Inspection) -> None:
    chosen, data, n = view.config.algorithm.filter_groups, view.config.data, view.rollout.n
    if not chosen.enable:
        return
    if n < 2:
        key = "actor_rollout_ref.rollout.n"
        view.error(
            "algo.filter", key, f"n={n}, filter_groups.enable=True", "n >= 2: one answer never varies", f"{key}=8"
        )
    rounds = chosen.max_num_gen_batches if 0 < chosen.max_num_gen_batches < MOST_ROUNDS else MOST_ROUNDS
    prompts = data.gen_batch_size or data.train_batch_size
    if rounds * prompts < data.train_batch_size:
        view.error(
            "algo.filter",
            f"{FILTER}.max_num_gen_batches",
            f"{rounds} rounds x data.gen_batch_size={prompts} = {rounds * prompts} groups; "
            f"data.train_batch_size={data.train_batch_size}",
            "rounds that can fill a batch",
            f"data.gen_batch_size={data.train_batch_size}",
        )
    if chosen.carry_over and view.config.algorithm.adv_estimator == "remax":
        got, key = "carry_over=True, adv_estimator=remax", f"{FILTER}.carry_over"
        view.error(
            "algo.filter", key, got, "greedy answers of this step's weights, which stored groups lack", f"{key}=False"
        )
    low, high = chosen.mean_low, chosen.mean_high
    if low is not None and high is not None and not low < high:
        got = f"mean_low={low}, mean_high={high}"
        view.error("algo.filter", f"{FILTER}.mean_low", got, "mean_low < mean_high", f"{FILTER}.mean_low=null")


def length_penalty(view: Inspection) -> None:
    penalty, data = view.config.reward.length_penalty, view.config.data
    if not penalty.active:
        return
    longest = penalty.max_len or data.max_response_length
    if not 0 <= penalty.free_len < longest:
        got = f"free_len={penalty.free_len}, max_len={longest}"
        view.error("len.penalty", f"{PENALTY}.free_len", got, "0 <= free_len < max_len", f"{PENALTY}.free_len=0")
    if view.actor.length_loss.coef != 0:
        view.error(
            "len.penalty",
            f"{ACTOR}.length_loss.coef",
            f"length_loss.coef={view.actor.length_loss.coef} and {PENALTY}",
            "one of them: both shorten the same answers",
            f"{ACTOR}.length_loss.coef=0.0",
        )
    algorithm = view.config.algorithm
    if penalty.stage == "reward" and algorithm.adv_estimator == "remax":
        got, expected = "stage=reward, adv_estimator=remax", "stage=advantage: the greedy answer's score pays nothing"
        view.error("len.penalty", f"{PENALTY}.stage", got, expected, f"{PENALTY}.stage=advantage")
    if penalty.stage == "reward" and algorithm.adv_estimator == "grpo" and algorithm.norm_adv_by_std_in_grpo:
        view.notices.append(
            f"{PENALTY}.stage=reward with grpo: divided by the group's deviation, the penalty loses its size where all "
            "answers are right; see stage=advantage, norm_adv_by_std_in_grpo=False or filter_groups"
        )


def schedules(view: Inspection) -> None:
    """[[completed updates, value], ...] with rising updates."""
    for key, value in (
        (f"{PENALTY}.schedule", view.config.reward.length_penalty.schedule),
        ("algorithm.kl_ctrl.schedule", view.config.algorithm.kl_ctrl.schedule),
    ):
        if value is None or _is_schedule(value):
            continue
        got = f"schedule={value if isinstance(value, str) else [*value]}"
        view.error(
            "algo.schedule",
            key,
            got,
            "[[completed updates, value], ...], rising from 0 on",
            f"{key}=[[0,0.05],[300,0.01]]",
        )


def _is_schedule(value: Any) -> bool:
    pairs = all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in value)
    if not pairs or not value:
        return False
    numbers = all(isinstance(x, int | float) and not isinstance(x, bool) for pair in value for x in pair)
    steps = [step for step, _ in value]
    return numbers and all(isinstance(step, int) for step in steps) and steps[0] >= 0 and steps == sorted(set(steps))


def switched_off(view: Inspection) -> None:
    """Settings of something that is off: said, not refused, so that a recipe can be switched off by one argument."""
    algorithm, penalty = view.config.algorithm, view.config.reward.length_penalty
    switches = {
        "difficulty_low_threshold": "difficulty_mask",
        "difficulty_high_threshold": "difficulty_mask",
        "error_max_len_threshold": "error_max_len_clip",
        "difficulty_source": "difficulty_loss_weight",
        "difficulty_range": "difficulty_loss_weight",
    }
    for name, switch in switches.items():
        if getattr(algorithm, name) is not None and not getattr(algorithm, switch):
            view.notices.append(f"algorithm.{name} has no effect: {switch}=False")
    if algorithm.correct_threshold is not None and not (algorithm.error_max_len_clip or penalty.only_correct):
        view.notices.append("algorithm.correct_threshold has no effect: nothing asks which answers are right")
    for section, chosen, reason in (
        (FILTER, algorithm.filter_groups, None if algorithm.filter_groups.enable else "enable=False"),
        (PENALTY, penalty, None if penalty.active else "coef=0"),
    ):
        idle = [each.name for each in fields(chosen) if getattr(chosen, each.name) != each.default]
        if reason is not None and idle:
            view.notices.append(f"{section}.{{{','.join(idle)}}} has no effect: {reason}")
