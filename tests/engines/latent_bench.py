"""One attention layer twice: as transformers computes it and as the Megatron engine does, with the same weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import MLATransformerConfig
from torch import Tensor, nn
from transformers import DeepseekV3Config, DeepseekV32Config, GlmMoeDsaConfig
from transformers.models.deepseek_v3 import modeling_deepseek_v3
from transformers.models.deepseek_v32 import modeling_deepseek_v32
from transformers.models.glm_moe_dsa import modeling_glm_moe_dsa

from engines.batch import cumulative
from engines.megatron import cpu
from engines.megatron.context_parallel import Cut
from engines.megatron.layers.dsa.choice import Choice
from engines.megatron.layers.mla import mla_attention_spec
from engines.megatron.layers.options import AttentionOptions, IndexerOptions

SIZES = dict(
    hidden_size=80,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=4,
    q_lora_rank=36,
    kv_lora_rank=22,
    qk_nope_head_dim=12,
    qk_rope_head_dim=8,
    v_head_dim=28,
    rms_norm_eps=1e-6,
    max_position_embeddings=256,
)
INDEXER = dict(index_n_heads=16, index_head_dim=20, index_topk=4)
YARN = dict(rope_type="yarn", rope_theta=1e4, factor=40.0, mscale=0.7, mscale_all_dim=1.0, beta_fast=32, beta_slow=1)
YARN["original_max_position_embeddings"] = 64
ROPES = {"rope": dict(rope_type="default", rope_theta=1e4), "yarn": YARN}
KINDS = {  # config class, extra sizes, module, class name prefix
    "deepseek_v3": (DeepseekV3Config, {}, modeling_deepseek_v3, "DeepseekV3"),
    "deepseek_v32": (DeepseekV32Config, INDEXER, modeling_deepseek_v32, "DeepseekV32"),
    "glm_moe_dsa": (GlmMoeDsaConfig, INDEXER, modeling_glm_moe_dsa, "GlmMoeDsa"),
}
# transformers name -> Megatron name of one layer's attention; kv_b_proj apart
NAMES = {
    "q_proj": "linear_q_proj",
    "q_a_proj": "linear_q_down_proj",
    "q_a_layernorm": "q_layernorm",
    "q_b_proj": "linear_q_up_proj",
    "kv_a_proj_with_mqa": "linear_kv_down_proj",
    "kv_a_layernorm": "kv_layernorm",
    "kv_b_proj": "linear_kv_up_proj",
    "o_proj": "linear_proj",
    "indexer.wq_b": "core_attention.indexer.linear_wq_b",
    "indexer.wk": "core_attention.indexer.linear_wk",
    "indexer.k_norm": "core_attention.indexer.k_norm",
    "indexer.weights_proj": "core_attention.indexer.linear_weights_proj",
}


def initialise(tp: int = 1, cp: int = 1) -> None:
    """Megatron's groups over the ranks of the test; a second call replaces them."""
    cpu.adapt()
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp, context_parallel_size=cp)
    tensor_parallel.model_parallel_cuda_manual_seed(0)


def hf_config(kind: str, rope: str = "rope", **changes: object):
    config_class, extra, _, _ = KINDS[kind]
    config = config_class(**{**SIZES, **extra, "rope_parameters": dict(ROPES[rope]), **changes})
    config._attn_implementation = "eager"
    return config


def hf_attention(config, layer: int = 0, seed: int = 0) -> nn.Module:
    """Random weights large enough for peaked attention, gains 1 +- 0.3, a random k_norm bias."""
    _, _, module, prefix = KINDS[config.model_type]
    attention = getattr(module, f"{prefix}Attention")(config, layer)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, value in attention.named_parameters():
            if "norm" in name and name.endswith("weight"):
                value.copy_(1 + 0.6 * (torch.rand(value.shape, generator=generator) - 0.5))
            else:
                value.copy_(0.12 * torch.randn(value.shape, generator=generator))
    return attention


