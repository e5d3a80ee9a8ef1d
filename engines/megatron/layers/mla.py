"""Which latent attention a layer gets: plain or absorbed, over all keys or over the indexer's choice."""

from __future__ import annotations

from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import multi_latent_attention as megatron
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import MLATransformerConfig

from engines.megatron.layers.absorbed import AbsorbedLatentAttention
from engines.megatron.layers.attention import PackedCoreAttention
from engines.megatron.layers.dsa.attention import SparseCoreAttention
from engines.megatron.layers.dsa.sharing import check_stage_starts
from engines.megatron.layers.latent import LatentAttention
from engines.megatron.layers.norms import Norm


def mla_attention_spec(config: MLATransformerConfig) -> ModuleSpec:
    """The self-attention of every latent-attention layer, as `config.attention_options` says.

    Raises ValueError for what these layers cannot do; see `_check`.
    """
    options = config.attention_options
    _check(config)
    # megatron-core 0.16.1 takes TransformerEngine for present as soon as its own wrapper can be imported, and then
    # compares modules with classes that are stand-ins.
    megatron.HAVE_TE = HAVE_TE
    return ModuleSpec(
        module=AbsorbedLatentAttention if options.absorb else LatentAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=megatron.MLASelfAttentionSubmodules(
            linear_q_proj=ColumnParallelLinear,
            linear_q_down_proj=ColumnParallelLinear,
            linear_q_up_proj=ColumnParallelLinear,
            linear_kv_down_proj=ColumnParallelLinear,
            linear_kv_up_proj=ColumnParallelLinear,
            core_attention=PackedCoreAttention if options.indexer is None else SparseCoreAttention,
            linear_proj=RowParallelLinear,
            q_layernorm=Norm,
            kv_layernorm=Norm,
        ),
    )


def _check(config: MLATransformerConfig) -> None:
    tp = config.tensor_model_parallel_size
    key_width = config.kv_lora_rank + config.qk_pos_emb_head_dim
    widths = {"kv_lora_rank + qk_rope_head_dim": key_width, "num_attention_heads": config.num_attention_heads}
    if config.q_lora_rank is not None:
        widths["q_lora_rank"] = config.q_lora_rank
    for name, width in widths.items():
        if width % tp:
            raise ValueError(f"got {name}={width} with TP {tp}; expected a multiple; lower tensor_model_parallel_size")
    if config.recompute_granularity == "selective" and "mla_up_proj" in config.recompute_modules:
        raise ValueError(
            "got mla_up_proj among the modules to recompute; expected core_attn, mlp, moe or shared_experts; change "
            "override_transformer_config.recompute_modules, or set recompute_granularity=full"
        )
    if config.attention_options.indexer is None:
        return
    if config.q_lora_rank is None:
        raise ValueError(
            "got sparse attention with q_lora_rank=null; expected a query latent, which the indexer reads; "
            "correct config.json"
        )
    check_stage_starts(config)
