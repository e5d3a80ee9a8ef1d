"""Parallel sizes: ranks, layers, heads and experts must divide."""

from __future__ import annotations

from trainer.config.inspection import ACTOR, REF, Inspection, divisors, nearest

MEGATRON = f"{ACTOR}.megatron"


def check(view: Inspection) -> None:
    if view.facts["engine"] == "megatron":
        dense(view)
        expert(view)
        layers(view)
        sequence(view)
        colocated(view)
    else:
        fsdp(view)
    heads(view)
    strategies(view)


def dense(view: Inspection) -> None:
    facts = view.facts
    if facts["model_parallel"] <= facts["world"] and facts["world"] % facts["model_parallel"] == 0:
        return
    world = facts["world"]
    tp = max(size for size in divisors(world) if size <= facts["tp"])
    whole = f" {MEGATRON}.context_parallel_size=1" if facts["cp"] > 1 else ""
    view.error(
        "par.dense",
        f"{MEGATRON}.tensor_model_parallel_size",
        f"{view.layout}; tp x pp x cp = {facts['model_parallel']}",
        "world divisible by tp x pp x cp",
        f"{MEGATRON}.tensor_model_parallel_size={tp} {MEGATRON}.pipeline_model_parallel_size=1{whole}   "
        f"(factors of {world}: {', '.join(map(str, divisors(world)))})",
    )


def expert(view: Inspection) -> None:
    """Also without config.json: ep > 1 says that the model has experts."""
    facts = view.facts
    if facts["ep"] == 1 and not (view.model and view.model.experts):
        return
    ep, etp, pp, world = facts["ep"], facts["etp"], facts["pp"], facts["world"]
    product = etp * ep * pp
    if world % product:
        if etp != 1 and world % (ep * pp) == 0:
            fix = f"{MEGATRON}.expert_tensor_parallel_size=1"
        else:
            nodes = next(count for count in range(1, product + 1) if count * facts["per_node"] % product == 0)
            fix = f"trainer.nnodes={nodes}   (or change ep, pp)"
        view.error(
            "par.expert",
            f"{MEGATRON}.expert_model_parallel_size",
            f"world {world} = {facts['nnodes']} x {facts['per_node']}; etp {etp} x ep {ep} x pp {pp} = {product}",
            "etp x ep x pp divides world",
            fix,
        )
    if view.model:
        expert_sizes(view)


def expert_sizes(view: Inspection) -> None:
    experts, ffn = view.model.experts, view.model.expert_ffn
    for name, size, count, what in (
        ("expert_model_parallel_size", view.facts["ep"], experts, f"{experts} experts"),
        ("expert_tensor_parallel_size", view.facts["etp"], ffn, f"experts of size {ffn}"),
    ):
        if size > 1 and (not count or count % size):
            legal = divisors(count) if count else [1]
            view.error(
                "par.experts",
                f"{MEGATRON}.{name}",
                f"{name}={size}; {what if experts else 'a model without experts'}",
                "experts divisible by ep, their intermediate size by etp",
                f"{MEGATRON}.{name}={nearest(size, legal)}",
            )


def layers(view: Inspection) -> None:
    facts, override = view.facts, view.actor.megatron.override_transformer_config
    if facts["vpp"] is not None and (facts["vpp"] <= 1 or facts["pp"] <= 1):
        view.error(
            "par.layers",
            f"{MEGATRON}.virtual_pipeline_model_parallel_size",
            f"vpp={facts['vpp']}; pp={facts['pp']}",
            "null, or more than 1 together with pp > 1",
            f"{MEGATRON}.virtual_pipeline_model_parallel_size=null",
        )
        return
    if view.model is None or override.get("pipeline_model_parallel_layout") is not None:
        return
    given = [override.get(f"num_layers_in_{end}_pipeline_stage") for end in ("first", "last")]
    stages = facts["pp"] - sum(count is not None for count in given)
    rest = view.model.layers - sum(count or 0 for count in given)
    extra = sum(bool(override.get(f"account_for_{end}_in_pipeline_split")) for end in ("embedding", "loss"))
    chunks = stages * (facts["vpp"] or 1)
    fits = rest + extra == 0 if chunks <= 0 else rest + extra > 0 and (rest + extra) % chunks == 0
    if not fits:
        legal = [size for size in divisors(view.model.layers) if size <= max(facts["pp"], 1)]
        view.error(
            "par.layers",
            f"{MEGATRON}.pipeline_model_parallel_size",
            f"{view.model.layers} layers; pp {facts['pp']}, first stage {given[0]}, last stage {given[1]}: "
            f"{rest + extra} layers on {chunks} chunks",
            "equal chunks",
            f"{MEGATRON}.pipeline_model_parallel_size={max(legal)}",
        )


