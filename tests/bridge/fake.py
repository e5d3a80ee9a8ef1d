"""Dense models as bare names and tensors: Hugging Face files, Megatron-Core module trees, and the fused
layout written down a second time, with plain reshapes, as the reference.

No transformers and no Megatron-Core here: rank processes import this module.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

Config = dict[str, Any]


def dense_config(model_type: str = "llama", tied: bool = False, **changes: Any) -> Config:
    """Sizes that hide no mistake: nothing is square, no two parts are equal."""
    return {
        "model_type": model_type,
        "vocab_size": 130,
        "hidden_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 24,
        "intermediate_size": 104,
        "hidden_act": "silu",
        "tie_word_embeddings": tied,
        **changes,
    }


def hf_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """The tensors transformers saves for this config."""
    hidden, inner, size = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * size, config["num_key_value_heads"] * size
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        shapes |= {layer + "input_layernorm.weight": (hidden,), layer + "post_attention_layernorm.weight": (hidden,)}
        for part, rows in (("q", q), ("k", kv), ("v", kv)):
            shapes[f"{layer}self_attn.{part}_proj.weight"] = (rows, hidden)
            if config["model_type"] == "qwen2":
                shapes[f"{layer}self_attn.{part}_proj.bias"] = (rows,)
        shapes[layer + "self_attn.o_proj.weight"] = (hidden, q)
        if config["model_type"] == "qwen3":
            shapes |= {layer + f"self_attn.{part}_norm.weight": (size,) for part in ("q", "k")}
        shapes |= {layer + f"mlp.{part}_proj.weight": (inner, hidden) for part in ("gate", "up")}
        shapes[layer + "mlp.down_proj.weight"] = (hidden, inner)
    shapes["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    return shapes


def random_weights(config: Config, dtype: torch.dtype = torch.float32, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in hf_shapes(config).items()}


def write_folder(folder: Path, config: Config, weights: dict[str, Tensor]) -> Path:
    """config.json and one model.safetensors, written by the safetensors library."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def fuse_qkv(config: Config, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Per group: its query heads, its key head, its value head."""
    groups, tail = config["num_key_value_heads"], q.shape[1:]
    return torch.cat([part.view(groups, -1, *tail) for part in (q, k, v)], dim=1).reshape(-1, *tail)


def live_reference(
    config: Config,
    hf: dict[str, Tensor],
    tp: int = 1,
    rank: int = 0,
    layers: range | None = None,
    first: bool = True,
    last: bool = True,
    vocab: int = 136,
    fused_norms: bool = False,
    second_embedding: bool = False,
) -> dict[str, Tensor]:
    """What one rank must hold: chunk-local live name -> tensor. `vocab` counts the padded rows of all ranks;
    `second_embedding`: a last stage with an embedding of its own, as multi-token prediction needs."""
    layers = range(config["num_hidden_layers"]) if layers is None else layers
    live: dict[str, Tensor] = {}

    def padded(name: str) -> Tensor:
        table = hf[name]
        return torch.cat([table, table.new_zeros(vocab - len(table), table.shape[1])]).chunk(tp)[rank]

    if first or second_embedding:
        live["embedding.word_embeddings.weight"] = padded("model.embed_tokens.weight")
    for local, i in enumerate(layers):
        source = {
            name.removeprefix(f"model.layers.{i}."): value for name, value in hf.items() if f"layers.{i}." in name
        }
        p, a, m = f"decoder.layers.{local}.", f"decoder.layers.{local}.self_attention.", f"decoder.layers.{local}.mlp."
        live[a + "linear_qkv.layer_norm_weight" if fused_norms else p + "input_layernorm.weight"] = source[
            "input_layernorm.weight"
        ]
        live[m + "linear_fc1.layer_norm_weight" if fused_norms else p + "pre_mlp_layernorm.weight"] = source[
            "post_attention_layernorm.weight"
        ]
        for kind in ("weight", "bias"):
            if f"self_attn.q_proj.{kind}" in source:
                parts = [source[f"self_attn.{part}_proj.{kind}"] for part in ("q", "k", "v")]
                live[f"{a}linear_qkv.{kind}"] = fuse_qkv(config, *parts).chunk(tp)[rank]
        for part in ("q", "k"):
            if f"self_attn.{part}_norm.weight" in source:
                live[f"{a}{part}_layernorm.weight"] = source[f"self_attn.{part}_norm.weight"]
        live[a + "linear_proj.weight"] = source["self_attn.o_proj.weight"].chunk(tp, dim=1)[rank]
        gate_up = [source[f"mlp.{part}_proj.weight"].chunk(tp)[rank] for part in ("gate", "up")]
        live[m + "linear_fc1.weight"] = torch.cat(gate_up)
        live[m + "linear_fc2.weight"] = source["mlp.down_proj.weight"].chunk(tp, dim=1)[rank]
    if last:
        live["decoder.final_layernorm.weight"] = hf["model.norm.weight"]
        if not config["tie_word_embeddings"]:
            live["output_layer.weight"] = padded("lm_head.weight")
        elif not first:  # the copy of a tied model's last stage
            live["output_layer.weight"] = padded("model.embed_tokens.weight")
    return live


def module_tree(like: dict[str, Tensor], dtype: torch.dtype | None = None) -> nn.Module:
    """Nested empty modules holding one zero parameter per dotted name."""
    root = nn.Module()
    for name, tensor in like.items():
        *path, leaf = name.split(".")
        module = root
        for step in path:
            if step not in module._modules:
                module.add_module(step, nn.Module())
            module = module._modules[step]
        module.register_parameter(leaf, nn.Parameter(torch.zeros_like(tensor, dtype=dtype)))
    return root
