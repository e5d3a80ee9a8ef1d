"""Megatron's local layer spec with the parts that do not run everywhere replaced by ours."""

from __future__ import annotations

from functools import partial

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe.moe_layer import MoESubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from engines.megatron.layers.attention import PackedCoreAttention
from engines.megatron.layers.mla import mla_attention_spec
from engines.megatron.layers.moe import Router
from engines.megatron.layers.norms import Norm


def block_spec(config: TransformerConfig, vp_stage: int | None) -> TransformerBlockSubmodules:
    """The layers of this pipeline stage and virtual chunk: local linears; our norms, attention and router."""
    spec = get_gpt_decoder_block_spec(
        config, use_transformer_engine=False, normalization=config.normalization, vp_stage=vp_stage
    )
    for layer in spec.layer_specs:
        make_portable(layer, config)
    spec.layer_norm = Norm
    return spec


def make_portable(layer: ModuleSpec, config: TransformerConfig) -> None:
    """Replace in one layer spec, in place. Layers of one kind share their spec: doing it again changes nothing."""
    layer.submodules.input_layernorm = Norm
    layer.submodules.pre_mlp_layernorm = Norm
    if config.multi_latent_attention:
        layer.submodules.self_attention = mla_attention_spec(config)
    else:
        attention = layer.submodules.self_attention.submodules
        attention.core_attention = PackedCoreAttention
        if attention.q_layernorm is not IdentityOp:
            attention.q_layernorm = Norm
            attention.k_layernorm = Norm
    use_own_router(layer)


def use_own_router(layer: ModuleSpec) -> None:
    """The router of a mixture of experts, in place; dense layers have none."""
    # 0.16 wraps the MLP's parts in a ModuleSpec, 0.19 in a partial.
    mlp = layer.submodules.mlp
    parts = mlp.keywords["submodules"] if isinstance(mlp, partial) else mlp.submodules
    if isinstance(parts, MoESubmodules):
        parts.router = Router
