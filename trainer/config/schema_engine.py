"""Training engines and their optimizers. Only the chosen engine's classes are part of the tree."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

DecayStyle = Literal["constant", "linear", "cosine", "inverse_square_root", "WSD"]
Dtype = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True)
class MixedPrecision:
    param_dtype: Dtype | None = None  # null = fsdp_config.dtype
    reduce_dtype: Dtype | None = None  # sums gradients; null = float32
    buffer_dtype: Dtype | None = None  # null = float32


@dataclass(frozen=True)
class FsdpEngine:
    """FSDP2."""

    param_offload: bool = False  # parameters to host memory between phases
    optimizer_offload: bool = False  # optimizer state to host memory between phases
    offload_policy: bool = False  # FSDP2 host offload, also while training
    fsdp_size: int = -1  # ranks per shard group; -1 = all
    reshard_after_forward: bool = True  # True frees weights after forward (ZeRO-3), False keeps them (ZeRO-2)
    ulysses_sequence_parallel_size: int = 1  # sp: ranks that share one sequence
    model_dtype: Dtype = "float32"  # load and master weights
    dtype: Dtype = "bfloat16"  # compute
    mixed_precision: MixedPrecision = field(default_factory=MixedPrecision)
    seed: int | None = None  # engine random numbers; null = trainer.seed
    full_determinism: bool = False  # deterministic kernels
    use_torch_compile: bool | None = None  # null = the actor's switch
    entropy_from_logits_with_chunking: bool = False  # entropy in chunks, saves memory
    entropy_from_logits_chunk_size: int = 2048  # tokens per chunk
    entropy_checkpointing: bool = False  # recompute the entropy in the backward pass
    pad_to_length: bool = False  # fewer shapes
    pad_to_length_bucket: int = 1024  # tokens
    wrap_policy: dict[str, Any] = field(default_factory=dict)  # transformer_layer_cls_to_wrap


def _transformer_defaults() -> dict[str, Any]:
    return {
        "recompute_granularity": None,
        "recompute_modules": ["core_attn"],
        "recompute_method": None,
        "recompute_num_layers": None,
        "attention_backend": "flash",
    }


@dataclass(frozen=True)
class MegatronEngine:
    """Megatron-Core."""

    tensor_model_parallel_size: int = 1  # tp: ranks per layer
    pipeline_model_parallel_size: int = 1  # pp: stages
    expert_model_parallel_size: int = 1  # ep: ranks that share the experts
    context_parallel_size: int = 1  # cp: ranks per sequence
    expert_tensor_parallel_size: int | None = None  # etp: ranks per expert; null = 1 (Megatron: tp)
    virtual_pipeline_model_parallel_size: int | None = None  # vpp: model chunks per stage
    sequence_parallel: bool = True  # shard activations over tp
    use_distributed_optimizer: bool = True  # shard optimizer state over dp
    param_offload: bool = False  # parameters to host memory between phases
    grad_offload: bool = False  # gradients to host memory between phases
    optimizer_offload: bool = False  # optimizer state to host memory between phases
    use_mbridge: bool = True  # a weight bridge is the only way in
    bridge: Literal["auto", "native", "megatron_bridge"] = "auto"  # auto: ours, or the package for other families
    dtype: Dtype = "bfloat16"  # compute
    seed: int | None = None  # engine random numbers; null = trainer.seed
    override_transformer_config: dict[str, Any] = field(default_factory=_transformer_defaults)  # TransformerConfig
    override_ddp_config: dict[str, Any] = field(default_factory=dict)  # DistributedDataParallelConfig
    override_mcore_model_config: dict[str, Any] = field(default_factory=dict)  # model arguments
    use_dist_checkpointing: bool = False  # start weights from an mcore distributed checkpoint
    dist_checkpointing_path: str | None = None  # its directory
    use_megatron_fsdp: bool = False  # Megatron-FSDP
    dynamic_context_parallel: bool = False  # cp by sequence length
    max_seqlen_per_dp_cp_rank: int | None = None  # tokens
    dist_checkpointing_prefix: str = ""  # key prefix in that checkpoint
    dist_ckpt_optim_fully_reshardable: bool = False  # optimizer state for any layout
    distrib_optim_fully_reshardable_mem_efficient: bool = False  # slower, less memory
    entropy_from_logits_with_chunking: bool = False  # entropy in chunks, saves memory
    entropy_from_logits_chunk_size: int = 2048  # tokens per chunk
    pad_to_length: bool = False  # fewer shapes
    pad_to_length_bucket: int = 512  # tokens
    pad_bshd_to_minibatch_max: bool = True  # padding of the unpacked layout


@dataclass(frozen=True)
class InheritedMegatronEngine(MegatronEngine):
    """Reference and critic: whatever is not given here is the actor's; the dict is merged key by key."""

    override_transformer_config: dict[str, Any] = field(default_factory=dict)  # changes to the actor's


@dataclass(frozen=True)
class Optim:
    lr: float = 1e-6  # peak learning rate
    weight_decay: float = 0.01  # on matrices only
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])  # Adam moments
    clip_grad: float = 1.0  # global gradient norm
    lr_warmup_steps: int | None = -1  # training steps; null or <= 0 = ratio x total
    lr_warmup_steps_ratio: float = 0.0  # share of all training steps


@dataclass(frozen=True)
class FsdpOptim(Optim):
    lr_scheduler_type: Literal["constant", "cosine", "linear"] = "constant"  # after the warm-up
    min_lr_ratio: float = 0.0  # final rate / lr
    num_cycles: float = 0.5  # cosine waves
    zero_indexed_step: bool = True  # the first step has index 0
    optimizer_impl: str = "torch.optim"  # module of the optimizer
    optimizer: Literal["AdamW"] = "AdamW"  # optimizer class
    override_optimizer_config: dict[str, Any] = field(default_factory=dict)  # optimizer arguments


@dataclass(frozen=True)
class MegatronOptim(Optim):
    lr_decay_style: DecayStyle = "constant"  # after the warm-up
    lr_decay_steps: int | None = None  # training steps; null = all
    min_lr: float = 0.0  # final rate
    lr_warmup_init: float = 0.0  # first rate of the warm-up
    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = "constant"  # weight decay over time
    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = "exponential"  # last part of WSD
    lr_wsd_decay_steps: int | None = None  # training steps
    override_optimizer_config: dict[str, Any] = field(default_factory=dict)  # mcore OptimizerConfig
    optimizer: Literal["adam", "sgd"] = "adam"  # optimizer class
    use_precision_aware_optimizer: bool = False  # low-precision optimizer state
    main_grads_dtype: Dtype = "float32"  # with use_precision_aware_optimizer
    exp_avg_dtype: Dtype = "float32"  # with use_precision_aware_optimizer
    exp_avg_sq_dtype: Dtype = "float32"  # with use_precision_aware_optimizer


@dataclass(frozen=True)
class CriticFsdpOptim(FsdpOptim):
    lr: float = 1e-5  # peak learning rate


@dataclass(frozen=True)
class CriticMegatronOptim(MegatronOptim):
    lr: float = 1e-5  # peak learning rate
