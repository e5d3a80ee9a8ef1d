"""Which parallel sizes a model can be cut into; checked before anything is built."""

from __future__ import annotations

from typing import Any

from bridge.models.moe import num_experts
from engines.megatron.model.families import FAMILIES
from engines.megatron.parallel import expert_tensor_parallel_size
from engines.spec import MegatronSpec

_UNEVEN = ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage", "pipeline_model_parallel_layout")


def check_splits(hf: dict[str, Any], backend: MegatronSpec, overrides: dict[str, Any]) -> None:
    """ValueError naming the first size that does not divide, and the setting to change."""
    family, tp = FAMILIES[hf["model_type"]], backend.tensor_model_parallel_size
    for name in ("num_attention_heads", "intermediate_size"):
        _check_divides(name, hf[name], tp, "tensor_model_parallel_size")
    if not family.latent:  # the layers of latent attention check their own cuts
        _check_groups(hf["num_key_value_heads"], tp)
    if family.router:
        _check_experts(hf, backend)
    elif backend.expert_model_parallel_size > 1:
        raise ValueError(
            f"got expert_model_parallel_size={backend.expert_model_parallel_size} for {hf['model_type']}, which has "
            "no experts; expected 1; remove the setting"
        )
    _check_stages(hf["num_hidden_layers"], backend, overrides)


def _check_divides(name: str, value: int, ranks: int, setting: str) -> None:
    if value % ranks:
        raise ValueError(f"got {name}={value} with {setting}={ranks}; expected a multiple; lower {setting}")


def _check_groups(groups: int, tp: int) -> None:
    if groups % tp and tp % groups:
        raise ValueError(
            f"got {groups} key/value heads with TP {tp}; expected one to divide the other; "
            "change tensor_model_parallel_size"
        )


def _check_experts(hf: dict[str, Any], backend: MegatronSpec) -> None:
    family, tp = FAMILIES[hf["model_type"]], backend.tensor_model_parallel_size
    experts = num_experts(hf)
    _check_divides("number of experts", experts, backend.expert_model_parallel_size, "expert_model_parallel_size")
    etp = expert_tensor_parallel_size(backend)
    _check_divides("moe_intermediate_size", hf["moe_intermediate_size"], etp, "expert_tensor_parallel_size")
    if family.router == "sigmoid":
        shared = hf["moe_intermediate_size"] * hf["n_shared_experts"]
        _check_divides("moe_intermediate_size * n_shared_experts", shared, tp, "tensor_model_parallel_size")
        groups = hf["n_group"]
        if experts % groups or not 1 <= hf["topk_group"] <= groups or (groups > 1 and experts // groups < 2):
            raise ValueError(
                f"got {experts} experts in n_group={groups} groups with topk_group={hf['topk_group']}; expected "
                "equal groups of two or more, and no more chosen groups than groups; correct config.json"
            )
    if tp > 1 and not backend.sequence_parallel:
        raise ValueError(
            f"got a mixture of experts with TP {tp} and sequence_parallel=false; expected sequence parallelism: "
            "without it every rank would send every token to the experts; set sequence_parallel=true"
        )


def _check_stages(layers: int, backend: MegatronSpec, overrides: dict[str, Any]) -> None:
    stages = backend.pipeline_model_parallel_size * (backend.virtual_pipeline_model_parallel_size or 1)
    if layers % stages and not any(overrides.get(name) for name in _UNEVEN):
        raise ValueError(
            f"got {layers} layers for {stages} pipeline stages; expected a multiple; "
            "set override_transformer_config.num_layers_in_first_pipeline_stage (or _last_)"
        )
