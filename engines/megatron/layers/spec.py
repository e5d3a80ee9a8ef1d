"""Megatron's local layer spec with the parts that do not run everywhere replaced by ours."""

from __future__ import annotations

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from engines.megatron.layers.attention import PackedCoreAttention
from engines.megatron.layers.norms import Norm


def block_spec(config: TransformerConfig, vp_stage: int | None) -> TransformerBlockSubmodules:
    """The layers of this pipeline stage and virtual chunk: local linears, our norms and core attention."""
    spec = get_gpt_decoder_block_spec(
        config, use_transformer_engine=False, normalization=config.normalization, vp_stage=vp_stage
    )
    for layer in spec.layer_specs:
        layer.submodules.input_layernorm = Norm
        layer.submodules.pre_mlp_layernorm = Norm
        attention = layer.submodules.self_attention.submodules
        attention.core_attention = PackedCoreAttention
        if attention.q_layernorm is not IdentityOp:
            attention.q_layernorm = Norm
            attention.k_layernorm = Norm
    spec.layer_norm = Norm
    return spec
