"""Trainer and rollout read the same config.json, each in its own way: do they agree on what it says?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engines.hf_model import read_config
from engines.spec import RolloutEngineSpec

# What changes a log-prob, in the words of config.json.
FIELDS = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "hidden_act", "rms_norm_eps"),
    *("num_attention_heads", "num_key_value_heads", "attention_bias", "tie_word_embeddings"),
    *("rope_parameters", "use_sliding_window"),
    *("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
    *("num_experts", "n_routed_experts", "n_shared_experts", "num_experts_per_tok", "moe_intermediate_size"),
    *("routed_scaling_factor", "norm_topk_prob", "n_group", "topk_group", "first_k_dense_replace", "mlp_layer_types"),
)


def check_pair(spec: RolloutEngineSpec, served: Mapping[str, Any], dtype: str, max_model_len: int) -> None:
    """`served` is the configuration that vLLM runs, as a dict. ValueError lists every field with both values, and end
    tokens that the vocabulary does not have."""
    trained = read_config(spec.model).to_dict()
    found = disagreements(trained, served)
    for name, ours, theirs in (("dtype", spec.dtype, dtype), ("max_model_len", spec.max_model_len, max_model_len)):
        if ours != theirs:
            found.append(f"rollout.{name} is {ours}, vLLM's {theirs}")
    ends = trained.get("eos_token_id")
    ends = ends if isinstance(ends, list) else [] if ends is None else [ends]
    found += [
        f"eos_token_id {end} is outside the vocabulary of {trained['vocab_size']}"
        for end in ends
        if not 0 <= end < trained["vocab_size"]
    ]
    if found:
        raise ValueError(
            f"got a vLLM model unlike the trained one: {'; '.join(found)}; expected the same model on both sides; "
            "remove hf_overrides and the like from engine_kwargs.vllm, or correct config.json"
        )


def disagreements(trained: Mapping[str, Any], served: Mapping[str, Any]) -> list[str]:
    """One text per field of FIELDS, or the head size, that differs; a field that is absent counts as None."""
    # Latent attention has no head size of its own; its classes fill the field in different ways.
    fields = FIELDS if trained.get("kv_lora_rank") else (*FIELDS, "head_dim")
    theirs = dict(served) | {"rope_parameters": _as_written(served.get("rope_parameters"), trained)}
    return [
        f"{name} is {trained.get(name)!r} in training, {theirs.get(name)!r} in vLLM"
        for name in fields
        if trained.get(name) != theirs.get(name)
    ]


def _as_written(rotary: Mapping[str, Any] | None, trained: Mapping[str, Any]) -> dict[str, Any] | None:
    """vLLM's rotary parameters without what it wrote into them: names of its own for YaRN, further keys."""
    own = trained.get("rope_parameters")
    if rotary is None or own is None:
        return rotary
    return {
        key: "yarn" if value in ("deepseek_yarn", "deepseek_llama_scaling") else value
        for key, value in rotary.items()
        if key in own
    }