def hf_forward(attention: nn.Module, hidden_SX: Tensor, chosen: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """Outputs [S, X] of one sequence and, in a sparse layer, the keys [S, K]; `chosen` for a layer that shares."""
    config, length = attention.config, hidden_SX.shape[0]
    _, _, module, prefix = KINDS[config.model_type]
    rotary = getattr(module, f"{prefix}RotaryEmbedding")(config)
    position_ids = torch.arange(length)[None]
    mask = torch.full((length, length), float("-inf")).triu(1)[None, None]
    extra = {} if config.model_type == "deepseek_v3" else {"position_ids": position_ids}
    if config.model_type == "glm_moe_dsa":
        extra["prev_topk_indices"] = None if chosen is None else chosen[None]
    seen: list[Tensor] = []
    if chosen is None and config.model_type != "deepseek_v3":
        hook = attention.indexer.register_forward_hook(lambda module, args, out: seen.append(out[0]))
    out = attention(hidden_SX[None], rotary(hidden_SX, position_ids), mask, **extra)[0][0]
    if seen:
        hook.remove()
    return out, seen[0] if seen else chosen


def megatron_config(hf, absorb: bool = False, tp: int = 1, cp: int = 1, sp: bool = True, **changes: object):
    """The fields an attention layer reads; `changes` go to MLATransformerConfig, and `loss_coeff` to the indexer."""
    rope, sparse = hf.rope_parameters, hf.model_type != "deepseek_v3"
    indexer = None
    if sparse:
        full = [kind == "full" for kind in hf.indexer_types] if hf.model_type == "glm_moe_dsa" else [True] * 3
        indexer = IndexerOptions(
            heads=hf.index_n_heads,
            head_dim=hf.index_head_dim,
            topk=hf.index_topk,
            rope_interleaved=hf.model_type == "glm_moe_dsa",
            full_layers=tuple(full),
            loss_coeff=changes.pop("loss_coeff", 0.0),
        )
    fields = dict(
        num_layers=hf.num_hidden_layers,
        hidden_size=hf.hidden_size,
        num_attention_heads=hf.num_attention_heads,
        q_lora_rank=hf.q_lora_rank,
        kv_lora_rank=hf.kv_lora_rank,
        qk_head_dim=hf.qk_nope_head_dim,
        qk_pos_emb_head_dim=hf.qk_rope_head_dim,
        v_head_dim=hf.v_head_dim,
        layernorm_epsilon=hf.rms_norm_eps,
        qk_layernorm=True,
        add_bias_linear=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        rope_type="yarn" if rope["rope_type"] == "yarn" else "rope",
        rotary_base=rope["rope_theta"],
        rotary_scaling_factor=rope.get("factor", 1.0),
        tensor_model_parallel_size=tp,
        context_parallel_size=cp,
        sequence_parallel=sp and tp > 1,
        perform_initialization=False,
        use_cpu_initialization=True,
        apply_rope_fusion=False,
    )
    if rope["rope_type"] == "yarn":
        names = ("mscale", "mscale_all_dim", "beta_fast", "beta_slow", "original_max_position_embeddings")
        fields.update({name: rope[name] for name in names})
    config = MLATransformerConfig(**{**fields, **changes})
    config.attention_options = AttentionOptions(absorb=absorb, indexer=indexer)
    return config


def megatron_attention(config: MLATransformerConfig, layer: int = 0, source: nn.Module | None = None) -> nn.Module:
    """This rank's shard of the layer, with the weights of `source`."""
    attention = build_module(mla_attention_spec(config), config=config, layer_number=layer + 1)
    if source is not None:
        expected = converted(dict(source.named_parameters()), config)
        own = dict(attention.named_parameters())
        assert own.keys() == expected.keys(), sorted(own.keys() ^ expected.keys())
        with torch.no_grad():
            for name, value in own.items():
                value.copy_(shard(expected[name].detach(), value))
    return attention


def converted(values: dict[str, Tensor], config: MLATransformerConfig) -> dict[str, Tensor]:
    """transformers' tensors by name (weights, or gradients) under Megatron's names, whole."""
    out = {}
    for name, value in values.items():
        module, _, leaf = name.rpartition(".")
        if module == "kv_b_proj" and config.attention_options.absorb:
            per_head = value.view(config.num_attention_heads, config.qk_head_dim + config.v_head_dim, -1)
            out["linear_k_up_proj.weight"] = per_head[:, : config.qk_head_dim].flatten(0, 1)
            out["linear_v_up_proj.weight"] = per_head[:, config.qk_head_dim :].flatten(0, 1)
        else:
            out[f"{NAMES[module]}.{leaf}"] = value
    return out


def shard(whole: Tensor, own: Tensor) -> Tensor:
    """This tensor-parallel rank's part of a tensor, along the dimension in which `own` is smaller."""
    rank = parallel_state.get_tensor_model_parallel_rank()
    for dim, (full, part) in enumerate(zip(whole.shape, own.shape, strict=True)):
        if full != part:
            return whole.narrow(dim, rank * part, part)
    return whole


def packed(lengths: Sequence[int]) -> PackedSeqParams:
    cu_seqlens = cumulative(lengths).int()
    return PackedSeqParams("thd", cu_seqlens, cu_seqlens, max_seqlen_q=max(lengths), max_seqlen_kv=max(lengths))


def share(x_TX: Tensor, part: Cut, config: MLATransformerConfig) -> Tensor:
    """[t, 1, X]: the tokens that this rank holds under context and sequence parallelism; padding is zero."""
    x_CX = part.local(x_TX.detach())
    if config.sequence_parallel:
        x_CX = x_CX.chunk(config.tensor_model_parallel_size)[parallel_state.get_tensor_model_parallel_rank()]
    return x_CX.unsqueeze(1).clone()


def finish_gradients(attention: nn.Module) -> dict[str, Tensor]:
    """Gradients by name after what Megatron adds: over context-parallel ranks, and over tensor-parallel ones where a
    parameter is marked."""
    out = {}
    for name, value in attention.named_parameters():
        if value.grad is None:
            continue
        dist.all_reduce(value.grad, group=parallel_state.get_context_parallel_group())
        if getattr(value, "sequence_parallel", False):
            dist.all_reduce(value.grad, group=parallel_state.get_tensor_model_parallel_group())
        out[name] = value.grad
    return out


def record_choices(attention: nn.Module) -> list[Choice]:
    """What the layer's indexer chooses from now on, one entry per forward pass that needed it."""
    seen: list[Choice] = []
    attention.core_attention.indexer.register_forward_hook(lambda module, args, choice: seen.append(choice))
    return seen


def key_sets(choice_nK: Tensor, start: int) -> list[set[int]]:
    """Per query the keys it attends to."""
    return [{key for key in keys if key <= start + row} for row, keys in enumerate(choice_nK.tolist())]
