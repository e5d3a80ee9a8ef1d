"""Rows shared by the families: which live tensor holds which Hugging Face tensors.

`{i}` is the global layer number. Where Megatron-Core fuses a norm into the linear layer behind it
the live name differs; both spellings are listed, and only one exists in a live model.
"""

from __future__ import annotations

from typing import Any

from bridge.mapping import Rule
from bridge.ops import QKV, GateUp, PadVocab, Rename

Config = dict[str, Any]
LIVE, HF = "decoder.layers.{i}.", "model.layers.{i}."


def head_dim(config: Config) -> int:
    """`head_dim` where the file gives one, else hidden_size / heads."""
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def is_tied(config: Config) -> bool:
    """All families here default to an untied head when config.json is silent."""
    return bool(config.get("tie_word_embeddings", False))


def embedding_rows(config: Config) -> list[Rule]:
    """Embedding, final norm, head. With tied embeddings the last pipeline stage holds a copy as its head."""
    table = (config["vocab_size"], config["hidden_size"])
    tied = is_tied(config)
    head = "model.embed_tokens.weight" if tied else "lm_head.weight"
    return [
        Rule("embedding.word_embeddings.weight", {"model.embed_tokens.weight": table}, PadVocab()),
        Rule("decoder.final_layernorm.weight", {"model.norm.weight": table[1:]}, Rename(), last=True),
        Rule("output_layer.weight", {head: table}, PadVocab(), last=True, copy=tied),
    ]


def norm_rows(config: Config) -> list[Rule]:
    size = (config["hidden_size"],)
    before_attention = {HF + "input_layernorm.weight": size}
    before_mlp = {HF + "post_attention_layernorm.weight": size}
    return [
        Rule(LIVE + "input_layernorm.weight", before_attention, Rename()),
        Rule(LIVE + "self_attention.linear_qkv.layer_norm_weight", before_attention, Rename()),
        Rule(LIVE + "pre_mlp_layernorm.weight", before_mlp, Rename()),
        Rule(LIVE + "mlp.linear_fc1.layer_norm_weight", before_mlp, Rename()),
    ]


def attention_rows(config: Config, bias: bool = False, qk_norm: bool = False) -> list[Rule]:
    """Grouped-query attention; `bias` on q, k and v only."""
    hidden, size = config["hidden_size"], head_dim(config)
    heads = config["num_attention_heads"]
    groups = config.get("num_key_value_heads") or heads  # absent in old Llama files: every head its own group
    rows = {"q": heads * size, "k": groups * size, "v": groups * size}
    qkv = QKV(heads=heads, groups=groups, head_dim=size)
    live, hf = LIVE + "self_attention.", HF + "self_attn."

    weights = {f"{hf}{part}_proj.weight": (count, hidden) for part, count in rows.items()}
    rules = [Rule(live + "linear_qkv.weight", weights, qkv)]
    if bias:
        biases = {f"{hf}{part}_proj.bias": (count,) for part, count in rows.items()}
        rules.append(Rule(live + "linear_qkv.bias", biases, qkv))
    if qk_norm:
        for part in ("q", "k"):
            rules.append(Rule(f"{live}{part}_layernorm.weight", {f"{hf}{part}_norm.weight": (size,)}, Rename()))
    out = {hf + "o_proj.weight": (hidden, heads * size)}
    return [*rules, Rule(live + "linear_proj.weight", out, Rename(dim=1))]


def mlp_rows(config: Config) -> list[Rule]:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    gate_up = {HF + f"mlp.{part}_proj.weight": (inner, hidden) for part in ("gate", "up")}
    return [
        Rule(LIVE + "mlp.linear_fc1.weight", gate_up, GateUp()),
        Rule(LIVE + "mlp.linear_fc2.weight", {HF + "mlp.down_proj.weight": (hidden, inner)}, Rename(dim=1)),
    ]


def dense_rows(config: Config, bias: bool = False, qk_norm: bool = False) -> list[Rule]:
    return [*embedding_rows(config), *norm_rows(config), *attention_rows(config, bias, qk_norm), *mlp_rows(config)]
