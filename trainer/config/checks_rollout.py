"""Rollout pool, sequence lengths and route replay."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version

from trainer.config.inspection import ACTOR, ROLLOUT, Inspection, divisors, nearest

ROUTE_RETURN = f"{ROLLOUT}.enable_rollout_routing_replay"
CHUNKED = f"{ROLLOUT}.enable_chunked_prefill"
BYPASS = "algorithm.rollout_correction.bypass_mode"
ROUTES_SINCE = (0, 22)


def check(view: Inspection) -> None:
    pool(view)
    sleep(view)
    staleness(view)
    world(view)
    expert(view)
    temperature(view)
    model_length(view)
    chunked(view)
    overlong(view)
    lengths(view)
    replay(view)


def pool(view: Inspection) -> None:
    """Who owns the devices decides how weights travel."""
    together = view.config.trainer.v1.trainer_mode != "separate_async"
    hybrid, nnodes = view.config.actor_rollout_ref.hybrid_engine and together, view.rollout.nnodes
    backend = view.rollout.checkpoint_engine.backend
    if hybrid and nnodes > 0:
        view.error(
            "roll.sync",
            f"{ROLLOUT}.nnodes",
            f"rollout.nnodes={nnodes}, hybrid_engine=True",
            "hybrid_engine=False for a separate pool",
            "actor_rollout_ref.hybrid_engine=False   (or rollout.nnodes=0)",
        )
    if not hybrid and nnodes == 0:
        view.error(
            "roll.sync",
            f"{ROLLOUT}.nnodes",
            "rollout.nnodes=0, hybrid_engine=False",
            "rollout.nnodes > 0: the rollout needs its own devices",
            f"{ROLLOUT}.nnodes=1   (or actor_rollout_ref.hybrid_engine=True)",
        )
    if hybrid and backend != "naive":
        view.error(
            "roll.sync",
            f"{ROLLOUT}.checkpoint_engine.backend",
            f"backend={backend}, hybrid_engine=True",
            "naive: trainer and rollout share their devices",
            f"{ROLLOUT}.checkpoint_engine.backend=naive",
        )


def sleep(view: Inspection) -> None:
    level = view.rollout.sleep_level
    if level not in (1, 2):
        key = f"{ROLLOUT}.sleep_level"
        view.error("roll.sleep", key, f"sleep_level={level}", "1 (weights wait on the host) or 2", f"{key}=1")


def staleness(view: Inspection) -> None:
    """How old a sample can be when it is trained on is known beforehand."""
    modes = view.config.trainer.v1
    if modes.trainer_mode != "separate_async":
        return
    ahead, every = modes.separate_async.num_warmup_batches, modes.separate_async.parameter_sync_step
    key, limit = "trainer.v1.sampler.max_off_policy_threshold", modes.sampler.max_off_policy_threshold
    for name, value in (("num_warmup_batches", ahead), ("parameter_sync_step", every)):
        if value < 1:
            full = f"trainer.v1.separate_async.{name}"
            view.error("roll.async", full, f"{name}={value}, trainer_mode=separate_async", "1 or more", f"{full}=1")
    if ahead + every - 1 > limit:
        view.error(
            "roll.async",
            key,
            f"max_off_policy_threshold={limit}; num_warmup_batches {ahead} + parameter_sync_step {every} - 1 = "
            f"{ahead + every - 1} weight versions",
            "a threshold that no sample can exceed",
            f"{key}={ahead + every - 1}   (or trainer.v1.separate_async.parameter_sync_step=1)",
        )


def world(view: Inspection) -> None:
    rollout, separate = view.rollout, view.rollout.nnodes > 0
    tp, dp = rollout.tensor_model_parallel_size, rollout.data_parallel_size
    ranks = rollout.nnodes * rollout.n_gpus_per_node if separate else view.facts["world"]
    # Nothing was said about the rollout at all: the unbuilt default is reported, its tp is not the point.
    untouched = not {f"{ROLLOUT}.name", f"{ROLLOUT}.tensor_model_parallel_size"} & set(view.explicit)
    if rollout.name == "hf" and tp != 1:
        view.error(
            "roll.world",
            f"{ROLLOUT}.tensor_model_parallel_size",
            f"rollout tp {tp}, rollout.name=hf",
            "1: one transformers replica is one process",
            f"{ROLLOUT}.tensor_model_parallel_size=1",
        )
    elif ranks % (tp * dp) != 0 and not untouched:
        source = (
            f"rollout.nnodes {rollout.nnodes} x {rollout.n_gpus_per_node}"
            if separate
            else view.layout.partition(";")[0]
        )
        view.error(
            "roll.world",
            f"{ROLLOUT}.tensor_model_parallel_size",
            f"{ranks} rollout ranks ({source}); rollout tp {tp} x dp {dp} = {tp * dp}",
            "rollout ranks divisible by tp x dp",
            f"{ROLLOUT}.tensor_model_parallel_size={nearest(tp, divisors(ranks))}   "
            f"(factors of {ranks}: {', '.join(map(str, divisors(ranks)))})",
        )
    per_node = rollout.n_gpus_per_node if separate else view.facts["per_node"]
    if tp > per_node:
        view.notices.append(f"{ROLLOUT}.tensor_model_parallel_size={tp} is larger than a node ({per_node} devices)")


def expert(view: Inspection) -> None:
    ep = view.rollout.expert_parallel_size
    full = view.rollout.tensor_model_parallel_size * view.rollout.data_parallel_size
    if ep not in (1, full):
        view.error(
            "roll.ep",
            f"{ROLLOUT}.expert_parallel_size",
            f"expert_parallel_size={ep}; rollout tp x dp = {full}",
            f"1 or {full}",
            f"{ROLLOUT}.expert_parallel_size={full}   (or 1)",
        )


def temperature(view: Inspection) -> None:
    """The update divides logits by it: sampling for training cannot be greedy."""
    rollout = view.rollout
    if rollout.temperature <= 0:
        view.error(
            "roll.sampling",
            f"{ROLLOUT}.temperature",
            f"temperature={rollout.temperature}",
            "more than 0 (val_kwargs.temperature may be 0)",
            f"{ROLLOUT}.temperature=1.0",
        )
    if rollout.calculate_log_probs and (rollout.top_p < 1 or rollout.top_k > 0):
        which = "cut" if rollout.name == "vllm" else "uncut"
        view.notices.append(
            f"top_p={rollout.top_p}, top_k={rollout.top_k}: the rollout's log-probs are those of the {which} "
            "distribution; importance weights and the probability difference compare them with the trainer's, uncut"
        )
    sampling = rollout.val_kwargs
    if not sampling.do_sample and sampling.temperature > 0 and f"{ROLLOUT}.val_kwargs.temperature" in view.explicit:
        view.notices.append(
            f"{ROLLOUT}.val_kwargs: temperature={sampling.temperature} decides, do_sample=False has no effect"
        )


def model_length(view: Inspection) -> None:
    limit, needed, data = view.rollout.max_model_len, view.max_length, view.config.data
    total = f"max_prompt_length {data.max_prompt_length} + max_response_length {data.max_response_length} = {needed}"
    if limit is not None and limit < needed:
        view.error(
            "len.model",
            f"{ROLLOUT}.max_model_len",
            f"max_model_len={limit}; {total}",
            "null, or at least prompt + response",
            f"{ROLLOUT}.max_model_len={needed}",
        )
    positions = view.model.max_positions if view.model else None
    if positions is not None and max(needed, limit or 0) > positions:
        view.error(
            "len.model",
            f"{ROLLOUT}.max_model_len" if limit is not None and limit > positions else "data.max_response_length",
            f"{total}; max_model_len={limit}; the model's max_position_embeddings={positions}",
            "at most max_position_embeddings",
            f"data.max_response_length={max(1, positions - data.max_prompt_length)}",
        )


def chunked(view: Inspection) -> None:
    rollout = view.rollout
    if rollout.name == "hf":
        return
    if rollout.enable_chunked_prefill and view.config.derived.device == "cpu" and CHUNKED in view.explicit:
        view.notices.append(f"{CHUNKED}=True has no effect on CPU: there vLLM cannot cut the prompt of a seeded sample")
    tokens, length = rollout.max_num_batched_tokens, rollout.max_model_len or view.max_length
    needed = max(rollout.max_num_seqs, 0 if rollout.enable_chunked_prefill else length)
    if tokens < needed:
        view.error(
            "len.chunk",
            f"{ROLLOUT}.max_num_batched_tokens",
            f"max_num_batched_tokens={tokens}, max_num_seqs={rollout.max_num_seqs}, "
            f"enable_chunked_prefill={rollout.enable_chunked_prefill}, longest sequence {length}",
            "at least max_num_seqs, and the longest sequence without chunked prefill",
            f"{ROLLOUT}.max_num_batched_tokens={needed}",
        )


def overlong(view: Inspection) -> None:
    kwargs, key = view.config.reward.reward_kwargs, "reward.reward_kwargs"
    buffer = kwargs["overlong_buffer_cfg"]
    if not buffer.get("enable"):
        return
    longest, size = kwargs.get("max_resp_len"), buffer.get("len")
    limit = view.config.data.max_response_length
    if not isinstance(longest, int) or longest < 1:
        view.error(
            "len.overlong",
            f"{key}.max_resp_len",
            f"max_resp_len={longest}, overlong_buffer_cfg.enable=True",
            "the response length, in tokens",
            f"{key}.max_resp_len={limit}",
        )
        return
    if longest != limit:
        view.notices.append(f"{key}.max_resp_len={longest} differs from data.max_response_length={limit}")
    if not isinstance(size, int) or not 0 < size <= longest:
        view.error(
            "len.overlong",
            f"{key}.overlong_buffer_cfg.len",
            f"len={size}, max_resp_len={longest}",
            "0 < len <= max_resp_len",
            f"{key}.overlong_buffer_cfg.len={max(1, longest // 4)}",
        )


def lengths(view: Inspection) -> None:
    for mine, theirs in (("prompt_length", "max_prompt_length"), ("response_length", "max_response_length")):
        given, wanted = vars(view.rollout)[mine], vars(view.config.data)[theirs]
        if given != wanted:
            view.error(
                "len.rollout",
                f"{ROLLOUT}.{mine}",
                f"{mine}={given}; data.{theirs}={wanted}",
                f"data.{theirs}",
                f"{ROLLOUT}.{mine}={wanted}   (or drop it)",
            )


def replay(view: Inspection) -> None:
    """Routes that are replayed must have been recorded."""
    key, mode, flag = f"{ACTOR}.router_replay.mode", view.actor.router_replay.mode, ROUTE_RETURN
    recording = view.rollout.enable_rollout_routing_replay
    if (mode != "disabled" or recording) and view.model is not None and view.model.experts == 0:
        view.error(
            "replay.dense",
            key if mode != "disabled" else flag,
            f"mode={mode}, enable_rollout_routing_replay={recording}, {view.model.architecture} without experts",
            "a mixture of experts: a dense model has no routes",
            f"{key}=disabled {flag}=False",
        )
    if mode == "R3":
        replay_of_the_rollout(view, recording)
    if mode == "R2" and recording:
        view.error(
            "replay.r2",
            key,
            f"mode=R2, rollout.enable_rollout_routing_replay=True{view.where(flag)}",
            "R2 replays the routes of the log-prob pass, not of the rollout",
            f"{flag}=False",
        )
    if mode == "R2" and view.config.algorithm.rollout_correction.bypass_mode:
        view.error(
            "replay.r2",
            key,
            f"mode=R2, {BYPASS}=True{view.where(BYPASS)}",
            "the log-prob pass, which records the routes; bypass_mode leaves it out",
            f"{BYPASS}=False   (or mode=R3)",
        )
    if mode == "disabled" and recording and view.rollout.moe_load_balance_metrics_interval == 0:
        view.error(
            "replay.idle",
            flag,
            "enable_rollout_routing_replay=True, mode=disabled, moe_load_balance_metrics_interval=0",
            "a reader of the routes",
            f"{ROLLOUT}.moe_load_balance_metrics_interval=1   (or {flag}=False)",
        )


def replay_of_the_rollout(view: Inspection, recording: bool) -> None:
    key, running = f"{ACTOR}.router_replay.mode", rollout_version(view.rollout.name)
    if not recording:
        view.error(
            "replay.r3",
            key,
            f"mode=R3, rollout.enable_rollout_routing_replay=False{view.where(ROUTE_RETURN)}, {running}",
            "the rollout returns the routes that R3 replays",
            f"{ROUTE_RETURN}=True   (or mode=R2)",
        )
    elif view.rollout.name == "vllm" and too_old_for_routes(running):
        view.error(
            "replay.r3",
            key,
            f"mode=R3, {running}",
            f"a rollout that returns routes: vllm {'.'.join(map(str, ROUTES_SINCE))} or newer",
            f"{key}=R2   (or upgrade vllm)",
        )


def too_old_for_routes(running: str) -> bool:
    """Of a text like `rollout.name=vllm 0.22.1`; an absent package is no old one and ends the run elsewhere."""
    found = re.search(r"vllm (\d+)\.(\d+)", running)
    return found is not None and (int(found[1]), int(found[2])) < ROUTES_SINCE


def rollout_version(name: str) -> str:
    """`rollout.name=vllm 0.22.1`, by package metadata: nothing is imported."""
    if name != "vllm":
        return f"rollout.name={name}"
    try:
        return f"rollout.name=vllm {version('vllm')}"
    except PackageNotFoundError:
        return "rollout.name=vllm (not installed)"
