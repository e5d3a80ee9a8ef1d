"""Layers that predict further tokens (MTP; DeepSeek-V3, arXiv 2412.19437), carried along but never run.

They serve speculative decoding in the rollout. Training scores the model's own next-token distribution, so they
get no gradient here and do not touch the main logits; they are loaded, exported and synchronised with the rest.
"""

from __future__ import annotations

from copy import copy

from megatron.core.models.backends import LocalSpecProvider
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlock,
    MultiTokenPredictionBlockSubmodules,
    get_mtp_layer_spec_for_backend,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig

from engines.megatron.layers.norms import Norm


def carried_layers(
    config: TransformerConfig, layer: ModuleSpec, count: int, vp_stage: int | None
) -> MultiTokenPredictionBlock:
    """`count` frozen prediction layers around decoder layers of the given kind, for the last pipeline stage."""
    spec = get_mtp_layer_spec_for_backend(layer, LocalSpecProvider())
    spec.submodules.enorm = spec.submodules.hnorm = spec.submodules.layer_norm = Norm
    # A copy: told on the model's own config, GPTModel would run the layers and ask for labels.
    config = copy(config)
    config.mtp_num_layers = count
    layers = MultiTokenPredictionBlockSubmodules(layer_specs=[spec] * count)
    return MultiTokenPredictionBlock(config=config, spec=layers, vp_stage=vp_stage).requires_grad_(False)
