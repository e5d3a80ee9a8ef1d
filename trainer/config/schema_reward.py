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


@dataclass(frozen=True)
class CodeSandbox:
    """How programs of the model are run; limits are those of one case unless they say otherwise."""

    isolation: Literal["auto", "bwrap", "unshare", "rlimit"] = "auto"  # auto = bubblewrap or namespaces, never rlimit
    mode: Literal["strict", "fraction"] = "strict"  # 1 only when every case passes, or the share that passes
    cpu_s: float = 8.0  # seconds of CPU time of all its processes
    wall_s: float = 10.0  # seconds
    row_s: float = 60.0  # seconds of all cases of a row
    memory_mb: int = 512  # MB of all its processes
    processes: int = 64  # processes and threads
    file_mb: int = 16  # MB of one file
    tmp_mb: int = 64  # MB of its folder
    open_files: int = 64  # per process
    output_kb: int = 1024  # kB printed, or four times what is expected


def _overlong_off() -> dict[str, Any]:
    """len in tokens; adds min(-(length - (max_resp_len - len)) / len * penalty_factor, 0) to the score."""
    return {
        "overlong_buffer_cfg": {"enable": False, "len": 0, "penalty_factor": 0.0, "log": False},
        "max_resp_len": None,
    }


@dataclass(frozen=True)
class Report:
    """Scores of sampled answers before training: reward_report.json and reward_hist_<tag>.png."""

    enable: bool = False  # sample, score and report before step 1
    prompts: int = 32  # validation prompts that are sampled
    n: int = 8  # answers per prompt
    on_flat: Literal["warn", "error"] = "warn"  # what a reward without signal does to the run
    min_std: float = 0.05  # standard deviation of a tag's scores below which there is no signal


@dataclass(frozen=True)
class LengthPenalty:
    """A price for long answers: ratio = clip((length - free_len) / (max_len - free_len), 0, 1), lengths in tokens."""

    coef: float = 0.0  # price of the longest answer; 0 without a schedule = off
    stage: Literal["reward", "advantage"] = "reward"  # advantage = against the group's mean, after normalisation
    free_len: int = 0  # tokens without a price
    max_len: int | None = None  # tokens at full price; null = data.max_response_length
    only_correct: bool = False  # wrong answers pay nothing
    schedule: list[Any] | None = None  # [[completed updates, coefficient], ...] instead of coef
    interp: Literal["step", "linear", "cosine"] = "step"  # between two entries of the schedule

    @property
    def active(self) -> bool:
        return self.coef != 0 or self.schedule is not None


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
    report: Report = field(default_factory=Report)
    code_sandbox: CodeSandbox = field(default_factory=CodeSandbox)
    length_penalty: LengthPenalty = field(default_factory=LengthPenalty)


# domain -> fields of RewardDomain that only its scorer reads; given for another domain they are refused
SCORER_FIELDS: dict[str, tuple[str, ...]] = {
    "math_rule": ("answer", "require_box"),
    "ifeval": ("reward", "keyword_match"),
    "crossthinkqa": ("reward_type", "repetition_penalty"),
    "choice": ("reward_type", "repetition_penalty"),
    "llm_judge": (
        *("api_base", "model", "api_key_env", "prompt_path", "max_tokens", "temperature", "max_retries"),
        *("max_concurrency", "cache_dir", "max_answer_chars", "on_failure", "max_down_s"),
    ),
}


@dataclass(frozen=True)
class RewardDomain:
    """`rewards.<domain>`: which rows go to a scorer and how it runs."""

    worker: str | None = None  # scorer; null = the domain's name
    tag_included: list[str] = field(default_factory=list)  # row tags of this domain
    world_size: int | None = None  # processes; null = reward.num_workers
    timeout_s: float | None = None  # seconds per sample; null = 10, code_sandbox: row_s + 20, llm_judge: 60 per request
    score_map: list[float] = field(default_factory=lambda: [0.0, 1.0])  # training score of a wrong, of a right answer
    infer_batch_size: int | None = None  # samples per call
    template: str | None = None  # chat template of the domain
    answer: Literal["rules", "last_number"] = "rules"  # which candidate math_rule reads
    require_box: bool = False  # math_rule, rules: only a boxed answer counts
    reward: Literal["all", "fraction"] = "all"  # ifeval: 1 for all instructions followed, or the followed share
    keyword_match: Literal["word", "substring"] = "word"  # ifeval: substring as in the public script
    reward_type: Literal["binary", "loose", "soft", "strict"] = "binary"  # choice, crossthinkqa: worth of letters
    repetition_penalty: bool = False  # choice, crossthinkqa: up to 0.5 off for repeated three-word groups
    api_base: str | None = None  # llm_judge: OpenAI-compatible endpoint, http://host:port/v1
    model: str | None = None  # llm_judge: a model that the endpoint lists
    api_key_env: str | None = None  # llm_judge: name of the environment variable with the key
    prompt_path: str | None = None  # llm_judge: template with {question}, {reference}, {candidate}; null = built in
    max_tokens: int = 512  # llm_judge: tokens of a reply
    temperature: float = 0.0  # llm_judge: sampling
    max_retries: int = 3  # llm_judge: further tries of a failed request, after 1, 2, 4 s
    max_concurrency: int = 32  # llm_judge: requests at a time
    cache_dir: str | None = None  # llm_judge: folder of llm_judge.jsonl with the verdicts; null = in memory only
    max_answer_chars: int = 4000  # llm_judge: the end of an answer that the judge sees
    on_failure: Literal["mask", "stop"] = "mask"  # llm_judge: leave out a sample that cannot be judged, or end the run
    max_down_s: float = 600.0  # llm_judge: seconds without any reply after which the run saves and stops
    devices: list[int] = field(default_factory=list)  # llm_judge: devices of its server; none may be the run's own
