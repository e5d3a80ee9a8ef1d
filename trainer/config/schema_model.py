"""The model: which weights, and how they are held."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from trainer.config.values import REQUIRED

LINEARS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")


@dataclass(frozen=True)
class FusedKernels:
    impl_backend: Literal["torch", "triton"] = "torch"  # implementation of the fused head


@dataclass(frozen=True)
class TiledMlp:
    enabled: bool = False  # compute the MLP in tiles
    num_shards: int = 4  # tiles


@dataclass(frozen=True)
class Lora:
    """Adapters of the megatron engine."""

    type: str = "lora"  # adapter family
    merge: bool = False  # send merged weights to the rollout
    rank: int = 0  # 0 = off
    alpha: int = 32  # scale numerator
    dropout: float = 0.0  # probability
    target_modules: list[str] = field(default_factory=lambda: list(LINEARS))  # modules with adapter
    exclude_modules: list[str] = field(default_factory=list)  # modules without adapter
    dropout_position: Literal["pre", "post"] = "pre"  # before or after the adapter
    lora_A_init_method: str = "xavier"  # initial A
    lora_B_init_method: str = "zero"  # initial B
    a2a_experimental: bool = False  # all-to-all variant
    dtype: str | None = None  # null = the model's
    adapter_path: str | None = None  # start from a saved adapter
    fully_sharded_loras: bool = False  # shard both factors


@dataclass(frozen=True)
class Mtp:
    """Multi-token prediction."""

    enable: bool = False  # master switch
    enable_train: bool = False  # train the extra layers
    enable_rollout: bool = False  # speculative decoding with them
    detach_encoder: bool = False  # no gradient into the trunk
    mtp_loss_scaling_factor: float = 0.1  # weight of the loss
    method: str = "mtp"  # drafting method
    num_speculative_tokens: int = 1  # tokens drafted per step


@dataclass(frozen=True)
class Dsa:
    """DeepSeek sparse attention: what training and rollout must agree on."""

    indexer_k_norm_eps: float = 1e-6  # eps of the indexer's key norm
    indexer_rotate: bool = False  # Hadamard rotation in the indexer
    split_kv_up: Literal["auto", "true", "false"] = "auto"  # absorbed attention (megatron); auto = no


@dataclass(frozen=True)
class Model:
    path: str = REQUIRED  # local directory or hub id
    trust_remote_code: bool = False  # run model code from its repository
    override_config: dict[str, Any] = field(default_factory=dict)  # replaces entries of config.json
    use_remove_padding: bool = True  # pack sequences without padding, in every engine and role
    enable_gradient_checkpointing: bool = True  # recompute activations in the backward pass (fsdp)
    tokenizer_path: str | None = None  # null = path
    hf_config_path: str | None = None  # null = path
    custom_chat_template: str | None = None  # Jinja text
    external_lib: str | None = None  # module to import before the model is built
    use_fused_kernels: bool = False  # fused head and log-probs
    fused_kernel_options: FusedKernels = field(default_factory=FusedKernels)
    use_liger: bool = False  # Liger kernels
    use_shm: bool = False  # copy the weights to shared memory first
    enable_activation_offload: bool = False  # keep activations in host memory
    tiled_mlp: TiledMlp = field(default_factory=TiledMlp)
    lora_rank: int = 0  # adapter rank of the fsdp engine; 0 = off
    lora_alpha: int = 16  # scale numerator
    target_modules: list[str] = field(default_factory=lambda: ["all-linear"])  # modules with adapter
    exclude_modules: list[str] | None = None  # modules without adapter
    lora_adapter_path: str | None = None  # start from a saved adapter
    lora: Lora = field(default_factory=Lora)
    mtp: Mtp = field(default_factory=Mtp)
    dsa: Dsa = field(default_factory=Dsa)


@dataclass(frozen=True)
class CriticModel(Model):
    path: str | None = None  # null = the actor's
