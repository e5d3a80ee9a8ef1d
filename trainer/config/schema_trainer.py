"""The run itself: devices, steps, checkpoints, logs, profiling."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class Profiler:
    tool: str | None = None  # null = global_profiler.tool
    enable: bool = False  # profile this role
    all_ranks: bool = False  # every rank
    ranks: list[int] = field(default_factory=list)  # or these
    save_path: str | None = None  # null = global_profiler.save_path
    tool_config: dict[str, Any] = field(default_factory=dict)  # options per tool


@dataclass(frozen=True)
class GlobalProfiler:
    tool: Literal["npu", "torch", "torch_memory", "nsys", "precision_debugger"] | None = None  # profiler
    steps: list[int] | None = None  # training steps
    save_path: str = "outputs/profile"  # directory
    profile_continuous_steps: bool = False  # one trace for neighbouring steps
    global_tool_config: dict[str, Any] = field(default_factory=dict)  # options per tool


@dataclass(frozen=True)
class SeparateAsync:
    num_warmup_batches: int = 1  # batches generated ahead
    parameter_sync_step: int = 4  # optimizer steps between syncs


@dataclass(frozen=True)
class Sampler:
    max_off_policy_threshold: int = 8  # weight versions
    max_off_policy_strategy: Literal["drop", "wait"] = "drop"  # beyond it


@dataclass(frozen=True)
class TrainerV1:
    trainer_mode: Literal["sync", "colocate_async", "separate_async"] = "sync"  # rollout and update in turn, or at once
    separate_async: SeparateAsync = field(default_factory=SeparateAsync)
    colocate_async: dict[str, Any] = field(default_factory=dict)  # options of that mode
    sampler: Sampler = field(default_factory=Sampler)


@dataclass(frozen=True)
class NonfiniteGrad:
    action: Literal["skip", "raise"] = "skip"  # a skipped step changes no parameter
    max_consecutive: int = 3  # skipped steps in a row that end the run


@dataclass(frozen=True)
class Consistency:
    """Thresholds on |p_train - p_rollout|, mean over tokens."""

    mean: float = 0.01  # healthy up to here
    patience: int = 3  # steps above it before the warning
    fail_mean: float | None = None  # stops the run; null = never


@dataclass(frozen=True)
class Trainer:
    nnodes: int = 1  # machines
    n_gpus_per_node: int = 8  # devices (ranks) per machine
    device: Literal["auto", "cuda", "npu", "cpu"] = "auto"  # cuda = auto, as in verl
    project_name: str = "verl_examples"  # group of runs
    experiment_name: str = "gsm8k"  # this run
    logger: list[str] = field(default_factory=lambda: ["console"])  # console, tensorboard, csv, jsonl, wandb, swanlab
    total_epochs: int = 30  # passes over the training rows
    total_training_steps: int | None = None  # wins over total_epochs
    save_freq: int = -1  # every n steps; -1 = never
    test_freq: int = -1  # every n steps; -1 = never
    val_before_train: bool = True  # validate at step 0
    val_only: bool = False  # validate once and stop
    log_val_generations: int = 0  # samples in the validation table
    resume_mode: Literal["auto", "disable", "resume_path"] = "auto"  # auto = newest checkpoint, if any
    resume_from_path: str | None = None  # with resume_path
    default_local_dir: str | None = None  # null = checkpoints/<project_name>/<experiment_name>
    max_actor_ckpt_to_keep: int | None = None  # null = all
    max_critic_ckpt_to_keep: int | None = None  # null = all
    rollout_data_dir: str | None = None  # JSONL dump of every training step
    validation_data_dir: str | None = None  # JSONL dump of every validation
    balance_batch: bool = True  # balance tokens over dp ranks
    critic_warmup: int = 0  # steps before the actor learns
    v1: TrainerV1 = field(default_factory=TrainerV1)
    ray_wait_register_center_timeout: int = 300  # seconds
    esi_redundant_time: int = 0  # seconds kept for the last checkpoint
    seed: int = 42  # base of every seed that is not set
    env: dict[str, Any] = field(default_factory=dict)  # variables of every worker process
    logger_kwargs: dict[str, Any] = field(default_factory=dict)  # options per logger
    resume_allow_changes: list[str] = field(default_factory=list)  # keys that may change on resume
    nonfinite_grad: NonfiniteGrad = field(default_factory=NonfiniteGrad)
    consistency: Consistency = field(default_factory=Consistency)
    overfit_patience: int | None = None  # validations with falling accuracy before the warning


@dataclass(frozen=True)
class RayInit:
    num_cpus: int | None = None  # null = all
    runtime_env: dict[str, Any] = field(default_factory=dict)  # py_executable, env_vars


@dataclass(frozen=True)
class RayKwargs:
    ray_init: RayInit = field(default_factory=RayInit)
    timeline_json_file: str | None = None  # Ray timeline


@dataclass(frozen=True)
class SkipSwitch:
    enable: bool = False  # dump or replay rollouts
    dump_dir: str | None = None  # directory
    steps: list[int] = field(default_factory=list)  # training steps
    action: Literal["cache", "repeat"] = "cache"  # what to do with a stored rollout


@dataclass(frozen=True)
class Skip:
    rollout: SkipSwitch = field(default_factory=SkipSwitch)
    rollout_tq: SkipSwitch = field(default_factory=SkipSwitch)
    async_rollout: SkipSwitch = field(default_factory=SkipSwitch)
