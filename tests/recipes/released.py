"""config.json of released models, as far as sizes and arithmetic go: no weights, nothing to download."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_SIGMOID_EXPERTS = dict(
    n_routed_experts=256,
    n_shared_experts=1,
    num_experts_per_tok=8,
    moe_intermediate_size=2048,
    first_k_dense_replace=3,
    norm_topk_prob=True,
    routed_scaling_factor=2.5,
    scoring_func="sigmoid",
    topk_method="noaux_tc",
    num_nextn_predict_layers=1,
)
_COMMON = dict(hidden_act="silu", attention_bias=False, tie_word_embeddings=False, dtype="bfloat16")

# https://huggingface.co/zai-org/GLM-5
GLM_5 = dict(
    _COMMON,
    **_SIGMOID_EXPERTS,
    architectures=["GlmMoeDsaForCausalLM"],
    model_type="glm_moe_dsa",
    vocab_size=154880,
    hidden_size=6144,
    intermediate_size=12288,
    num_hidden_layers=78,
    num_attention_heads=64,
    num_key_value_heads=64,
    q_lora_rank=2048,
    kv_lora_rank=512,
    qk_nope_head_dim=192,
    qk_rope_head_dim=64,
    v_head_dim=256,
    index_n_heads=32,
    index_head_dim=128,
    index_topk=2048,
    indexer_rope_interleave=True,
    n_group=1,
    topk_group=1,
    rms_norm_eps=1e-5,
    max_position_embeddings=202752,
    rope_parameters={"rope_type": "default", "rope_theta": 1000000},
)
# https://huggingface.co/deepseek-ai/DeepSeek-V3.2, dequantised
DEEPSEEK_V32 = dict(
    _COMMON,
    **_SIGMOID_EXPERTS,
    architectures=["DeepseekV32ForCausalLM"],
    model_type="deepseek_v32",
    vocab_size=129280,
    hidden_size=7168,
    intermediate_size=18432,
    num_hidden_layers=61,
    num_attention_heads=128,
    num_key_value_heads=128,
    q_lora_rank=1536,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    index_n_heads=64,
    index_head_dim=128,
    index_topk=2048,
    n_group=8,
    topk_group=4,
    rms_norm_eps=1e-6,
    max_position_embeddings=163840,
    rope_theta=10000,
    rope_scaling=dict(
        type="yarn",
        factor=40,
        original_max_position_embeddings=4096,
        beta_fast=32,
        beta_slow=1,
        mscale=1.0,
        mscale_all_dim=1.0,
    ),
)
# https://huggingface.co/Qwen/Qwen3-30B-A3B
QWEN3_30B_A3B = dict(
    _COMMON,
    architectures=["Qwen3MoeForCausalLM"],
    model_type="qwen3_moe",
    vocab_size=151936,
    hidden_size=2048,
    intermediate_size=6144,
    num_hidden_layers=48,
    num_attention_heads=32,
    num_key_value_heads=4,
    head_dim=128,
    num_experts=128,
    num_experts_per_tok=8,
    moe_intermediate_size=768,
    norm_topk_prob=True,
    decoder_sparse_step=1,
    mlp_only_layers=[],
    rms_norm_eps=1e-6,
    max_position_embeddings=40960,
    rope_theta=1000000.0,
    rope_scaling=None,
)
# https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct
SMOLLM2_135M = dict(
    _COMMON,
    architectures=["LlamaForCausalLM"],
    model_type="llama",
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    rms_norm_eps=1e-5,
    max_position_embeddings=8192,
    rope_theta=100000,
) | {"tie_word_embeddings": True}


def write_config(folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder
