"""Llama 2 and 3: grouped-query attention and a gated MLP, no biases."""

from __future__ import annotations

from bridge.models.family import Family
from bridge.models.rows import dense_rows

FAMILY = Family("LlamaForCausalLM", dense_rows, refused={"attention_bias": (True,), "mlp_bias": (True,)})
