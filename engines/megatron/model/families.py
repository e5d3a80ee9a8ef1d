"""The model families, one declarative entry each: how they differ, and what their config.json may not say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class Family:
    """What sets one `model_type` apart.

    latent        multi-head latent attention (MLA) instead of grouped-query attention
    qkv_bias      whether query, key and value projections have a bias, or the config key that says so
    qk_norm       whether queries and keys are normalised, or the config key that says so
    router        how MoE layers choose experts; None for a dense model
    indexer       sparse attention over keys that an indexer chooses
    rotary_share  rotated part of each head where config.json does not say
    off           config keys that must be absent, null or false: our layers do not compute what they ask for
    fixed         config keys that may be absent but must not say anything else
    absent        what transformers takes for a key the file lacks or leaves null
    """

    latent: bool = False
    qkv_bias: bool | str = False
    qk_norm: bool | str = False
    router: Literal["softmax", "sigmoid"] | None = None
    indexer: bool = False
    rotary_share: float = 1.0
    off: tuple[str, ...] = ()
    fixed: Mapping[str, Any] = field(default_factory=dict)
    absent: Mapping[str, Any] = field(default_factory=dict)

    @property
    def required(self) -> tuple[str, ...]:
        """Config keys without which no model can be built."""
        keys = _EVERY + (_LATENT if self.latent else _GROUPED)
        keys += _ROUTER[self.router] if self.router else ()
        return keys + (_INDEXER if self.indexer else ())


_EVERY = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "rms_norm_eps")
_EVERY += ("vocab_size", "hidden_act", "max_position_embeddings", "tie_word_embeddings")
_GROUPED = ("num_key_value_heads",)
_LATENT = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_EXPERTS = ("num_experts_per_tok", "moe_intermediate_size")
_ROUTER = {
    "softmax": (*_EXPERTS, "norm_topk_prob"),
    "sigmoid": (
        *_EXPERTS,
        "first_k_dense_replace",
        "n_shared_experts",
        "n_group",
        "topk_group",
        "routed_scaling_factor",
    ),
}
_INDEXER = ("index_n_heads", "index_head_dim", "index_topk", "indexer_rope_interleave")

_ALWAYS = {"tie_word_embeddings": False}
_SIGMOID_FIXED = {"norm_topk_prob": True, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}
_DEEPSEEK = {"n_group": 8, "topk_group": 4, "n_shared_experts": 1, "routed_scaling_factor": 2.5}

FAMILIES: dict[str, Family] = {
    "llama": Family(off=("attention_bias", "mlp_bias"), absent=_ALWAYS),
    "mistral": Family(off=("sliding_window",), absent=_ALWAYS),  # weights by the package megatron-bridge
    "qwen2": Family(qkv_bias=True, off=("use_sliding_window",), absent=_ALWAYS),
    "qwen3": Family(qk_norm=True, off=("attention_bias", "use_sliding_window"), absent={**_ALWAYS, "head_dim": 128}),
    "qwen3_moe": Family(
        qk_norm=True,
        router="softmax",
        off=("attention_bias", "use_sliding_window"),
        absent={**_ALWAYS, "norm_topk_prob": False},
    ),
    "glm4_moe": Family(
        qkv_bias="attention_bias",
        qk_norm="use_qk_norm",
        router="sigmoid",
        rotary_share=0.5,
        fixed=_SIGMOID_FIXED,
        absent={
            **_ALWAYS,
            **{"attention_bias": False, "use_qk_norm": False, "n_group": 1, "topk_group": 1},
            **{"n_shared_experts": 1, "routed_scaling_factor": 1.0},
        },
    ),
    "deepseek_v3": Family(
        latent=True,
        router="sigmoid",
        off=("attention_bias",),
        fixed={**_SIGMOID_FIXED, "rope_interleave": True},
        absent={**_ALWAYS, **_DEEPSEEK},
    ),
    "deepseek_v32": Family(
        latent=True,
        router="sigmoid",
        indexer=True,
        off=("attention_bias", "mlp_bias"),
        fixed={**_SIGMOID_FIXED, "rope_interleave": True, "index_topk_freq": 1},
        absent={**_ALWAYS, **_DEEPSEEK, "indexer_rope_interleave": False},
    ),
    "glm_moe_dsa": Family(
        latent=True,
        router="sigmoid",
        indexer=True,
        off=("attention_bias", "mlp_bias"),
        fixed={**_SIGMOID_FIXED, "rope_interleave": True},
        absent={
            **_ALWAYS,
            **{"n_group": 1, "topk_group": 1, "n_shared_experts": 1, "routed_scaling_factor": 2.5},
            "indexer_rope_interleave": True,
        },
    ),
}
