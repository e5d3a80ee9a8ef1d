"""What a family file declares."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from bridge.mapping import Rule

REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


@dataclass(frozen=True)
class Family:
    """`refused` maps a config flag to the values under which the model has weights or row orders
    that no rule here describes."""

    architecture: str
    rules: Callable[[dict[str, Any]], list[Rule]]
    refused: dict[str, tuple] = field(default_factory=dict)

    def check(self, config: dict[str, Any]) -> None:
        """ValueError naming the architecture, flag or missing field that is not supported."""
        architectures = config.get("architectures") or [self.architecture]
        if architectures != [self.architecture]:
            raise ValueError(
                f"got architectures {architectures}; expected [{self.architecture!r}] for model_type "
                f"{config['model_type']!r}; only causal language models are supported"
            )
        missing = [name for name in REQUIRED if name not in config]
        if missing:
            raise ValueError(
                f"got a config.json without {missing}; expected them all; use the model's full config.json"
            )
        if config.get("hidden_act", "silu") != "silu":
            raise ValueError(f"got hidden_act {config['hidden_act']!r}; expected 'silu'; choose another model")
        if config.get("quantization_config") is not None:
            raise ValueError(
                "got a quantization_config; expected bf16, fp16 or fp32 weights; dequantise the checkpoint"
            )
        heads, groups = config["num_attention_heads"], config.get("num_key_value_heads")
        if groups and heads % groups:
            raise ValueError(
                f"got num_attention_heads={heads} and num_key_value_heads={groups}; expected the first to be a "
                "multiple of the second; correct config.json"
            )
        for flag, values in self.refused.items():
            if config.get(flag) in values:
                raise ValueError(
                    f"got {flag}={config[flag]!r} in a {self.architecture}; expected another value, because the "
                    "extra weights or behaviour it switches on have no Megatron-Core counterpart; choose another model"
                )
