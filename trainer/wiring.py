"""Translate the configuration tree into what engines, workers and sampling want to know.

One direction, no logic beyond names and units: the engines never see the tree, the tree never sees an
engine.
"""

from __future__ import annotations

import json
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
    VllmSpec,
)
from engines.transport import choose
from trainer.config import Config
from trainer.config.derived import facts_of
from trainer.placement import Placement
from trainer.routing import RouteOptions
from trainer.wiring_loss import leaves_out_old_pass
from trainer.workers import SyncSpec

MIB = 2**20
DTYPES = {"bf16": "bfloat16", "fp32": "float32", "fp16": "float16"}


def model_spec(config: Config) -> ModelSpec:
    return model_of(config.actor_rollout_ref.model)


def model_of(node) -> ModelSpec:
    return ModelSpec(
        path=node.path,
        trust_remote_code=node.trust_remote_code,
        override_config=dict(node.override_config),
        gradient_checkpointing=node.enable_gradient_checkpointing,
    )


def actor_spec(config: Config, device: str, total_steps: int) -> TrainEngineSpec:
    actor = config.actor_rollout_ref.actor
    return train_engine(config, _section(config, actor), device, optimizer(config, actor.optim, total_steps))


def reference_spec(config: Config, device: str) -> TrainEngineSpec | None:
    """A frozen copy beside the actor; None when no term of the loss or of the reward reads it."""
    if not config.derived.needs_reference:
        return None
    return train_engine(config, _section(config, config.actor_rollout_ref.ref), device, optim=None)


def _section(config: Config, role):
    return role.megatron if config.model_engine == "megatron" else role.fsdp_config


def train_engine(config: Config, section, device: str, optim: OptimSpec | None) -> TrainEngineSpec:
    """`section` is the role's engine section. The model is the actor's."""
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


def optimizer(config: Config, optim, total_steps: int) -> OptimSpec:
    """`optim` is the role's section. Warm-up and decay count training steps; a ratio is taken of all of them."""
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
    kwargs = rollout.engine_kwargs.vllm if rollout.name == "vllm" else rollout.engine_kwargs.hf
    return RolloutEngineSpec(
        name=rollout.name,
        device=device,
        model=model_spec(config),
        dtype=dtype_name(rollout.dtype),
        max_num_seqs=rollout.max_num_seqs,
        max_model_len=rollout.max_model_len or config.derived.max_sequence_length,
        return_routes=rollout.enable_rollout_routing_replay,
        timeout_s=float(config.actor_rollout_ref.nccl_timeout),
        vllm=VllmSpec(
            tensor_parallel_size=rollout.tensor_model_parallel_size,
            expert_parallel_size=rollout.expert_parallel_size,
            gpu_memory_utilization=(rollout.standalone_gpu_memory_utilization if is_separate(config) else None)
            or rollout.gpu_memory_utilization,
            enforce_eager=rollout.enforce_eager,
            cudagraph_capture_sizes=rollout.cudagraph_capture_sizes and tuple(rollout.cudagraph_capture_sizes),
            max_num_batched_tokens=rollout.max_num_batched_tokens,
            enable_chunked_prefill=rollout.enable_chunked_prefill,
            enable_prefix_caching=rollout.enable_prefix_caching,
            scheduling_policy=rollout.scheduling_policy,
            enable_sleep_mode=rollout.enable_sleep_mode and rollout.free_cache_engine and not is_separate(config),
            sleep_level=rollout.sleep_level,
            seed=rollout.seed,
        ),
        engine_kwargs=dict(kwargs),
    )


def is_separate(config: Config) -> bool:
    """Whether the rollout has devices of its own."""
    return not config.actor_rollout_ref.hybrid_engine or config.trainer.v1.trainer_mode == "separate_async"


def pace(config: Config) -> dict[str, int]:
    """How far the rollout may run ahead of the updates."""
    modes = config.trainer.v1
    if modes.trainer_mode == "sync":
        return {"ahead": 0, "sync_every": 1}
    return {
        "ahead": modes.separate_async.num_warmup_batches,
        "sync_every": modes.separate_async.parameter_sync_step,
    }


def placement(config: Config) -> Placement:
    rollout = config.actor_rollout_ref.rollout
    return Placement(
        train=config.derived.world_size,
        replicas=config.derived.rollout_replicas,
        replica_devices=rollout.tensor_model_parallel_size,
        separate=is_separate(config),
        several_nodes=max(config.trainer.nnodes, rollout.nnodes) > 1,
    )


def sync_spec(config: Config, device: str) -> SyncSpec:
    engine, place = config.actor_rollout_ref.rollout.checkpoint_engine, placement(config)
    # Shared memory ends at the machine.
    backend = "nccl" if place.several_nodes else engine.backend
    return SyncSpec(
        transport=choose(backend, device, one_device=place.train == 1 and not place.separate),
        bucket_bytes=engine.update_weights_bucket_megabytes * MIB,
        verify_every=engine.engine_kwargs.get("verify_every", 0),
        timeout_s=float(engine.engine_kwargs.get("timeout_s", config.actor_rollout_ref.nccl_timeout)),
        delta=engine.engine_kwargs.get("delta", False),
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
        **split_options(
            config, actor.use_dynamic_bsz, actor.ppo_micro_batch_size_per_gpu, actor.ppo_max_token_len_per_gpu
        ),
        entropy=actor.calculate_entropy or actor.entropy_coeff != 0,
        entropy_grad=actor.entropy_coeff != 0,
        replay_routes=actor.router_replay.mode != "disabled",
    )


def old_log_prob_options(config: Config) -> ForwardOptions | None:
    """The pass before the updates also measures the entropy of the policy that sampled, and sees the routes that
    the updates will replay first: it records them (R2) or replays them too (R3). None where it is left out."""
    if leaves_out_old_pass(config):
        return None
    rollout, replay = config.actor_rollout_ref.rollout, config.actor_rollout_ref.actor.router_replay.mode
    return ForwardOptions(
        temperature=rollout.temperature,
        **split_options(
            config,
            rollout.log_prob_use_dynamic_bsz,
            rollout.log_prob_micro_batch_size_per_gpu,
            rollout.log_prob_max_token_len_per_gpu,
        ),
        entropy=True,
        sum_pi_squared=config.actor_rollout_ref.actor.calculate_sum_pi_squared,
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
    if not config.derived.needs_reference:
        return None
    ref = config.actor_rollout_ref.ref
    return ForwardOptions(
        temperature=config.actor_rollout_ref.rollout.temperature,
        **split_options(
            config,
            ref.log_prob_use_dynamic_bsz,
            ref.log_prob_micro_batch_size_per_gpu,
            ref.log_prob_max_token_len_per_gpu,
        ),
    )


def split_options(
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