def sequence(view: Inspection) -> None:
    if view.model and view.model.experts and view.facts["tp"] > 1 and not view.actor.megatron.sequence_parallel:
        view.error(
            "par.sp",
            f"{MEGATRON}.sequence_parallel",
            f"sequence_parallel=False, tp {view.facts['tp']}, {view.model.experts} experts",
            "True for a model with experts and tp > 1",
            f"{MEGATRON}.sequence_parallel=True",
        )


def colocated(view: Inspection) -> None:
    """Reference and actor share the processes, so also their layout."""
    names = (
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "virtual_pipeline_model_parallel_size",
        "context_parallel_size",
        "expert_model_parallel_size",
        "expert_tensor_parallel_size",
    )
    for name in names:
        actor, ref = vars(view.actor.megatron)[name], vars(view.ref.megatron)[name]
        if actor != ref:
            view.error(
                "par.colocated",
                f"{REF}.megatron.{name}",
                f"ref {name}={ref}, actor {name}={actor}",
                "the actor's layout: both share the processes",
                f"{REF}.megatron.{name}={actor if actor is not None else 'null'}   (or drop the override)",
            )


def fsdp(view: Inspection) -> None:
    world = view.facts["world"]
    for role, section in (("actor", view.actor.fsdp_config), ("ref", view.ref.fsdp_config)):
        prefix, size, sp = (
            f"actor_rollout_ref.{role}.fsdp_config",
            section.fsdp_size,
            section.ulysses_sequence_parallel_size,
        )
        if size != -1 and size < world and (size < 1 or world % size != 0):
            view.error(
                "par.fsdp",
                f"{prefix}.fsdp_size",
                f"fsdp_size={size}; world {world}",
                "-1, the world size, or a divisor of it",
                f"{prefix}.fsdp_size={nearest(size, divisors(world))}",
            )
        if sp < 1 or world % sp != 0:
            view.error(
                "par.fsdp",
                f"{prefix}.ulysses_sequence_parallel_size",
                f"sp {sp}; world {world}",
                "sp divides world",
                f"{prefix}.ulysses_sequence_parallel_size={nearest(sp, divisors(world))}",
            )
    if view.facts["sp"] > 1 and not view.config.actor_rollout_ref.model.use_remove_padding:
        view.error(
            "par.fsdp",
            "actor_rollout_ref.model.use_remove_padding",
            f"use_remove_padding=False, sp {view.facts['sp']}",
            "True with sp > 1",
            "actor_rollout_ref.model.use_remove_padding=True",
        )


def heads(view: Inspection) -> None:
    if view.model is None:
        return
    heads, kv = view.model.heads, view.model.kv_heads
    sizes = [
        ("tp", view.facts["tp"], f"{MEGATRON}.tensor_model_parallel_size"),
        ("rollout tp", view.rollout.tensor_model_parallel_size, "actor_rollout_ref.rollout.tensor_model_parallel_size"),
        ("sp", view.facts["sp"], f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size"),
    ]
    for name, size, key in sizes:
        shares_kv = name == "sp" or kv % size == 0 or size % kv == 0
        if heads % size == 0 and shares_kv:
            continue
        legal = [tp for tp in divisors(heads) if kv % tp == 0 or tp % kv == 0]
        view.error(
            "par.heads",
            key,
            f"{name} {size}; {heads} heads, {kv} key-value heads",
            "heads divisible by it, and key-value heads divide it or are divided by it",
            f"{key}={nearest(size, legal)}   (legal: {', '.join(map(str, legal))})",
        )


def strategies(view: Inspection) -> None:
    """One engine trains and scores."""
    for key, value in ((f"{REF}.strategy", view.ref.strategy), ("critic.strategy", view.config.critic.strategy)):
        if value != view.actor.strategy:
            view.error(
                "par.colocated",
                key,
                f"strategy={value}, actor.strategy={view.actor.strategy}",
                "the actor's engine",
                f"{key}={view.actor.strategy}",
            )
