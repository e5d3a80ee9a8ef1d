"""Rows of mixture-of-experts layers, and what their config fields say.

Experts have three spellings in Megatron-Core: one module each, one weight each in a grouped module, and the old
stacked matrices, which `bridge/live.py` takes apart.
"""

from __future__ import annotations

import torch

from bridge.models.rows import gated_rows
from bridge.models.scope import Config, Scope
from bridge.ops import GateUp, PerExpert, Rename
from bridge.rules import Rule

# form -> live names of an expert's two matrices
EXPERT_NAMES = {
    "sequential": (
        "mlp.experts.local_experts.{j}.linear_fc1.weight",
        "mlp.experts.local_experts.{j}.linear_fc2.weight",
    ),
    "grouped": ("mlp.experts.linear_fc1.weight{j}", "mlp.experts.linear_fc2.weight{j}"),
    "stacked": ("mlp.experts.weight1.{j}", "mlp.experts.weight2.{j}"),
}
EXPERT_COUNTS = ("num_experts", "n_routed_experts", "num_local_experts")


def num_experts(config: Config) -> int:
    """Experts of a layer, 0 in a dense model. ValueError if two of its names disagree."""
    given = {name: config[name] for name in EXPERT_COUNTS if config.get(name) is not None}
    if len(set(given.values())) > 1:
        raise ValueError(f"got {given} in config.json; expected one number of experts; remove the wrong field")
    return next(iter(given.values()), 0)


def moe_layers(config: Config) -> list[int]:
    """Layers with experts: as `mlp_layer_types` lists them, else by `mlp_only_layers` and `decoder_sparse_step`
    (Qwen), else all from `first_k_dense_replace` on. ValueError if the list contradicts the number."""
    layers = range(config["num_hidden_layers"])
    kinds, dense = config.get("mlp_layer_types"), config.get("first_k_dense_replace")
    counted = [i for i in layers if i >= dense] if dense is not None else None
    if kinds is not None:
        listed = [i for i, kind in enumerate(kinds) if kind == "sparse"]
        if len(kinds) != len(layers) or (counted is not None and listed != counted):
            raise ValueError(
                f"got mlp_layer_types with experts on layers {listed} of {len(kinds)}, first_k_dense_replace={dense} "
                f"and num_hidden_layers={len(layers)}; expected fields that agree; correct config.json"
            )
        return listed
    if counted is not None:
        return counted
    step, only_dense = config.get("decoder_sparse_step") or 1, config.get("mlp_only_layers") or []
    return [i for i in layers if i not in only_dense and (i + 1) % step == 0]


def is_moe(config: Config, layer: int) -> bool:
    """Extra prediction layers, numbered behind the others, are like the last one."""
    return min(layer, config["num_hidden_layers"] - 1) in moe_layers(config)


def moe_rows(config: Config, scope: Scope, ep: int, correction_bias: bool) -> list[Rule]:
    """Norm, router, experts over `ep` ranks, and shared experts where config.json has `n_shared_experts`."""
    hidden, inner, count = config["hidden_size"], config["moe_intermediate_size"], num_experts(config)
    before = {"post_attention_layernorm.weight": (hidden,)}
    rules = [
        scope.rule("pre_mlp_layernorm.weight", before, Rename()),  # never fused: the router needs its output too
        scope.rule("mlp.router.weight", {"mlp.gate.weight": (count, hidden)}, Rename()),
    ]
    if correction_bias:
        bias = {"mlp.gate.e_score_correction_bias": (count,)}
        rules.append(scope.rule("mlp.router.expert_bias", bias, Rename(), dtype=torch.float32))
    if shared := config.get("n_shared_experts"):
        rules += gated_rows(scope, "mlp.shared_experts.", "mlp.shared_experts.", hidden, inner * shared)
    gate_up = {f"mlp.experts.{{e}}.{part}_proj.weight": (inner, hidden) for part in ("gate", "up")}
    down = {"mlp.experts.{e}.down_proj.weight": (hidden, inner)}
    for form, (fc1, fc2) in EXPERT_NAMES.items():
        rules.append(scope.rule(fc1, gate_up, PerExpert.of(GateUp(), ep), form, experts=count // ep))
        rules.append(scope.rule(fc2, down, PerExpert.of(Rename(dim=1), ep), form, experts=count // ep))
    return rules
