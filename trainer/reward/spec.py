"""What the reward code must be told: plain frozen dataclasses, filled from the configuration by the caller."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

KNOWN_DOMAINS = ("choice", "code_sandbox", "crossthinkqa", "ifeval", "llm_judge", "math_rule")
# the domains with a scorer of their own in this release; llm_judge only where an endpoint is configured
SCORED_DOMAINS = ("choice", "code_sandbox", "crossthinkqa", "ifeval", "llm_judge", "math_rule")
# where DomainSpec.timeout_s would be too short: a row of code may take 60 s and what its last room needs to start and
# end (`SPARE_S`); of the judge it bounds one request
SPARE_S = 20.0
TIMEOUT_S = {"code_sandbox": 60.0 + SPARE_S, "llm_judge": 60.0}


@dataclass(frozen=True)
class DomainSpec:
    """`rewards.<domain>`: which tags belong to the domain and how its answers are scored.

    tags        `tag_included`: values of a row's `tag` that belong here
    world_size  scoring processes; 0 takes the manager's `num_workers`
    timeout_s   seconds per answer, after which its process is killed
    score_map   training score of a wrong and of a right answer; accuracy is not touched by it
    options     the scorer's own settings, e.g. {"answer": "last_number"}
    """

    tags: tuple[str, ...] = ()
    world_size: int = 0
    timeout_s: float = 10.0
    score_map: tuple[float, float] = (0.0, 1.0)
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class CustomSpec:
    """`reward.custom_reward_function`: a function in a file of the user.

    `domains=None` replaces every scorer; otherwise only the named domains. `on_error=stop` hands the
    exception to the caller, `mask` marks the sample failed.
    """

    path: str
    name: str = "compute_score"
    reward_kwargs: Mapping[str, Any] = field(default_factory=dict)
    domains: tuple[str, ...] | None = None
    timeout_s: float = 60.0
    on_error: Literal["stop", "mask"] = "stop"


@dataclass(frozen=True)
class OverlongSpec:
    """`reward.reward_kwargs.overlong_buffer_cfg` and `max_resp_len`, both in tokens."""

    enable: bool = False
    len: int = 0
    penalty_factor: float = 0.0
    log: bool = False
    max_resp_len: int | None = None


_CHOICE = {"reward_type": ("binary", "loose", "soft", "strict"), "repetition_penalty": (False, True)}
_CODE = "url max_concurrent memory_limit_mb cpu_s wall_s row_s memory_mb processes file_mb tmp_mb open_files output_kb"
_JUDGE = "api_base model api_key_env prompt_path max_tokens temperature max_retries max_concurrency cache_dir \
max_answer_chars on_failure max_down_s"
# domain -> option -> allowed values; None where any value may be right
_OPTIONS: dict[str, dict[str, tuple[Any, ...] | None]] = {
    "choice": _CHOICE,
    "code_sandbox": dict.fromkeys(_CODE.split())
    | {"mode": ("strict", "fraction"), "isolation": ("auto", "bwrap", "unshare", "rlimit")},
    "crossthinkqa": _CHOICE,
    "ifeval": {"reward": ("all", "fraction"), "keyword_match": ("word", "substring")},
    "llm_judge": dict.fromkeys(_JUDGE.split()) | {"on_failure": ("mask", "stop")},
    "math_rule": {"answer": ("rules", "last_number"), "require_box": (False, True)},
}


def check_options(domain: str, options: Mapping[str, Any]) -> None:
    """ValueError for an unknown option of a scorer or a value outside its closed set."""
    known = _OPTIONS[domain]
    for name, value in options.items():
        if name not in known:
            raise ValueError(f"got rewards.{domain}.{name}; expected one of {sorted(known)}; remove or rename it")
        allowed = known[name]
        if allowed is not None and value not in allowed:
            raise ValueError(
                f"got rewards.{domain}.{name}={value!r}; expected one of {list(allowed)}; change the value"
            )
