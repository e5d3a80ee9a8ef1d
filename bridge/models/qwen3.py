"""Qwen3 dense: Llama with a norm on each query and key head."""

from __future__ import annotations

from bridge.mapping import Rule
from bridge.models.family import Family
from bridge.models.rows import Config, dense_rows


def rules(config: Config) -> list[Rule]:
    return dense_rows(config, qk_norm=True)


# attention_bias would add a bias to o_proj too.
FAMILY = Family("Qwen3ForCausalLM", rules, refused={"attention_bias": (True,), "use_sliding_window": (True,)})
