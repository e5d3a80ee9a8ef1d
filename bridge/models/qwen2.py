"""Qwen2 and Qwen2.5: Llama with biases on q, k and v, which no config field announces."""

from __future__ import annotations

from bridge.mapping import Rule
from bridge.models.family import Family
from bridge.models.rows import Config, dense_rows


def rules(config: Config) -> list[Rule]:
    return dense_rows(config, bias=True)


FAMILY = Family("Qwen2ForCausalLM", rules, refused={"use_sliding_window": (True,)})
