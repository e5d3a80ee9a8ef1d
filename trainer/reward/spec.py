"""What the reward code must be told: plain frozen dataclasses, filled from the configuration by the caller."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

KNOWN_DOMAINS = ("choice", "code_sandbox", "crossthinkqa", "ifeval", "llm_judge", "math_rule")
SCORED_DOMAINS = ("math_rule",)  # the domains with a scorer of their own in this release


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


# domain -> option -> allowed values
_OPTIONS: dict[str, dict[str, tuple[Any, ...]]] = {
    "math_rule": {"answer": ("rules", "last_number"), "require_box": (False, True)},
}


def check_options(domain: str, options: Mapping[str, Any]) -> None:
    """ValueError for an unknown option of a scorer or a value outside its closed set."""
    known = _OPTIONS[domain]
    for name, value in options.items():
        if name not in known:
            raise ValueError(f"got rewards.{domain}.{name}; expected one of {sorted(known)}; remove or rename it")
        if value not in known[name]:
            raise ValueError(
                f"got rewards.{domain}.{name}={value!r}; expected one of {list(known[name])}; change the value"
            )
