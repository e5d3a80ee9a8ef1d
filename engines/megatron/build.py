"""From a Hugging Face config to Megatron's TransformerConfig and GPTModel.

Every field that decides a number is set here, none is left to a default, and every Hugging Face option that
Megatron would compute differently is refused before anything is built.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn import functional

from engines.megatron.layers.spec import block_spec
from engines.megatron.rope import inverse_frequencies, rope_base
from engines.spec import MegatronSpec, ModelSpec

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

# model_type -> (qkv bias, query/key norms, {field that must not be truthy})
_FAMILIES: dict[str, tuple[bool, bool, tuple[str, ...]]] = {
    "llama": (False, False, ("attention_bias", "mlp_bias")),
    "qwen2": (True, False, ("use_sliding_window",)),
    "qwen3": (False, True, ("attention_bias", "use_sliding_window")),
}
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


def read_hf_config(model: ModelSpec) -> dict[str, Any]:
    """config.json of a model directory with `override_config` on top.

    Raises ValueError for a missing file, an unsupported family or an option Megatron cannot reproduce.
    """
    path = Path(model.path) / "config.json"
    if not path.is_file():
        raise ValueError(
            f"got model path {model.path} without config.json; expected a Hugging Face directory; set model.path"
        )
    hf = {**json.loads(path.read_text()), **model.override_config}
    if hf["model_type"] not in _FAMILIES:
        raise ValueError(
            f"got model_type {hf['model_type']!r}; expected one of {sorted(_FAMILIES)}; use model_engine=fsdp for it"
        )
    refused = [name for name in _FAMILIES[hf["model_type"]][2] if hf.get(name)]
    if hf["hidden_act"] != "silu":
        refused.append("hidden_act")
    if refused:
        raise ValueError(
            f"got {hf['model_type']} with { ({name: hf[name] for name in refused}) }; expected these options off "
            "(hidden_act silu): the Megatron layers do not compute them; use model_engine=fsdp"
        )
    return hf


def padded_vocab_size(hf: dict[str, Any], backend: MegatronSpec) -> int:
    """Vocabulary rounded up to a multiple of make_vocab_size_divisible_by x TP."""
    multiple = backend.make_vocab_size_divisible_by * backend.tensor_model_parallel_size
    return math.ceil(hf["vocab_size"] / multiple) * multiple


def transformer_config(hf: dict[str, Any], model: ModelSpec, backend: MegatronSpec, device: str) -> TransformerConfig:
    """All numeric fields from the model, all parallel ones from the backend, then the overrides.

    Raises ValueError for unknown or reserved override keys and impossible splits.
    """
    overrides = _checked_overrides(backend.override_transformer_config)
    _check_splits(hf, backend, overrides)
    dtype = DTYPES[backend.dtype]
    qkv_bias, qk_norm, _ = _FAMILIES[hf["model_type"]]
    fields = dict(
        num_layers=hf["num_hidden_layers"],
        hidden_size=hf["hidden_size"],
        ffn_hidden_size=hf["intermediate_size"],
        num_attention_heads=hf["num_attention_heads"],
        num_query_groups=hf["num_key_value_heads"],
        kv_channels=head_size(hf),
        layernorm_epsilon=hf["rms_norm_eps"],
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=functional.silu,
        add_bias_linear=False,
        add_qkv_bias=qkv_bias,
        qk_layernorm=qk_norm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        tensor_model_parallel_size=backend.tensor_model_parallel_size,
        pipeline_model_parallel_size=backend.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=backend.virtual_pipeline_model_parallel_size,
        # Batched transfers pair up by order: with two interleaved stages, whose next and previous peer is the
        # same rank, activations and gradients would be exchanged for each other.
        overlap_p2p_comm=backend.virtual_pipeline_model_parallel_size is not None,
        batch_p2p_comm=backend.virtual_pipeline_model_parallel_size is None,
        context_parallel_size=backend.context_parallel_size,
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
    choices = dict(  # how, not what: overrides may change these
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
    )
    if model.gradient_checkpointing:
        choices.update(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
    _check_reserved(overrides, fields)
    return TransformerConfig(**{**fields, **choices, **overrides})


def _check_reserved(overrides: dict[str, Any], derived: dict[str, Any]) -> None:
    """What follows from the model or from another setting has one source: an override may only repeat it."""
    for key, value in overrides.items():
        if (key in derived and value != derived[key]) or (key in _OWN_SETTING and key not in derived):
            source = _OWN_SETTING.get(key, "actor_rollout_ref.model.override_config (if the model should change)")
            raise ValueError(
                f"got override_transformer_config.{key}; expected the value that the engine derives itself; "
                f"remove it, and set {source} instead"
            )


def head_size(hf: dict[str, Any]) -> int:
    return hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"]


def build_chunks(config: TransformerConfig, hf: dict[str, Any], backend: MegatronSpec) -> list[GPTModel]:
    """The GPTModel of this rank, one per virtual pipeline chunk. Parameters are uninitialised."""
    stages = backend.virtual_pipeline_model_parallel_size
    return [_build_chunk(config, hf, backend, stage) for stage in (range(stages) if stages else [None])]


def _build_chunk(config: TransformerConfig, hf: dict[str, Any], backend: MegatronSpec, stage: int | None) -> GPTModel:
    chunk = GPTModel(
        config=config,
        transformer_layer_spec=block_spec(config, stage),
        vocab_size=padded_vocab_size(hf, backend),
        max_sequence_length=hf["max_position_embeddings"],
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
        share_embeddings_and_output_weights=hf.get("tie_word_embeddings", False),
        position_embedding_type="rope",
        rotary_base=rope_base(hf),
        vp_stage=stage,
    )
    # Megatron's own llama3 scaling is fixed to one original length: give it the exact frequencies.
    device = chunk.rotary_pos_emb.inv_freq.device
    chunk.rotary_pos_emb.inv_freq = inverse_frequencies(hf, head_size(hf)).to(device)
    _mark_split_parameters(chunk)
    return chunk


def _mark_split_parameters(chunk: GPTModel) -> None:
    """Say which weights are cut over tensor-parallel ranks, so that the gradient norm counts each element once.

    Megatron-Core 0.16 sets these marks only while it draws initial values, which we skip
    (perform_initialization); 0.19 sets them always, and refuses to be told twice.
    """
    dims = {ColumnParallelLinear: 0, VocabParallelEmbedding: 0, RowParallelLinear: 1}
    for module in chunk.modules():
        if type(module) in dims and module.weight is not None and not hasattr(module.weight, "tensor_model_parallel"):
            set_tensor_model_parallel_attributes(module.weight, True, dims[type(module)], 1)


def _checked_overrides(overrides: dict[str, Any]) -> dict[str, Any]:
    known = {field.name for field in dataclasses.fields(TransformerConfig)}
    for key in overrides:
        if key not in known:
            nearest = difflib.get_close_matches(key, known, n=3, cutoff=0.5)
            raise ValueError(
                f"got override_transformer_config.{key}; expected a field of Megatron's TransformerConfig"
                f"{', such as ' + ', '.join(nearest) if nearest else ''}; correct or remove the key"
            )
    return {key: value for key, value in overrides.items() if value is not None}


def _check_splits(hf: dict[str, Any], backend: MegatronSpec, overrides: dict[str, Any]) -> None:
    tp = backend.tensor_model_parallel_size
    for name in ("num_attention_heads", "intermediate_size"):
        if hf[name] % tp:
            raise ValueError(
                f"got {name}={hf[name]} with TP {tp}; expected a multiple; lower tensor_model_parallel_size"
            )
    groups = hf["num_key_value_heads"]
    if groups % tp and tp % groups:
        raise ValueError(
            f"got {groups} key/value heads with TP {tp}; expected one to divide the other; "
            "change tensor_model_parallel_size"
        )
    stages = backend.pipeline_model_parallel_size * (backend.virtual_pipeline_model_parallel_size or 1)
    uneven = (
        "num_layers_in_first_pipeline_stage",
        "num_layers_in_last_pipeline_stage",
        "pipeline_model_parallel_layout",
    )
    if hf["num_hidden_layers"] % stages and not any(overrides.get(name) for name in uneven):
        raise ValueError(
            f"got {hf['num_hidden_layers']} layers for {stages} pipeline stages; expected a multiple; "
            "set override_transformer_config.num_layers_in_first_pipeline_stage (or _last_)"
        )
    if backend.dtype not in DTYPES:
        raise ValueError(f"got dtype {backend.dtype!r}; expected one of {sorted(DTYPES)}; set the engine's dtype")
