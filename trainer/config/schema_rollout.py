"""Room 2 of the data flow: how answers are generated."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from trainer.config.schema_trainer import Profiler


@dataclass(frozen=True)
class ValSampling:
    n: int = 1  # samples per validation prompt
    temperature: float = 0.0  # 0 = greedy
    top_p: float = 1.0  # nucleus; 1 = off
    top_k: int = -1  # -1 = off
    do_sample: bool = False  # the temperature decides


@dataclass(frozen=True)
class EngineKwargs:
    vllm: dict[str, Any] = field(default_factory=dict)  # to vLLM's engine arguments
    hf: dict[str, Any] = field(default_factory=dict)  # to the transformers rollout


@dataclass(frozen=True)
class CheckpointEngine:
    """How new weights travel to the rollout."""

    backend: Literal["naive", "nccl"] = "naive"  # naive = same machine; nccl = between pools (hccl on NPU)
    update_weights_bucket_megabytes: int = 2048  # MiB per bucket
    engine_kwargs: dict[str, Any] = field(default_factory=dict)  # verify_every (steps), timeout_s, delta
    custom_backend_module: str | None = None  # own backend


@dataclass(frozen=True)
class Agent:
    num_workers: int = 8  # agent loop processes
    default_agent_loop: Literal["single_turn_agent"] = "single_turn_agent"  # the only loop


@dataclass(frozen=True)
class Rollout:
    name: Literal["vllm", "hf"] = "vllm"  # vllm (vLLM-Ascend on NPU) or hf (transformers, runs everywhere)
    n: int = 1  # samples per prompt
    temperature: float = 1.0  # 0 = greedy
    top_p: float = 1.0  # nucleus; 1 = off
    top_k: int = -1  # -1 = off
    do_sample: bool = True  # False = greedy
    repetition_penalty: float = 1.0  # 1 = off
    ignore_eos: bool = False  # always generate max_response_length tokens
    seed: int | None = None  # sampling; null = trainer.seed
    tensor_model_parallel_size: int = 2  # ranks per replica
    data_parallel_size: int = 1  # data-parallel ranks inside one replica
    expert_parallel_size: int = 1  # 1 or tp x dp
    gpu_memory_utilization: float = 0.5  # share of device memory, in (0, 1)
    free_cache_engine: bool = True  # free the cache between phases
    enforce_eager: bool = False  # False = graphs
    cudagraph_capture_sizes: list[int] | None = None  # batch sizes captured as graphs
    max_num_batched_tokens: int = 8192  # tokens per engine step
    max_num_seqs: int = 256  # sequences per engine step
    max_model_len: int | None = None  # tokens; null = prompt + response
    prompt_length: int | None = None  # null = data.max_prompt_length
    response_length: int | None = None  # null = data.max_response_length
    enable_chunked_prefill: bool = True  # mix prefill and decode
    enable_prefix_caching: bool = True  # share the cache of equal prefixes
    load_format: Literal["dummy", "auto", "safetensors"] = "dummy"  # first weights; dummy = wait for the trainer's
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"  # compute; float32 for rehearsals on CPU
    calculate_log_probs: bool = True  # log-probs of sampled tokens, for the train/rollout comparison
    log_prob_micro_batch_size_per_gpu: int | None = None  # sequences per rank in the old-log-prob pass
    log_prob_use_dynamic_bsz: bool | None = None  # null = the actor's use_dynamic_bsz
    log_prob_max_token_len_per_gpu: int | None = None  # tokens; null = the actor's ppo_max_token_len_per_gpu
    val_kwargs: ValSampling = field(default_factory=ValSampling)
    enable_rollout_routing_replay: bool = False  # return expert routes
    moe_load_balance_metrics_interval: int = 0  # training steps; 0 = never
    engine_kwargs: EngineKwargs = field(default_factory=EngineKwargs)
    checkpoint_engine: CheckpointEngine = field(default_factory=CheckpointEngine)
    nnodes: int = 0  # > 0 = separate pool of so many nodes
    n_gpus_per_node: int | None = None  # devices per node of that pool; null = trainer.n_gpus_per_node
    quantization: str | None = None  # fp8, ascend
    quantization_config_file: str | None = None  # its JSON file
    agent: Agent = field(default_factory=Agent)
    logprobs_mode: Literal["processed_logprobs"] = "processed_logprobs"  # raw ones give a wrong ratio at T != 1
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"  # request order
    full_determinism: bool = False  # deterministic kernels
    standalone_gpu_memory_utilization: float | None = None  # share in a separate pool
    enable_sleep_mode: bool = True  # allow sleep and wake
    sleep_level: int = 1  # 1 = weights wait on the host, 2 = they are dropped until the next update
    profiler: Profiler = field(default_factory=Profiler)
