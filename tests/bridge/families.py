"""Small configs of every family, random weights for them, and what each rank of Megatron-Core must hold, written
down a second time with plain reshapes. No transformers and no Megatron-Core: rank processes import this module."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

from bridge.layout import Layout
from bridge.offline import OfflineModel
from bridge.pipeline import stage_layers
from bridge.predict import Form
from tests.bridge.fake import fuse_qkv

Config = dict[str, Any]

_COMMON = dict(
    vocab_size=130,
    hidden_size=80,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=104,
    hidden_act="silu",
    tie_word_embeddings=False,
)
_EXPERTS = dict(moe_intermediate_size=44, num_experts_per_tok=2)
_SIGMOID = {**_EXPERTS, "n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1}
_MLA = dict(q_lora_rank=36, kv_lora_rank=24, qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=28)
_INDEXER = dict(index_n_heads=3, index_head_dim=20, index_topk=4)
_EXTRA = dict(num_nextn_predict_layers=1)

CONFIGS: dict[str, Config] = {
    "llama": {"head_dim": 24},
    "qwen2": {"head_dim": 24},
    "qwen3": {"head_dim": 24, "tie_word_embeddings": True},
    "qwen3_moe": {"head_dim": 24, **_EXPERTS, "num_experts": 8, "mlp_only_layers": [1]},
    "glm4_moe": {"head_dim": 24, **_SIGMOID, **_EXTRA, "use_qk_norm": True, "attention_bias": True},
    "deepseek_v3": {**_SIGMOID, **_MLA, **_EXTRA},
    "deepseek_v32": {**_SIGMOID, **_MLA, **_INDEXER, **_EXTRA},
    "glm_moe_dsa": {**_SIGMOID, **_MLA, **_INDEXER, **_EXTRA, "indexer_types": ["full", "shared", "full", "full"]},
}


def config_of(family: str, **changes: Any) -> Config:
    return {"model_type": family, **_COMMON, **CONFIGS[family], **changes}


def plan(
    config: dict,
    form: Form | None = None,
    dtype: torch.dtype = torch.bfloat16,
    layers: list[int] | None = None,
    **sizes,
) -> OfflineModel:
    form, layout = form or Form(vocab_multiple=8), Layout(**sizes)
    stages = stage_layers(config["num_hidden_layers"], layout.pp, layout.vpp, layers)
    return OfflineModel.make(config, form, layout, stages, dtype)


def random_weights(model: OfflineModel, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> dict[str, Tensor]:
    """Every tensor of the checkpoint; correction biases in float32, as released files have them."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator).to(torch.float32 if name.endswith("_bias") else dtype)
        for name, shape in model.plan.hf_shapes.items()
    }


SAME = {
    "input_layernorm.weight": "input_layernorm.weight",
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "self_attention.linear_q_proj.layer_norm_weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
    "self_attention.kv_layernorm.weight": "self_attn.kv_a_layernorm.weight",
    "self_attention.linear_kv_up_proj.layer_norm_weight": "self_attn.kv_a_layernorm.weight",
    "self_attention.linear_q_up_proj.layer_norm_weight": "self_attn.q_a_layernorm.weight",
    "mlp.router.weight": "mlp.gate.weight",
    "mlp.router.expert_bias": "mlp.gate.e_score_correction_bias",
    "enorm.weight": "enorm.weight",
    "hnorm.weight": "hnorm.weight",
    "final_layernorm.weight": "shared_head.norm.weight",
}
CUT_ROWS = {
    "self_attention.linear_q_proj.weight": "self_attn.q_proj.weight",
    "self_attention.linear_q_up_proj.weight": "self_attn.q_b_proj.weight",
    "self_attention.linear_kv_up_proj.weight": "self_attn.kv_b_proj.weight",
    "eh_proj.weight": "eh_proj.weight",
}
DOWN = {
    "self_attention.linear_q_down_proj.weight": "self_attn.q_a_proj.weight",
    "self_attention.linear_kv_down_proj.weight": "self_attn.kv_a_proj_with_mqa.weight",
}


