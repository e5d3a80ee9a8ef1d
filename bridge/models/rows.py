"""Rows of dense models: embedding, norms, grouped-query attention, gated MLP.

Where Megatron-Core fuses a norm into the linear layer behind it the live name differs; both spellings are
listed, and only one exists in a live model.
"""

from __future__ import annotations

from bridge.models.scope import Config, Scope
from bridge.models.value import has_value_head, value_head_rows
from bridge.ops import QKV, GateUp, PadVocab, Rename
from bridge.rules import Rule

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
OWN_NORM, FUSED_NORM = "own_norm", "fused_norm"  # forms


def head_dim(config: Config) -> int:
    """`head_dim` where the file gives one, else hidden_size / heads."""
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def is_tied(config: Config) -> bool:
    """All families here default to an untied head when config.json is silent."""
    return bool(config.get("tie_word_embeddings", False))


def embedding_rows(config: Config) -> list[Rule]:
    """Embedding, final norm, head. With tied embeddings the last pipeline stage holds a copy as its head."""
    table = (config["vocab_size"], config["hidden_size"])
    rules = [
        Rule("embedding.word_embeddings.weight", {EMBEDDING: table}, PadVocab()),
        Rule("decoder.final_layernorm.weight", {"model.norm.weight": table[1:]}, Rename(), last=True),
    ]
    if has_value_head(config):
        return rules + value_head_rows(config)
    tied = is_tied(config)
    head = Rule("output_layer.weight", {EMBEDDING if tied else HEAD: table}, PadVocab(), last=True, copy=tied)
    return [*rules, head]


def norm_row(config: Config, scope: Scope, form: str) -> Rule:
    """The norm before the attention, as a module of its own."""
    return scope.rule("input_layernorm.weight", {"input_layernorm.weight": (config["hidden_size"],)}, Rename(), form)


def attention_rows(config: Config, scope: Scope, bias: bool = False, qk_norm: bool = False) -> list[Rule]:
    """Norm and grouped-query attention; `bias` on q, k and v only."""
    hidden, size = config["hidden_size"], head_dim(config)
    heads = config["num_attention_heads"]
    groups = config.get("num_key_value_heads") or heads  # absent in old Llama files: every head its own group
    rows = {"q": heads * size, "k": groups * size, "v": groups * size}
    qkv = QKV(heads=heads, groups=groups, head_dim=size)
    live, hf = "self_attention.", "self_attn."

    before = {"input_layernorm.weight": (hidden,)}
    weights = {f"{hf}{part}_proj.weight": (count, hidden) for part, count in rows.items()}
    rules = [
        norm_row(config, scope, OWN_NORM),
        scope.rule(live + "linear_qkv.layer_norm_weight", before, Rename(), FUSED_NORM),
        scope.rule(live + "linear_qkv.weight", weights, qkv),
    ]
    if bias:
        biases = {f"{hf}{part}_proj.bias": (count,) for part, count in rows.items()}
        rules.append(scope.rule(live + "linear_qkv.bias", biases, qkv))
    if qk_norm:
        for part in ("q", "k"):
            rules.append(scope.rule(f"{live}{part}_layernorm.weight", {f"{hf}{part}_norm.weight": (size,)}, Rename()))
    out = {hf + "o_proj.weight": (hidden, heads * size)}
    return [*rules, scope.rule(live + "linear_proj.weight", out, Rename(dim=1))]


def mlp_rows(config: Config, scope: Scope) -> list[Rule]:
    """Norm and gated MLP of a dense layer."""
    before = {"post_attention_layernorm.weight": (config["hidden_size"],)}
    return [
        scope.rule("pre_mlp_layernorm.weight", before, Rename(), OWN_NORM),
        scope.rule("mlp.linear_fc1.layer_norm_weight", before, Rename(), FUSED_NORM),
        *gated_rows(scope, "mlp.", "mlp.", config["hidden_size"], config["intermediate_size"]),
    ]


def gated_rows(scope: Scope, live: str, hf: str, hidden: int, inner: int) -> list[Rule]:
    gate_up = {f"{hf}{part}_proj.weight": (inner, hidden) for part in ("gate", "up")}
    return [
        scope.rule(live + "linear_fc1.weight", gate_up, GateUp()),
        scope.rule(live + "linear_fc2.weight", {hf + "down_proj.weight": (hidden, inner)}, Rename(dim=1)),
    ]
