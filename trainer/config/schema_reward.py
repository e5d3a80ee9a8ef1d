"""Room 3 of the data flow: how answers are scored."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class RewardManager:
    name: str = "naive"  # naive, dapo, gdpo; with source=importlib a class name
    source: Literal["register", "importlib"] = "register"  # importlib: class from a file
    module: str | None = None  # that file


@dataclass(frozen=True)
class CustomRewardFunction:
    path: str | None = None  # python file
    name: str | None = "compute_score"  # f(data_source, solution_str, ground_truth, extra_info) -> float or dict
    reward_kwargs: dict[str, Any] = field(default_factory=dict)  # more keyword arguments
    domains: list[str] | None = None  # null = replaces every domain scorer


@dataclass(frozen=True)
class RewardModel:
    enable: bool = False  # score with a model
    enable_resource_pool: bool = False  # on its own devices
    n_gpus_per_node: int = 8  # devices per node of that pool
    nnodes: int = 0  # nodes of that pool
    model_path: str | None = None  # its weights
    rollout: dict[str, Any] = field(default_factory=dict)  # its inference engine


@dataclass(frozen=True)
class SandboxFusion:
    url: str | None = None  # remote code sandbox
    max_concurrent: int = 64  # requests
    memory_limit_mb: int = 1024  # MB per program


def _overlong_off() -> dict[str, Any]:
    """len in tokens; adds min(-(length - (max_resp_len - len)) / len * penalty_factor, 0) to the score."""
    return {
        "overlong_buffer_cfg": {"enable": False, "len": 0, "penalty_factor": 0.0, "log": False},
        "max_resp_len": None,
    }


@dataclass(frozen=True)
class Reward:
    reward_manager: RewardManager = field(default_factory=RewardManager)
    custom_reward_function: CustomRewardFunction = field(default_factory=CustomRewardFunction)
    reward_kwargs: dict[str, Any] = field(default_factory=_overlong_off)  # overlong_buffer_cfg.*, max_resp_len
    num_workers: int = 8  # scoring processes
    reward_model: RewardModel = field(default_factory=RewardModel)
    sandbox_fusion: SandboxFusion = field(default_factory=SandboxFusion)
    max_failed_frac: float = 0.05  # share of unscorable samples that stops the run
    timeout_s: float = 60.0  # seconds per call of a custom function
    report: dict[str, Any] = field(default_factory=dict)  # reward report before training
    code_sandbox: dict[str, Any] = field(default_factory=dict)  # isolation of programs
    length_penalty: dict[str, Any] = field(default_factory=dict)  # shaping by length


@dataclass(frozen=True)
class RewardDomain:
    """`rewards.<domain>`: which rows go to a scorer and how it runs."""

    worker: str | None = None  # scorer; null = the domain's name
    tag_included: list[str] = field(default_factory=list)  # row tags of this domain
    world_size: int | None = None  # processes; null = reward.num_workers
    timeout_s: float = 10.0  # seconds per sample
    answer: Literal["rules", "last_number"] = "rules"  # which candidate math_rule reads
    require_box: bool = False  # math_rule, rules: only a boxed answer counts
    score_map: list[float] = field(default_factory=lambda: [0.0, 1.0])  # training score of a wrong, of a right answer
    infer_batch_size: int | None = None  # samples per call
    template: str | None = None  # chat template of the domain
