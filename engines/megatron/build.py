"""From a Hugging Face config to Megatron's TransformerConfig and GPTModel.

Every field that decides a number is set, none is left to a default, and every Hugging Face option that
Megatron would compute differently is refused before anything is built (model/).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from bridge import has_value_head
from engines.megatron.layers.mtp import carried_layers
from engines.megatron.layers.spec import block_spec
from engines.megatron.layers.value_head import replace_output_layer
from engines.megatron.model.config import transformer_config
from engines.megatron.model.families import FAMILIES
from engines.megatron.model.hf_config import head_size, read_hf_config
from engines.megatron.rope import inverse_frequencies, rope_parameters
from engines.spec import MegatronSpec

LayerSpecs = Callable[[TransformerConfig, int | None], TransformerBlockSubmodules]

__all__ = ["build_chunks", "padded_vocab_size", "read_hf_config", "transformer_config"]


def padded_vocab_size(hf: dict[str, Any], backend: MegatronSpec) -> int:
    """Vocabulary rounded up to a multiple of make_vocab_size_divisible_by x TP."""
    multiple = backend.make_vocab_size_divisible_by * backend.tensor_model_parallel_size
    return math.ceil(hf["vocab_size"] / multiple) * multiple


def build_chunks(
    config: TransformerConfig, hf: dict[str, Any], backend: MegatronSpec, layers: LayerSpecs = block_spec
) -> list[GPTModel]:
    """The GPTModel of this rank, one per virtual pipeline chunk, made of `layers` (config, virtual stage).

    Parameters are uninitialised.
    """
    stages = backend.virtual_pipeline_model_parallel_size
    return [_build_chunk(config, hf, backend, stage, layers) for stage in (range(stages) if stages else [None])]


def _build_chunk(
    config: TransformerConfig, hf: dict[str, Any], backend: MegatronSpec, stage: int | None, layers: LayerSpecs
) -> GPTModel:
    block = layers(config, stage)
    chunk = GPTModel(
        config=config,
        transformer_layer_spec=block,
        vocab_size=padded_vocab_size(hf, backend),
        max_sequence_length=hf["max_position_embeddings"],
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
        share_embeddings_and_output_weights=hf["tie_word_embeddings"],
        position_embedding_type="rope",
        vp_stage=stage,
        **_rotary(config, hf),
    )
    if not config.multi_latent_attention:
        # Megatron's own llama3 scaling is fixed to one original length: give it the exact frequencies.
        device = chunk.rotary_pos_emb.inv_freq.device
        share = FAMILIES[hf["model_type"]].rotary_share
        chunk.rotary_pos_emb.inv_freq = inverse_frequencies(hf, head_size(hf), share).to(device)
    if has_value_head(hf) and chunk.post_process:
        replace_output_layer(chunk)
    predictors = hf.get("num_nextn_predict_layers") if backend.mtp else None
    if predictors and chunk.post_process:
        chunk.mtp = carried_layers(config, block.layer_specs[-1], predictors, stage)
    _mark_split_parameters(chunk)
    _mark_expert_parameters(chunk)
    return chunk


def _rotary(config: TransformerConfig, hf: dict[str, Any]) -> dict[str, Any]:
    """Latent attention has its own rotary embedding and reads it from the config."""
    if config.multi_latent_attention:
        return {}
    rope = rope_parameters(hf, share=FAMILIES[hf["model_type"]].rotary_share)
    return dict(rotary_base=rope["rope_theta"], rotary_percent=rope["partial_rotary_factor"])


def _mark_split_parameters(chunk: GPTModel) -> None:
    """Say which weights are cut over tensor-parallel ranks, so that the gradient norm counts each element once.

    Megatron-Core 0.16 sets these marks only while it draws initial values, which we skip
    (perform_initialization); 0.19 sets them always, and refuses to be told twice.
    """
    dims = {ColumnParallelLinear: 0, VocabParallelEmbedding: 0, RowParallelLinear: 1}
    for module in chunk.modules():
        if type(module) in dims and module.weight is not None and not hasattr(module.weight, "tensor_model_parallel"):
            set_tensor_model_parallel_attributes(module.weight, True, dims[type(module)], 1)


def _mark_expert_parameters(chunk: GPTModel) -> None:
    """Send every expert gradient through the expert data-parallel group.

    Megatron does so (`allreduce` False) only with EP > 1. With EP 1 and an expert-TP size other than TP, the
    tensor-parallel ranks hold copies of the experts that see different tokens: their gradients must be added too.
    """
    for module in chunk.modules():
        if isinstance(module, MoELayer):
            for parameter in module.experts.parameters():
                parameter.allreduce = False
