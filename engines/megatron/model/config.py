"""TransformerConfig: the model's fields, the engine's own, and the user's overrides."""

from __future__ import annotations

import dataclasses
import difflib
from typing import Any

import torch
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from engines.megatron.model.families import FAMILIES
from engines.megatron.model.fields import attention_options, model_fields
from engines.megatron.model.splits import check_splits
from engines.megatron.parallel import expert_tensor_parallel_size
from engines.spec import MegatronSpec, ModelSpec

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

# TransformerConfig fields that have their own setting or follow from the model.
_OWN_SETTING = {
    "sequence_parallel": "sequence_parallel",
    "tensor_model_parallel_size": "tensor_model_parallel_size",
    "pipeline_model_parallel_size": "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size": "virtual_pipeline_model_parallel_size",
    "context_parallel_size": "context_parallel_size",
    "expert_model_parallel_size": "expert_model_parallel_size",
    "expert_tensor_parallel_size": "expert_tensor_parallel_size",
    "params_dtype": "dtype",
    "bf16": "dtype",
    "fp16": "dtype",
}


def transformer_config(hf: dict[str, Any], model: ModelSpec, backend: MegatronSpec, device: str) -> TransformerConfig:
    """All numeric fields from the model, all parallel ones from the backend, then the overrides.

    `config.attention_options` holds what Megatron has no field for. Raises ValueError for unknown or reserved
    override keys and impossible splits.
    """
    if backend.dtype not in DTYPES:
        raise ValueError(f"got dtype {backend.dtype!r}; expected one of {sorted(DTYPES)}; set the engine's dtype")
    kind = MLATransformerConfig if FAMILIES[hf["model_type"]].latent else TransformerConfig
    overrides = _checked_overrides(backend.override_transformer_config, kind)
    check_splits(hf, backend, overrides)
    fields = model_fields(hf) | _engine_fields(backend, device)
    choices = _choices(model)
    _check_reserved(overrides, fields)
    config = kind(**{**fields, **choices, **overrides})
    config.attention_options = attention_options(hf, backend)
    return config


def _engine_fields(backend: MegatronSpec, device: str) -> dict[str, Any]:
    dtype, virtual = DTYPES[backend.dtype], backend.virtual_pipeline_model_parallel_size
    return dict(
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        tensor_model_parallel_size=backend.tensor_model_parallel_size,
        pipeline_model_parallel_size=backend.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=virtual,
        # Batched transfers pair up by order: with two interleaved stages, whose next and previous peer is the
        # same rank, activations and gradients would be exchanged for each other.
        overlap_p2p_comm=virtual is not None,
        batch_p2p_comm=virtual is None,
        context_parallel_size=backend.context_parallel_size,
        expert_model_parallel_size=backend.expert_model_parallel_size,
        expert_tensor_parallel_size=expert_tensor_parallel_size(backend),
        # With one rank there is nothing to split; Megatron refuses the combination.
        sequence_parallel=backend.sequence_parallel and backend.tensor_model_parallel_size > 1,
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",  # checked in dense models too: the default wants fixed lengths
        # Gradients are sums: losses arrive already divided by global denominators.
        calculate_per_token_loss=True,
        # load() writes every parameter; drawing values would build each full matrix on every rank.
        perform_initialization=False,
        use_cpu_initialization=device == "cpu",
    )


def _choices(model: ModelSpec) -> dict[str, Any]:
    """How, not what: overrides may change these."""
    choices = dict(
        transformer_impl="local",
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        moe_grouped_gemm=False,
        moe_permute_fusion=False,
        moe_router_fusion=False,
        moe_shared_expert_overlap=False,
    )
    if model.gradient_checkpointing:
        choices.update(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
    return choices


def _check_reserved(overrides: dict[str, Any], derived: dict[str, Any]) -> None:
    """What follows from the model or from another setting has one source: an override may only repeat it."""
    for key, value in overrides.items():
        if (key in derived and value != derived[key]) or (key in _OWN_SETTING and key not in derived):
            source = _OWN_SETTING.get(key, "actor_rollout_ref.model.override_config (if the model should change)")
            raise ValueError(
                f"got override_transformer_config.{key}; expected the value that the engine derives itself; "
                f"remove it, and set {source} instead"
            )


def _checked_overrides(overrides: dict[str, Any], kind: type[TransformerConfig]) -> dict[str, Any]:
    known = {field.name for field in dataclasses.fields(kind)}
    for key in overrides:
        if key not in known:
            nearest = difflib.get_close_matches(key, known, n=3, cutoff=0.5)
            raise ValueError(
                f"got override_transformer_config.{key}; expected a field of Megatron's {kind.__name__}"
                f"{', such as ' + ', '.join(nearest) if nearest else ''}; correct or remove the key"
            )
    return {key: value for key, value in overrides.items() if value is not None}
