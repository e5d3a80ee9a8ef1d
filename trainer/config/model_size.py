"""Parameters of a model from its config.json alone: all matrices; norms and biases are left out."""

from __future__ import annotations

from typing import Any

DENSE = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size")
LATENT = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
SPARSE = ("q_lora_rank", "index_n_heads", "index_head_dim")


def needed_sizes(config: dict[str, Any]) -> tuple[str, ...]:
    """The fields that a model of this kind cannot do without."""
    experts = ("moe_intermediate_size", "num_experts_per_tok") if expert_count(config) else ()
    latent = LATENT if "kv_lora_rank" in config else ()
    return (*DENSE, *experts, *latent, *(SPARSE if "index_topk" in config else ()))


def expert_count(config: dict[str, Any]) -> int:
    """Routed experts of a layer; 0 is a dense model. Families spell it differently."""
    names = ("num_experts", "n_routed_experts", "num_local_experts")
    return next((config[name] for name in names if config.get(name)), 0)


def expert_layers(config: dict[str, Any]) -> list[bool]:
    """Per layer, whether its MLP is a mixture of experts."""
    layers = config["num_hidden_layers"]
    if not expert_count(config):
        return [False] * layers
    if config.get("mlp_layer_types"):
        return [kind == "sparse" for kind in config["mlp_layer_types"]]
    if "first_k_dense_replace" in config:
        return [layer >= config["first_k_dense_replace"] for layer in range(layers)]
    step, dense = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers") or ()
    return [layer not in dense and (layer + 1) % step == 0 for layer in range(layers)]


def indexer_layers(config: dict[str, Any]) -> list[bool]:
    """Per layer, whether it has an indexer of sparse attention of its own (arXiv 2512.02556, sharing 2603.12201)."""
    layers = config["num_hidden_layers"]
    if "index_topk" not in config:
        return [False] * layers
    if config.get("indexer_types"):
        return [kind == "full" for kind in config["indexer_types"]]
    if config.get("index_topk_pattern"):
        return [kind in ("F", "full") for kind in config["index_topk_pattern"]]
    every, offset = config.get("index_topk_freq", 1), config.get("index_skip_topk_offset", 2)
    return [max(layer - offset + 1, 0) % every == 0 for layer in range(layers)]


def parameters(config: dict[str, Any]) -> int:
    """Matrix elements of the whole model, without layers that predict further tokens."""
    embeddings = config["vocab_size"] * config["hidden_size"] * (1 if config.get("tie_word_embeddings") else 2)
    dense, experts = 3 * config["hidden_size"] * config["intermediate_size"], _experts(config)
    return (
        embeddings
        + config["num_hidden_layers"] * _attention(config)
        + sum(experts if sparse else dense for sparse in expert_layers(config))
        + sum(_indexer(config) for own in indexer_layers(config) if own)
    )


def _experts(config: dict[str, Any]) -> int:
    """Routed and shared experts of one layer, and its router."""
    count = expert_count(config)
    if not count:
        return 0
    one = 3 * config["hidden_size"] * config["moe_intermediate_size"]
    return one * (count + (config.get("n_shared_experts") or 0)) + count * config["hidden_size"]


def _attention(config: dict[str, Any]) -> int:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    if "kv_lora_rank" not in config:
        head = config.get("head_dim") or hidden // heads
        return hidden * head * (2 * heads + 2 * (config.get("num_key_value_heads") or heads))
    nope, rope, value = (config[name] for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    latent, query_latent = config["kv_lora_rank"], config.get("q_lora_rank")
    queries = heads * (nope + rope)
    query = query_latent * (hidden + queries) if query_latent else hidden * queries
    return query + hidden * (latent + rope) + latent * heads * (nope + value) + heads * value * hidden


def _indexer(config: dict[str, Any]) -> int:
    heads, size, hidden = config["index_n_heads"], config["index_head_dim"], config["hidden_size"]
    return config["q_lora_rank"] * heads * size + hidden * (size + heads)
