"""Batch sizes: prompts, sequences, ranks and micro-batches must divide each other."""

from __future__ import annotations

import math

from trainer.config.inspection import ACTOR, REF, ROLLOUT, Inspection, divisors, nearest


def check(view: Inspection) -> None:
    train_mini(view)
    mini_dp(view)
    micro(view)
    micro_set(view)
    tokens(view)
    dyn_same(view)


def train_mini(view: Inspection) -> None:
    train, mini = view.config.data.train_batch_size, view.actor.ppo_mini_batch_size
    if train >= mini and train % mini == 0:
        return
    fits = divisors(train)
    near = sorted(
        {max([size for size in fits if size <= mini]), min([size for size in fits if size >= mini], default=train)}
    )
    view.error(
        "batch.train_mini",
        f"{ACTOR}.ppo_mini_batch_size",
        f"data.train_batch_size={train}; ppo_mini_batch_size={mini}",
        "train_batch_size >= ppo_mini_batch_size and divisible by it",
        f"{ACTOR}.ppo_mini_batch_size={nearest(mini, near)}   (nearest divisors: {', '.join(map(str, near))})",
    )


def mini_dp(view: Inspection) -> None:
    mini, n, dp = view.actor.ppo_mini_batch_size, view.rollout.n, view.facts["dp"]
    sequences = mini * n
    if dp < 1 or sequences % dp == 0:
        return
    unit = dp // math.gcd(n, dp)
    train = view.config.data.train_batch_size
    fits = [size for size in range(unit, max(train, unit) + 1, unit)]
    best = nearest(mini, [size for size in fits if train % size == 0] or fits)
    sizes = "tp/pp/cp" if view.facts["engine"] == "megatron" else "sp"
    view.error(
        "batch.mini_dp",
        f"{ACTOR}.ppo_mini_batch_size",
        f"ppo_mini_batch_size={mini} x rollout.n={n} = {sequences} sequences; dp={dp} ({view.layout})",
        "sequences per mini-batch divisible by dp",
        f"{ACTOR}.ppo_mini_batch_size={best}   (or change {sizes} so that dp divides {sequences})",
    )


def micro(view: Inspection) -> None:
    size, dp = view.actor.ppo_micro_batch_size_per_gpu, view.facts["dp"]
    sequences = view.actor.ppo_mini_batch_size * view.rollout.n
    if view.actor.use_dynamic_bsz:
        if size is not None:
            view.notices.append(f"{ACTOR}.ppo_micro_batch_size_per_gpu={size} is ignored: use_dynamic_bsz=True")
        return
    if size is None or dp < 1 or sequences % dp != 0:
        return
    share = sequences // dp
    if share % size == 0:
        return
    best = max(divisor for divisor in divisors(share) if divisor <= size)
    view.error(
        "batch.micro",
        f"{ACTOR}.ppo_micro_batch_size_per_gpu",
        f"ppo_mini_batch_size={view.actor.ppo_mini_batch_size} x rollout.n={view.rollout.n} / dp {dp} = {share} "
        f"sequences per rank; ppo_micro_batch_size_per_gpu={size} ({view.layout})",
        "sequences per rank divisible by the micro-batch size",
        f"{ACTOR}.ppo_micro_batch_size_per_gpu={best}",
    )


def micro_set(view: Inspection) -> None:
    passes = [
        (f"{ACTOR}.ppo_micro_batch_size_per_gpu", view.actor.use_dynamic_bsz, view.actor.ppo_micro_batch_size_per_gpu)
    ]
    passes.append(
        (
            f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu",
            view.rollout.log_prob_use_dynamic_bsz,
            view.rollout.log_prob_micro_batch_size_per_gpu,
        )
    )
    if view.needs_reference:
        passes.append(
            (
                f"{REF}.log_prob_micro_batch_size_per_gpu",
                view.ref.log_prob_use_dynamic_bsz,
                view.ref.log_prob_micro_batch_size_per_gpu,
            )
        )
    for key, dynamic, size in passes:
        if not dynamic and size is None:
            view.error(
                "batch.micro_set",
                key,
                f"{key.rpartition('.')[2]}=null with dynamic batches off",
                "a number of sequences per forward pass and rank",
                f"{key}=1   (or {ACTOR}.use_dynamic_bsz=True)",
            )


def tokens(view: Inspection) -> None:
    factor = view.facts["sp"] * view.facts["cp"]
    name = "cp" if view.facts["engine"] == "megatron" else "sp"
    budgets = [
        (f"{ACTOR}.ppo_max_token_len_per_gpu", view.actor.use_dynamic_bsz, view.actor.ppo_max_token_len_per_gpu),
        (
            f"{ROLLOUT}.log_prob_max_token_len_per_gpu",
            view.rollout.log_prob_use_dynamic_bsz,
            view.rollout.log_prob_max_token_len_per_gpu,
        ),
    ]
    if view.needs_reference:
        budgets.append(
            (
                f"{REF}.log_prob_max_token_len_per_gpu",
                view.ref.log_prob_use_dynamic_bsz,
                view.ref.log_prob_max_token_len_per_gpu,
            )
        )
    data = view.config.data
    for key, dynamic, budget in budgets:
        if dynamic and budget * factor < view.max_length:
            view.error(
                "batch.tokens",
                key,
                f"{key.rpartition('.')[2]}={budget} x {name} {factor} = {budget * factor} tokens; "
                f"data.max_prompt_length={data.max_prompt_length} + "
                f"data.max_response_length={data.max_response_length} = {view.max_length}",
                "a micro-batch holds at least one full sample",
                f"{key}={math.ceil(view.max_length / factor)}",
            )


def dyn_same(view: Inspection) -> None:
    actor, rollout = view.actor.use_dynamic_bsz, view.rollout.log_prob_use_dynamic_bsz
    if actor != rollout:
        view.error(
            "batch.dyn_same",
            f"{ROLLOUT}.log_prob_use_dynamic_bsz",
            f"actor.use_dynamic_bsz={actor}, rollout.log_prob_use_dynamic_bsz={rollout}",
            "the same value: one engine serves both passes",
            f"{ACTOR}.use_dynamic_bsz={actor} {ROLLOUT}.log_prob_use_dynamic_bsz={actor}",
        )
