"""Layers that use the choice of an earlier layer (GLM-5.2, arXiv 2603.12201).

A choice must be found by the right layer of the right micro-batch, in the forward pass and again when activations
are recomputed, when several micro-batches are in flight. The one object that all layers of a model chunk see for
one micro-batch, both times, is its PackedSeqParams: it carries the choices, and they die with it.
"""

from __future__ import annotations

from functools import partial

from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.transformer_config import MLATransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from engines.megatron.layers.dsa.choice import Choice
from engines.megatron.layers.options import IndexerOptions

_NAME = "dsa_choices"


def is_full(options: IndexerOptions, layer: int) -> bool:
    """Whether global layer `layer` (from 0) owns an indexer. Layers behind the listed ones predict further
    tokens (MTP) and always do."""
    return layer >= len(options.full_layers) or options.full_layers[layer]


def source_of(options: IndexerOptions, layer: int) -> int:
    """The layer whose choice `layer` uses: itself, or the last full one before it."""
    while not is_full(options, layer):
        layer -= 1
        assert layer >= 0, f"full_layers={options.full_layers} starts with a layer without an indexer"
    return layer


def leave(sequences: PackedSeqParams, options: IndexerOptions, layer: int, choice: Choice) -> None:
    """Keep the choice of a full layer if the next one needs it."""
    if not is_full(options, layer + 1):
        vars(sequences).setdefault(_NAME, {})[layer] = choice


def find(sequences: PackedSeqParams, options: IndexerOptions, layer: int) -> Choice:
    return vars(sequences)[_NAME][source_of(options, layer)]


def check_stage_starts(config: MLATransformerConfig) -> None:
    """Every pipeline stage and virtual chunk must start on a full layer, because choices do not travel between
    stages. Raises ValueError naming the layers, on all ranks alike."""
    options, starts = config.attention_options.indexer, _stage_starts(config)
    shared = [start for start in starts if not is_full(options, start)]
    if shared:
        full = [layer for layer in range(config.num_layers) if is_full(options, layer)]
        raise ValueError(
            f"got pipeline stages that start on layers {starts} (from 0), of which {shared} have no indexer of their "
            f"own; expected starts among {full}; change "
            "override_transformer_config.num_layers_in_first_pipeline_stage, num_layers_in_last_pipeline_stage or "
            "pipeline_model_parallel_layout"
        )


def _stage_starts(config: MLATransformerConfig) -> list[int]:
    """First global layer of every stage and virtual chunk of all ranks."""
    layout, chunks = config.pipeline_model_parallel_layout, config.virtual_pipeline_model_parallel_size
    # With an explicit layout get_transformer_layer_offset answers for its own rank only.
    offset = partial(get_transformer_layer_offset, config) if layout is None else layout.get_layer_offset
    stages = range(config.pipeline_model_parallel_size)
    return sorted({offset(vp_stage=chunk, pp_rank=stage) for stage in stages for chunk in range(chunks or 1)})
