"""Null means "as that other key": fill such values, so that nobody reads a null twice in two ways."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from trainer.config.legacy import Item
from trainer.config.schema import leaves
from trainer.config.values import freeze

ACTOR, REF, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.ref", "actor_rollout_ref.rollout"
# key -> the key it follows while null
FOLLOWS = {
    f"{ROLLOUT}.log_prob_use_dynamic_bsz": f"{ACTOR}.use_dynamic_bsz",
    f"{ROLLOUT}.log_prob_max_token_len_per_gpu": f"{ACTOR}.ppo_max_token_len_per_gpu",
    f"{REF}.log_prob_use_dynamic_bsz": f"{ACTOR}.use_dynamic_bsz",
    f"{REF}.log_prob_max_token_len_per_gpu": f"{ACTOR}.ppo_max_token_len_per_gpu",
    f"{REF}.use_torch_compile": f"{ACTOR}.use_torch_compile",
    f"{ROLLOUT}.prompt_length": "data.max_prompt_length",
    f"{ROLLOUT}.response_length": "data.max_response_length",
    f"{ROLLOUT}.n_gpus_per_node": "trainer.n_gpus_per_node",
    f"{ROLLOUT}.seed": "trainer.seed",
    f"{ACTOR}.data_loader_seed": "trainer.seed",
    f"{ACTOR}.checkpoint.load_contents": f"{ACTOR}.checkpoint.save_contents",
    "data.seed": "trainer.seed",
    "data.gen_batch_size": "data.train_batch_size",
    "critic.model.path": "actor_rollout_ref.model.path",
    "critic.checkpoint.load_contents": "critic.checkpoint.save_contents",
    "critic.ppo_mini_batch_size": f"{ACTOR}.ppo_mini_batch_size",
    "critic.use_dynamic_bsz": f"{ACTOR}.use_dynamic_bsz",
    "critic.ppo_epochs": f"{ACTOR}.ppo_epochs",
    "critic.shuffle": f"{ACTOR}.shuffle",
    "critic.data_loader_seed": f"{ACTOR}.data_loader_seed",
    "critic.loss_agg_mode": f"{ACTOR}.loss_agg_mode",
    "critic.loss_scale_factor": f"{ACTOR}.loss_scale_factor",
}
FOLLOWS |= {
    f"{section}.{leaf}": target
    for section in (f"{ACTOR}.fsdp_config", f"{REF}.fsdp_config", "critic.fsdp")
    for leaf, target in (("seed", "trainer.seed"), ("use_torch_compile", f"{ACTOR}.use_torch_compile"))
}
FOLLOWS[f"{ACTOR}.megatron.seed"] = "trainer.seed"
# fsdp: what the reference computes with unless it is given. Same numbers in, same log-probs out.
REF_FSDP = ("ulysses_sequence_parallel_size", "dtype", "mixed_precision.param_dtype")


def inherit(values: dict[str, Any], explicit: Mapping[str, Item], engine: str) -> list[str]:
    """Fill `values` (flat, coerced) in place; returns notices."""
    notices: list[str] = []
    _strategy(values, engine)
    _clip_bounds(values)
    for key, target in FOLLOWS.items():
        if key in values and values[key] is None:
            values[key] = values[target]
    if engine == "megatron":
        for role in (REF, "critic"):
            _megatron_role(values, explicit, role)
    else:
        for leaf in REF_FSDP:
            if f"{REF}.fsdp_config.{leaf}" not in explicit:
                values[f"{REF}.fsdp_config.{leaf}"] = values[f"{ACTOR}.fsdp_config.{leaf}"]
    if values["critic.enable"] is None:
        values["critic.enable"] = values["algorithm.adv_estimator"] == "gae"
    if values["critic.enable"] and "critic.model.path" not in explicit:
        _actors_model(values, explicit)
    if values["trainer.default_local_dir"] is None:
        names = values["trainer.project_name"], values["trainer.experiment_name"]
        values["trainer.default_local_dir"] = "/".join(("checkpoints", *names))
    _rollout(values, explicit, notices)
    _sequence_parallel(values, explicit, notices, engine)
    return notices


def _actors_model(values: dict[str, Any], explicit: Mapping[str, Item]) -> None:
    """A critic that starts from the actor's model takes over what was changed about it."""
    own, actor = "critic.model", "actor_rollout_ref.model"
    if f"{own}.trust_remote_code" not in explicit:
        values[f"{own}.trust_remote_code"] = values[f"{actor}.trust_remote_code"]
    merged = deep_merge(values[f"{actor}.override_config"], values[f"{own}.override_config"])
    values[f"{own}.override_config"] = freeze(merged)


def _strategy(values: dict[str, Any], engine: str) -> None:
    for key in (f"{ACTOR}.strategy", f"{REF}.strategy", "critic.strategy"):
        if values[key] is None:
            values[key] = "megatron" if engine == "megatron" else "fsdp2"


def _clip_bounds(values: dict[str, Any]) -> None:
    """clip_ratio fills the bounds that are not given; each of them alone is 0.2."""
    clip = values[f"{ACTOR}.clip_ratio"]
    for bound in ("clip_ratio_low", "clip_ratio_high"):
        if values[f"{ACTOR}.{bound}"] is None:
            values[f"{ACTOR}.{bound}"] = 0.2 if clip is None else clip


def _megatron_role(values: dict[str, Any], explicit: Mapping[str, Item], role: str) -> None:
    """Every key the role did not set is the actor's; override dicts are merged key by key, so that one
    own key never drops the rest."""
    source, target = f"{ACTOR}.megatron.", f"{role}.megatron."
    for key, leaf in leaves("megatron").items():
        if not key.startswith(source):
            continue
        own = target + key[len(source) :]
        if leaf.is_open:
            values[own] = freeze(deep_merge(values[key], values[own]))
        elif own not in explicit:
            values[own] = values[key]


def deep_merge(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of `base` with `changes` applied at every depth."""
    merged = {key: copy.deepcopy(value) for key, value in base.items()}
    for key, value in changes.items():
        inner = merged.get(key)
        both = isinstance(inner, Mapping) and isinstance(value, Mapping)
        merged[key] = deep_merge(inner, value) if both else copy.deepcopy(value)
    return merged


def _rollout(values: dict[str, Any], explicit: Mapping[str, Item], notices: list[str]) -> None:
    """One transformers replica is one process."""
    key = f"{ROLLOUT}.tensor_model_parallel_size"
    if values[f"{ROLLOUT}.name"] == "hf" and values[key] != 1 and key not in explicit:
        values[key] = 1
        notices.append(f"{key}=1: rollout.name=hf runs one replica per process")


def _sequence_parallel(values: dict[str, Any], explicit: Mapping[str, Item], notices: list[str], engine: str) -> None:
    """It shards over tp: with tp 1 there is nothing to shard. Said only to those who asked for it."""
    if engine != "megatron":
        return
    for role in (ACTOR, REF, "critic"):
        key = f"{role}.megatron.sequence_parallel"
        if values[key] and values[f"{role}.megatron.tensor_model_parallel_size"] == 1:
            values[key] = False
            if role == ACTOR and key in explicit:
                notices.append(f"{key}=False: tensor_model_parallel_size is 1")
