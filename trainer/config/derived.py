"""Numbers that follow from the configuration: computed once, stored with their formula, never set by hand."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Derived:
    device: str  # cpu, cuda or npu
    world_size: int  # training ranks
    model_parallel_size: int  # ranks that hold one copy of the work: tp x pp x cp, or sp
    dp: int  # data-parallel ranks
    sequences_per_train_batch: int  # samples per training step
    sequences_per_mini_batch: int  # samples per optimizer step, all ranks
    sequences_per_rank: int  # samples per optimizer step and dp rank
    optimizer_steps_per_train_step: int  # over all ppo_epochs
    max_sequence_length: int  # tokens, prompt + response
    train_tokens_per_micro_batch: int | None  # token budget of one update micro-batch; null = split by sequences
    total_training_steps: int | None  # null = total_epochs x rows // train_batch_size, known after the data is read
    rollout_world_size: int  # ranks that generate
    rollout_replicas: int  # copies of the model that generate
    needs_reference: bool  # a reference model is loaded
    needs_critic: bool  # a critic is trained
    run_dir: str  # directory of this run
    formulas: dict[str, str] = field(default_factory=dict)  # name -> how it was computed


def layout_text(facts: dict[str, Any]) -> str:
    """`world 16 = 2 nodes x 8; tp 2 x pp 2 x cp 1`: the arithmetic behind dp, for messages."""
    nodes = "1 node" if facts["nnodes"] == 1 else f"{facts['nnodes']} nodes"
    world = f"world {facts['world']} = {nodes} x {facts['per_node']}"
    if facts["engine"] == "megatron":
        return f"{world}; tp {facts['tp']} x pp {facts['pp']} x cp {facts['cp']}"
    return f"{world}; sp {facts['sp']}"


def facts_of(config: Any) -> dict[str, Any]:
    """Parallel sizes of the training world by their short names."""
    trainer, actor = config.trainer, config.actor_rollout_ref.actor
    facts = {
        "engine": config.model_engine,
        "nnodes": trainer.nnodes,
        "per_node": trainer.n_gpus_per_node,
        "world": trainer.nnodes * trainer.n_gpus_per_node,
    }
    if config.model_engine == "megatron":
        sizes = actor.megatron
        facts |= {
            "tp": sizes.tensor_model_parallel_size,
            "pp": sizes.pipeline_model_parallel_size,
            "cp": sizes.context_parallel_size,
            "ep": sizes.expert_model_parallel_size,
            # Megatron-Core's own default would be tp; one rank per expert needs no split of small matrices.
            "etp": sizes.expert_tensor_parallel_size or 1,
            "vpp": sizes.virtual_pipeline_model_parallel_size,
            "sp": 1,
        }
        facts["model_parallel"] = facts["tp"] * facts["pp"] * facts["cp"]
    else:
        facts |= {"tp": 1, "pp": 1, "cp": 1, "sp": actor.fsdp_config.ulysses_sequence_parallel_size}
        facts["model_parallel"] = facts["sp"]
    facts["dp"] = facts["world"] // facts["model_parallel"] if facts["model_parallel"] else 0
    return facts


def derive(config: Any, device: str) -> Derived:
    """All derived values. Sizes that do not divide are floored here and reported by the checks."""
    facts, data, arr = facts_of(config), config.data, config.actor_rollout_ref
    actor, rollout = arr.actor, arr.rollout
    mini = actor.ppo_mini_batch_size * rollout.n
    separate = rollout.nnodes > 0
    rollout_world = rollout.nnodes * rollout.n_gpus_per_node if separate else facts["world"]
    replica = rollout.tensor_model_parallel_size * rollout.data_parallel_size
    steps = actor.ppo_epochs * (data.train_batch_size // actor.ppo_mini_batch_size) if actor.ppo_mini_batch_size else 0
    layout = layout_text(facts)
    shape = "tp x pp x cp" if facts["engine"] == "megatron" else "sp"
    return Derived(
        device=device,
        world_size=facts["world"],
        model_parallel_size=facts["model_parallel"],
        dp=facts["dp"],
        sequences_per_train_batch=data.train_batch_size * rollout.n,
        sequences_per_mini_batch=mini,
        sequences_per_rank=mini // facts["dp"] if facts["dp"] else 0,
        optimizer_steps_per_train_step=steps,
        max_sequence_length=data.max_prompt_length + data.max_response_length,
        train_tokens_per_micro_batch=_budget(actor, facts),
        total_training_steps=config.trainer.total_training_steps,
        rollout_world_size=rollout_world,
        rollout_replicas=rollout_world // replica if replica else 0,
        needs_reference=actor.use_kl_loss or config.algorithm.use_kl_in_reward,
        needs_critic=config.critic.enable,
        run_dir=config.trainer.default_local_dir,
        formulas={
            "device": f"trainer.device={config.trainer.device}",
            "world_size": "trainer.nnodes x trainer.n_gpus_per_node",
            "dp": f"world_size / ({shape}): {layout}",
            "sequences_per_train_batch": "data.train_batch_size x rollout.n",
            "sequences_per_mini_batch": "actor.ppo_mini_batch_size x rollout.n",
            "sequences_per_rank": "sequences_per_mini_batch / dp",
            "optimizer_steps_per_train_step": "ppo_epochs x train_batch_size / ppo_mini_batch_size",
            "max_sequence_length": "data.max_prompt_length + data.max_response_length",
            "train_tokens_per_micro_batch": "ppo_max_token_len_per_gpu x (sp or cp), with use_dynamic_bsz",
            "total_training_steps": "trainer.total_training_steps, else total_epochs x rows // train_batch_size",
            "rollout_world_size": "rollout.nnodes x rollout.n_gpus_per_node" if separate else "world_size",
            "rollout_replicas": "rollout_world_size / (rollout tp x dp)",
            "needs_reference": "use_kl_loss or use_kl_in_reward",
            "needs_critic": "critic.enable, else adv_estimator=gae",
            "run_dir": "trainer.default_local_dir",
        },
    )


def _budget(actor: Any, facts: dict[str, Any]) -> int | None:
    return actor.ppo_max_token_len_per_gpu * facts["sp"] * facts["cp"] if actor.use_dynamic_bsz else None
