"""What an engine must be told to exist: plain frozen dataclasses, no torch import.

`trainer/` translates its configuration tree into these (trainer/wiring.py); engines never see it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class ModelSpec:
    """A Hugging Face model directory (config.json, safetensors) and how to hold it.

    `head` "value" puts one number per token in the place of the vocabulary: a critic. Its directory is that of a
    causal language model, whose own head is left out, or of a token classifier with one label.
    """

    path: str
    trust_remote_code: bool = False
    override_config: dict[str, Any] = field(default_factory=dict)
    gradient_checkpointing: bool = False
    head: Literal["lm", "value"] = "lm"


@dataclass(frozen=True)
class LrSchedule:
    """Learning rate as a pure function of the number of completed training steps.

    Both engines call `at`; a resumed run needs no scheduler state. With warm-up the very first
    step has rate `warmup_init` (0 by default), as in Hugging Face and Megatron schedulers.
    """

    lr: float
    style: Literal["constant", "cosine", "linear"] = "constant"
    warmup_steps: int = 0
    total_steps: int = 0
    min_lr: float = 0.0
    warmup_init: float = 0.0
    num_cycles: float = 0.5

    def at(self, step: int) -> float:
        """Rate used by the training step that follows `step` completed ones."""
        if step < self.warmup_steps:
            return self.warmup_init + (self.lr - self.warmup_init) * step / self.warmup_steps
        if self.style == "constant":
            return self.lr
        span = max(1, self.total_steps - self.warmup_steps)
        progress = min(1.0, (step - self.warmup_steps) / span)
        if self.style == "linear":
            return self.lr - (self.lr - self.min_lr) * progress
        return self.min_lr + (self.lr - self.min_lr) * 0.5 * (1 + math.cos(2 * math.pi * self.num_cycles * progress))


@dataclass(frozen=True)
class OptimSpec:
    """AdamW. Weight decay acts on matrices only: biases and one-dimensional parameters (norms)
    never decay, in both engines alike. `clip_grad` 0 switches clipping off."""

    schedule: LrSchedule
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    clip_grad: float = 1.0


@dataclass(frozen=True)
class FsdpSpec:
    """FSDP2. `model_dtype` holds master weights, `param_dtype` computes, `reduce_dtype` sums gradients."""

    model_dtype: str = "float32"
    param_dtype: str = "bfloat16"
    reduce_dtype: str = "float32"
    fsdp_size: int = -1
    reshard_after_forward: bool = True
    param_offload: bool = False
    optimizer_offload: bool = False
    offload_policy: bool = False


@dataclass(frozen=True)
class MegatronSpec:
    """Megatron-Core parallel sizes and switches; `override_transformer_config` goes to TransformerConfig.

    `mla_absorb` keeps kv_b_proj of latent attention as two weights. Indexers of sparse attention are trained on
    their own KL loss, weighted by `indexer_loss_coeff`; 0 freezes them. `mtp` carries the layers that predict
    further tokens, frozen. `mindspeed` holds the names that only MindSpeed knows (device npu); see
    megatron/mindspeed_flags.py.
    """

    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    virtual_pipeline_model_parallel_size: int | None = None
    context_parallel_size: int = 1
    expert_model_parallel_size: int = 1
    expert_tensor_parallel_size: int | None = None
    sequence_parallel: bool = True
    use_distributed_optimizer: bool = True
    dtype: str = "bfloat16"
    param_offload: bool = False
    grad_offload: bool = False
    optimizer_offload: bool = False
    make_vocab_size_divisible_by: int = 8
    bridge: Literal["auto", "native", "megatron_bridge"] = "auto"
    mla_absorb: bool = False
    indexer_loss_coeff: float = 0.0
    indexer_k_norm_eps: float = 1e-6
    mtp: bool = False
    override_transformer_config: dict[str, Any] = field(default_factory=dict)
    mindspeed: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class TrainEngineSpec:
    """One training engine on one rank. `optim=None` builds a forward-only engine (reference model). `role` is the
    prefix of the metrics of its optimizer steps; a value model's first head is drawn from `seed`."""

    engine: Literal["fsdp", "megatron"]
    device: Literal["cpu", "cuda", "npu"]
    model: ModelSpec
    backend: FsdpSpec | MegatronSpec
    optim: OptimSpec | None
    seed: int = 42
    timeout_s: float = 600.0
    role: Literal["actor", "critic"] = "actor"


@dataclass(frozen=True)
class VllmSpec:
    """What only vLLM wants to know; names follow `actor_rollout_ref.rollout.*`. `expert_parallel_size` is 1 or the
    ranks of the replica. `sleep_level` 1 keeps the weights on the host, 2 drops them."""

    tensor_parallel_size: int = 1
    data_parallel_size: int = 1
    expert_parallel_size: int = 1
    gpu_memory_utilization: float = 0.5
    enforce_eager: bool = False
    cudagraph_capture_sizes: tuple[int, ...] | None = None
    max_num_batched_tokens: int = 8192
    enable_chunked_prefill: bool = True
    enable_prefix_caching: bool = True
    scheduling_policy: str = "fcfs"
    enable_sleep_mode: bool = True
    sleep_level: Literal[1, 2] = 1
    seed: int = 0


@dataclass(frozen=True)
class RolloutEngineSpec:
    """One rollout engine replica. `return_routes` asks for the experts that every token of a sample went to.
    `max_model_len` None (tokens) leaves the length to the model, which vLLM does not accept."""

    name: Literal["hf", "vllm"]
    device: Literal["cpu", "cuda", "npu"]
    model: ModelSpec
    dtype: str = "bfloat16"
    max_num_seqs: int = 256
    max_model_len: int | None = None
    return_routes: bool = False
    timeout_s: float = 600.0
    vllm: VllmSpec = field(default_factory=VllmSpec)
    engine_kwargs: dict[str, Any] = field(default_factory=dict)
