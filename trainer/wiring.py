"""Translate the configuration tree into what engines, workers and sampling want to know.

One direction, no logic beyond names and units: the engines never see the tree, the tree never sees an
engine.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from engines.base import ForwardOptions, SamplingParams
from engines.megatron import mindspeed_flags
from engines.routes import RouteShape
from engines.spec import (
    FsdpSpec,
    LrSchedule,
    MegatronSpec,
    ModelSpec,
    OptimSpec,
    RolloutEngineSpec,
    TrainEngineSpec,
)
from trainer.config import Config
from trainer.config.derived import facts_of
from trainer.routing import RouteOptions
from trainer.workers import SyncSpec

MIB = 2**20
DTYPES = {"bf16": "bfloat16", "fp32": "float32", "fp16": "float16"}


def model_spec(config: Config) -> ModelSpec:
    model = config.actor_rollout_ref.model
    return ModelSpec(
        path=model.path,
        trust_remote_code=model.trust_remote_code,
        override_config=dict(model.override_config),
        gradient_checkpointing=model.enable_gradient_checkpointing,
    )


def actor_spec(config: Config, device: str, total_steps: int) -> TrainEngineSpec:
    actor = config.actor_rollout_ref.actor
    return _train_engine(config, actor, device, _optimizer(config, total_steps))


def reference_spec(config: Config, device: str) -> TrainEngineSpec | None:
    """A frozen copy beside the actor; None when no term of the loss reads it."""
    if not config.actor_rollout_ref.actor.use_kl_loss:
        return None
    return _train_engine(config, config.actor_rollout_ref.ref, device, optim=None)


def _train_engine(config: Config, role, device: str, optim: OptimSpec | None) -> TrainEngineSpec:
    section = role.megatron if config.model_engine == "megatron" else role.fsdp_config
    backend = _megatron(config, section, device) if config.model_engine == "megatron" else _fsdp(section)
    return TrainEngineSpec(
        engine=config.model_engine,
        device=device,
        model=model_spec(config),
        backend=backend,
        optim=optim,
        seed=section.seed,
        timeout_s=float(config.actor_rollout_ref.nccl_timeout),
    )


def _fsdp(node) -> FsdpSpec:
    precision = node.mixed_precision
    return FsdpSpec(
        model_dtype=dtype_name(node.model_dtype),
        param_dtype=dtype_name(precision.param_dtype or node.dtype),
        reduce_dtype=dtype_name(precision.reduce_dtype or "float32"),
        fsdp_size=node.fsdp_size,
        reshard_after_forward=node.reshard_after_forward,
        param_offload=node.param_offload,
        optimizer_offload=node.optimizer_offload,
        offload_policy=node.offload_policy,
    )


def _megatron(config: Config, node, device: str) -> MegatronSpec:
    # One namespace in the tree, as in public recipes; on npu it also holds MindSpeed's names.
    fields, own = dict(node.override_transformer_config), {}
    if device == "npu":
        fields, own = mindspeed_flags.split(fields)
    indexer_loss_coeff = fields.pop("dsa_indexer_loss_coeff", 0.0)
    return MegatronSpec(
        tensor_model_parallel_size=node.tensor_model_parallel_size,
        pipeline_model_parallel_size=node.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=node.virtual_pipeline_model_parallel_size,
        context_parallel_size=node.context_parallel_size,
        expert_model_parallel_size=node.expert_model_parallel_size,
        expert_tensor_parallel_size=node.expert_tensor_parallel_size,
        sequence_parallel=node.sequence_parallel and node.tensor_model_parallel_size > 1,
        use_distributed_optimizer=node.use_distributed_optimizer,
        dtype=dtype_name(node.dtype),
        param_offload=node.param_offload,
        grad_offload=node.grad_offload,
        optimizer_offload=node.optimizer_offload,
        bridge=node.bridge,
        mla_absorb=config.actor_rollout_ref.model.dsa.split_kv_up == "true",
        indexer_loss_coeff=indexer_loss_coeff,
        override_transformer_config=fields,
        mindspeed=own,
    )


def _optimizer(config: Config, total_steps: int) -> OptimSpec:
    """Warm-up and decay count training steps; a ratio is taken of all of them."""
    optim = config.actor_rollout_ref.actor.optim
    warmup = optim.lr_warmup_steps
    if warmup is None or warmup <= 0:
        warmup = int(optim.lr_warmup_steps_ratio * total_steps)
    if config.model_engine == "megatron":
        shape = {
            "style": optim.lr_decay_style,
            "total_steps": optim.lr_decay_steps or total_steps,
            "min_lr": optim.min_lr,
            "warmup_init": optim.lr_warmup_init,
        }
    else:
        shape = {
            "style": optim.lr_scheduler_type,
            "total_steps": total_steps,
            "min_lr": optim.min_lr_ratio * optim.lr,
            "num_cycles": optim.num_cycles,
        }
    return OptimSpec(
        schedule=LrSchedule(lr=optim.lr, warmup_steps=warmup, **shape),
        weight_decay=optim.weight_decay,
        betas=tuple(optim.betas),
        clip_grad=optim.clip_grad,
    )


def rollout_spec(config: Config, device: str) -> RolloutEngineSpec:
    rollout = config.actor_rollout_ref.rollout
    return RolloutEngineSpec(
        name=rollout.name,
        device=device,
        model=model_spec(config),
        dtype=dtype_name(rollout.dtype),
        max_num_seqs=rollout.max_num_seqs,
        max_model_len=rollout.max_model_len,
        return_routes=rollout.enable_rollout_routing_replay,
        engine_kwargs=dict(rollout.engine_kwargs.hf),
    )


def sync_spec(config: Config) -> SyncSpec:
    engine = config.actor_rollout_ref.rollout.checkpoint_engine
    return SyncSpec(
        bucket_bytes=engine.update_weights_bucket_megabytes * MIB,
        verify_every=engine.engine_kwargs.get("verify_every", 0),
        timeout_s=float(engine.engine_kwargs.get("timeout_s", config.actor_rollout_ref.nccl_timeout)),
    )


def sampling(config: Config, eos_token_ids: tuple[int, ...]) -> SamplingParams:
    rollout = config.actor_rollout_ref.rollout
    return SamplingParams(
        n=rollout.n,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        max_new_tokens=config.data.max_response_length,
        eos_token_ids=eos_token_ids,
        ignore_eos=rollout.ignore_eos,
        repetition_penalty=rollout.repetition_penalty,
        seed=rollout.seed,
    )


def validation_sampling(config: Config, eos_token_ids: tuple[int, ...]) -> SamplingParams:
    """Temperature alone decides: 0 is greedy."""
    kwargs = config.actor_rollout_ref.rollout.val_kwargs
    return SamplingParams(
        n=kwargs.n,
        temperature=kwargs.temperature,
        top_p=kwargs.top_p,
        top_k=kwargs.top_k,
        max_new_tokens=config.data.max_response_length,
        eos_token_ids=eos_token_ids,
        seed=config.actor_rollout_ref.rollout.seed,
    )


def update_options(config: Config) -> ForwardOptions:
    actor = config.actor_rollout_ref.actor
    return ForwardOptions(
        temperature=config.actor_rollout_ref.rollout.temperature,
        **_split(config, actor.use_dynamic_bsz, actor.ppo_micro_batch_size_per_gpu, actor.ppo_max_token_len_per_gpu),
        entropy=actor.calculate_entropy or actor.entropy_coeff != 0,
        entropy_grad=actor.entropy_coeff != 0,
        replay_routes=actor.router_replay.mode != "disabled",
    )


def old_log_prob_options(config: Config) -> ForwardOptions:
    """The pass before the updates also measures the entropy of the policy that sampled, and sees the routes that
    the updates will replay first: it records them (R2) or replays them too (R3)."""
    rollout, replay = config.actor_rollout_ref.rollout, config.actor_rollout_ref.actor.router_replay.mode
    return ForwardOptions(
        temperature=rollout.temperature,
        **_split(
            config,
            rollout.log_prob_use_dynamic_bsz,
            rollout.log_prob_micro_batch_size_per_gpu,
            rollout.log_prob_max_token_len_per_gpu,
        ),
        entropy=True,
        record_routes=replay == "R2",
        replay_routes=replay == "R3",
    )


def route_options(config: Config) -> RouteOptions | None:
    """How to take routes over from the rollout; None unless they are replayed (R3). ValueError for a dense model."""
    replay = config.actor_rollout_ref.actor.router_replay
    if replay.mode != "R3":
        return None
    model = config.actor_rollout_ref.model
    fields = json.loads((Path(model.path) / "config.json").read_text()) | dict(model.override_config)
    return RouteOptions(RouteShape.of(fields), replay.on_missing, replay.max_invalid_ratio)


def reference_options(config: Config) -> ForwardOptions | None:
    if not config.actor_rollout_ref.actor.use_kl_loss:
        return None
    ref = config.actor_rollout_ref.ref
    return ForwardOptions(
        temperature=config.actor_rollout_ref.rollout.temperature,
        **_split(
            config,
            ref.log_prob_use_dynamic_bsz,
            ref.log_prob_micro_batch_size_per_gpu,
            ref.log_prob_max_token_len_per_gpu,
        ),
    )


def _split(
    config: Config, dynamic: bool, micro_batch_size: int | None, max_tokens: int | None
) -> dict[str, int | None]:
    """A token budget is per rank: those that share their sequences put theirs together."""
    if not dynamic:
        return {"micro_batch_size": micro_batch_size}
    facts = facts_of(config)
    return {"max_tokens": max_tokens * facts["sp"] * facts["cp"]}


def dtype_name(name: str) -> str:
    return DTYPES.get(name, name)


def eos_token_ids(model_path: str, tokenizer_eos: int | None) -> tuple[int, ...]:
    """Every id that ends a response: generation_config.json may list several, the tokenizer adds its own."""
    ids = {tokenizer_eos} - {None}
    path = Path(model_path) / "generation_config.json"
    if path.exists():
        listed = json.loads(path.read_text()).get("eos_token_id")
        ids |= set(listed if isinstance(listed, list) else [listed]) - {None}
    return tuple(sorted(ids))


def threads_per_process(processes: int) -> int:
    """Cores are divided among the processes of a role; roles take turns."""
    return max(1, len(os.sched_getaffinity(0)) // processes)
