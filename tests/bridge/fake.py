"""Module trees with Megatron-Core's names and local shapes, without Megatron-Core."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

Shape = tuple[int, ...]


def live_shapes(config: dict[str, Any], layers: Iterable[int], tp: int = 1, fused_norms: bool = False, vocab: int = 0) -> dict[str, Shape]:
    """Local shapes of the given (chunk-local) decoder layers of a dense family; `vocab` padded rows of all ranks."""
    hidden, inner, size = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    qkv = (heads + 2 * groups) * size // tp
    shapes: dict[str, Shape] = {}
    for i in layers:
        layer = f"decoder.layers.{i}."
        attention, mlp = layer + "self_attention.", layer + "mlp."
        shapes[attention + "linear_qkv.layer_norm_weight" if fused_norms else layer + "input_layernorm.weight"] = (hidden,)
        shapes[mlp + "linear_fc1.layer_norm_weight" if fused_norms else layer + "pre_mlp_layernorm.weight"] = (hidden,)
        shapes[attention + "linear_qkv.weight"] = (qkv, hidden)
        if config["model_type"] == "qwen2":
            shapes[attention + "linear_qkv.bias"] = (qkv,)
        if config["model_type"] == "qwen3":
            shapes[attention + "q_layernorm.weight"] = shapes[attention + "k_layernorm.weight"] = (size,)
        shapes[attention + "linear_proj.weight"] = (hidden, heads * size // tp)
        shapes[mlp + "linear_fc1.weight"] = (2 * inner // tp, hidden)
        shapes[mlp + "linear_fc2.weight"] = (hidden, inner // tp)
    return shapes


def fake_chunk(config: dict[str, Any], layers: int, tp: int = 1, first: bool = True, last: bool = True, vocab: int = 136,
               fused_norms: bool = False, dtype: torch.dtype = torch.float32) -> nn.Module:
    """One model chunk. A tied model has its own head tensor only where the embedding is not."""
    shapes: dict[str, Shape] = {}
    table = (vocab // tp, config["hidden_size"])
    if first:
        shapes["embedding.word_embeddings.weight"] = table
    shapes |= live_shapes(config, range(layers), tp, fused_norms)
    if last:
        shapes["decoder.final_layernorm.weight"] = (config["hidden_size"],)
        if not (config["tie_word_embeddings"] and first):
            shapes["output_layer.weight"] = table
    return module_tree(shapes, dtype)


def module_tree(shapes: dict[str, Shape], dtype: torch.dtype = torch.float32) -> nn.Module:
    """Nested empty modules holding one zero parameter per dotted name."""
    root = nn.Module()
    for name, shape in shapes.items():
        *path, leaf = name.split(".")
        module = root
        for step in path:
            if step not in module._modules:
                module.add_module(step, nn.Module())
            module = module._modules[step]
        module.register_parameter(leaf, nn.Parameter(torch.zeros(shape, dtype=dtype)))
    return root