def expected(model: OfflineModel, hf: dict[str, Tensor], rank: Layout, name: str, dtype: torch.dtype) -> Tensor:
    """What the rank must hold under the global live name."""
    config, tied = model.config, model.config["tie_word_embeddings"]
    if name == "decoder.final_layernorm.weight":
        return hf["model.norm.weight"].to(dtype)
    if name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        embedding = tied or name.startswith("embedding")
        table = hf["model.embed_tokens.weight" if embedding else "lm_head.weight"]
        multiple = model.form.vocab_multiple * rank.tp
        rows = -(-len(table) // multiple) * multiple
        padded = torch.cat([table, table.new_zeros(rows - len(table), table.shape[1])])
        return padded.chunk(rank.tp)[rank.tp_rank].to(dtype)
    found = re.fullmatch(r"(decoder|mtp)\.layers\.(\d+)\.((?:transformer_layer|mtp_model_layer)\.)?(.*)", name)
    layer = int(found[2]) + (config["num_hidden_layers"] if found[1] == "mtp" else 0)
    prefix = f"model.layers.{layer}."
    own = {key.removeprefix(prefix): value.to(dtype) for key, value in hf.items() if key.startswith(prefix)}
    if found[4] == "mlp.router.expert_bias":
        return hf[prefix + SAME[found[4]]]
    return _layer_tensor(model, own, rank, found[4])


def _layer_tensor(model: OfflineModel, hf: dict[str, Tensor], rank: Layout, name: str) -> Tensor:
    config, (tp, t) = model.config, (rank.tp, rank.tp_rank)
    if name in SAME:
        return hf[SAME[name]]
    if name in CUT_ROWS:
        return hf[CUT_ROWS[name]].chunk(tp)[t]
    if name in DOWN:
        return hf[DOWN[name]] if model.form.whole_down else hf[DOWN[name]].chunk(tp)[t]
    if found := re.fullmatch(r"self_attention\.([qk])_layernorm\.weight", name):
        return hf["self_attn.q_a_layernorm.weight" if "kv_lora_rank" in config else f"self_attn.{found[1]}_norm.weight"]
    if found := re.fullmatch(r"self_attention\.linear_qkv\.(weight|bias)", name):
        return fuse_qkv(config, *(hf[f"self_attn.{part}_proj.{found[1]}"] for part in "qkv")).chunk(tp)[t]
    if name == "self_attention.linear_proj.weight":
        return hf["self_attn.o_proj.weight"].chunk(tp, dim=1)[t]
    if found := re.fullmatch(r"self_attention\.linear_([kv])_up_proj\.weight", name):
        dn, dv = config["qk_nope_head_dim"], config["v_head_dim"]
        heads = hf["self_attn.kv_b_proj.weight"].view(config["num_attention_heads"], dn + dv, -1)
        half = heads[:, :dn] if found[1] == "k" else heads[:, dn:]
        return half.flatten(0, 1).chunk(tp)[t]
    if found := re.fullmatch(r"self_attention\.core_attention\.indexer\.(linear_)?(.*)", name):
        return hf[f"self_attn.indexer.{found[2]}"]
    return _mlp_tensor(model, hf, rank, name)


def _mlp_tensor(model: OfflineModel, hf: dict[str, Tensor], rank: Layout, name: str) -> Tensor:
    inner, ranks, mine = "mlp.", rank.tp, rank.tp_rank
    if name.startswith("mlp.shared_experts."):
        inner = "mlp.shared_experts."
    elif found := re.search(r"experts\.(?:local_experts\.(\d+)\.|.*weight(\d+)$)", name):
        block = model.config.get("num_experts", model.config.get("n_routed_experts")) // rank.ep
        inner = f"mlp.experts.{rank.ep_rank * block + int(found[1] or found[2])}."
        ranks, mine = rank.etp, rank.etp_rank
    if "linear_fc1" in name:
        return torch.cat([hf[f"{inner}{part}_proj.weight"].chunk(ranks)[mine] for part in ("gate", "up")])
    return hf[f"{inner}down_proj.weight"].chunk(ranks, dim=1)[mine]
