"""The critic: when there must be one, and what it shares with the actor."""

from __future__ import annotations

import math
from pathlib import Path

from trainer.config.checks_run import CONTENTS, RESUMABLE
from trainer.config.inspection import Inspection, divisors, nearest

CRITIC = "critic"
# Weights cut over the same processes.
LAYOUT = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
)


def check(view: Inspection) -> None:
    required(view)
    if not view.config.critic.enable:
        switched_off(view)
        return
    model(view)
    layout(view)
    mini_batches(view)
    micro_batches(view)
    loss(view)
    checkpoint(view)


def required(view: Inspection) -> None:
    name, enabled = view.config.algorithm.adv_estimator, view.config.critic.enable
    if name == "gae" and not enabled:
        view.error(
            "algo.adv",
            f"{CRITIC}.enable",
            "enable=False, adv_estimator=gae",
            "a critic: gae reads its values",
            f"{CRITIC}.enable=True   (or algorithm.adv_estimator=grpo)",
        )
    if enabled and name != "gae" and ":" not in name:
        view.notices.append(f"{CRITIC}.enable=True with adv_estimator={name}: a critic is trained for nothing")


def switched_off(view: Inspection) -> None:
    """Said, not refused: recipes for several estimators carry a critic's settings along."""
    given = sorted(key for key in view.explicit if key.startswith(f"{CRITIC}.") and key != f"{CRITIC}.enable")
    if given:
        view.notices.append(f"{', '.join(given)}: no effect, there is no critic")
    if view.config.trainer.critic_warmup > 0:
        key = "trainer.critic_warmup"
        got = f"critic_warmup={view.config.trainer.critic_warmup}, no critic"
        view.error("algo.adv", key, got, "0 without a critic", f"{key}=0   (or algorithm.adv_estimator=gae)")


def model(view: Inspection) -> None:
    """A directory of its own must be one; a hub id is looked at when the model is loaded."""
    key, path = f"{CRITIC}.model.path", view.config.critic.model.path
    if key not in view.explicit or not path.startswith(("/", ".", "~")):
        return
    if not (Path(path).expanduser() / "config.json").is_file():
        expected = "the directory of a language model, or of a classifier with one label"
        view.error("model.path", key, f"{path}: no config.json in it", expected, f"{key}=DIRECTORY")


def layout(view: Inspection) -> None:
    """Critic and actor share the processes, so also their cut."""
    if view.facts["engine"] == "megatron":
        for name in LAYOUT:
            actor, critic = vars(view.actor.megatron)[name], vars(view.config.critic.megatron)[name]
            if actor != critic:
                key = f"{CRITIC}.megatron.{name}"
                view.error(
                    "par.colocated",
                    key,
                    f"critic {name}={critic}, actor {name}={actor}",
                    "the actor's layout: both share the processes",
                    f"{key}={actor if actor is not None else 'null'}   (or drop the override)",
                )
        return
    size, world = view.config.critic.fsdp.fsdp_size, view.facts["world"]
    if size != -1 and size < world and (size < 1 or world % size != 0):
        view.error(
            "par.fsdp",
            f"{CRITIC}.fsdp.fsdp_size",
            f"fsdp_size={size}; world {world}",
            "-1, the world size, or a divisor of it",
            f"{CRITIC}.fsdp.fsdp_size={nearest(size, divisors(world))}",
        )


def mini_batches(view: Inspection) -> None:
    """A mini-batch that is the actor's is reported there."""
    key, train = f"{CRITIC}.ppo_mini_batch_size", view.config.data.train_batch_size
    mini = view.config.critic.ppo_mini_batch_size
    if mini == view.actor.ppo_mini_batch_size:
        return
    if mini > train or train % mini:
        fits = [size for size in divisors(train) if size <= mini]
        view.error(
            "batch.train_mini",
            key,
            f"data.train_batch_size={train}; ppo_mini_batch_size={mini}",
            "train_batch_size >= ppo_mini_batch_size and divisible by it",
            f"{key}={max(fits)}",
        )
    n, dp = view.rollout.n, view.facts["dp"]
    if dp >= 1 and mini * n % dp:
        unit = dp // math.gcd(n, dp)
        view.error(
            "batch.mini_dp",
            key,
            f"ppo_mini_batch_size={mini} x rollout.n={n} = {mini * n} sequences; dp={dp} ({view.layout})",
            "sequences per mini-batch divisible by dp",
            f"{key}={max(unit, mini // unit * unit)}",
        )


def micro_batches(view: Inspection) -> None:
    critic = view.config.critic
    if critic.use_dynamic_bsz:
        budget_holds_a_sample(view, critic.ppo_max_token_len_per_gpu)
        return
    size, key, dp = critic.ppo_micro_batch_size_per_gpu, f"{CRITIC}.ppo_micro_batch_size_per_gpu", view.facts["dp"]
    if size is None:
        view.error(
            "batch.micro_set",
            key,
            "ppo_micro_batch_size_per_gpu=null with dynamic batches off",
            "a number of sequences per forward pass and rank",
            f"{key}=1   (or {CRITIC}.use_dynamic_bsz=True)",
        )
        return
    sequences = critic.ppo_mini_batch_size * view.rollout.n
    if dp >= 1 and sequences % dp == 0 and sequences // dp % size:
        share = sequences // dp
        view.error(
            "batch.micro",
            key,
            f"{share} sequences per rank; ppo_micro_batch_size_per_gpu={size} ({view.layout})",
            "sequences per rank divisible by the micro-batch size",
            f"{key}={max(divisor for divisor in divisors(share) if divisor <= size)}",
        )


def budget_holds_a_sample(view: Inspection, budget: int) -> None:
    factor, key = view.facts["sp"] * view.facts["cp"], f"{CRITIC}.ppo_max_token_len_per_gpu"
    if budget * factor < view.max_length:
        view.error(
            "batch.tokens",
            key,
            f"ppo_max_token_len_per_gpu={budget} x {factor} = {budget * factor} tokens; samples of {view.max_length}",
            "a micro-batch holds at least one full sample",
            f"{key}={math.ceil(view.max_length / factor)}",
        )


def loss(view: Inspection) -> None:
    critic = view.config.critic
    key = f"{CRITIC}.loss_scale_factor"
    given = key in view.explicit and critic.loss_scale_factor is not None
    if given and critic.loss_agg_mode != "seq-mean-token-sum-norm":
        view.error(
            "algo.loss",
            key,
            f"loss_scale_factor={critic.loss_scale_factor}, loss_agg_mode={critic.loss_agg_mode}",
            "null, or loss_agg_mode=seq-mean-token-sum-norm",
            f"{key}=null",
        )


def checkpoint(view: Inspection) -> None:
    """As for the actor: whole, with or without a Hugging Face folder."""
    key, contents = f"{CRITIC}.checkpoint.save_contents", view.config.critic.checkpoint.save_contents
    if set(contents) - set(CONTENTS) or set(RESUMABLE) - set(contents):
        view.error(
            "ckpt.save",
            key,
            f"save_contents={list(contents)}",
            f"{', '.join(RESUMABLE)}, and hf_model if wanted",
            f"{key}=[{','.join((*RESUMABLE, *(name for name in contents if name == 'hf_model')))}]",
        )
