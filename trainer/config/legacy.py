"""Old spellings and where they live now. Nothing legacy is dropped: it moves, with one notice."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from trainer.config.patterns import covering
from trainer.config.values import to_text

ACTOR, REF, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.ref", "actor_rollout_ref.rollout"
CORRECTION = "algorithm.rollout_correction"
OVERLONG = "reward.reward_kwargs"


@dataclass(frozen=True)
class Item:
    """One `key=value` of the command line (or a file, or a preset), parsed by Hydra's grammar.

    `text` is the right side as Hydra must read it, `value` what it parses to, `delete` a `~key`.
    `origin` says where it came from, `position` its place in argv (from 1; None = not typed by hand).
    """

    key: str
    text: str
    value: Any
    position: int | None
    origin: str
    delete: bool = False


def _same(section: str, names: str, target: str) -> dict[str, str]:
    return {f"{section}.{name}": f"{target}.{name}" for name in names.split()}


ENTROPY = "entropy_from_logits_with_chunking entropy_from_logits_chunk_size pad_to_length"


@cache
def moves(engine: str) -> dict[str, str]:
    """Old name or section -> new one. Sub-keys move along."""
    section = "fsdp_config" if engine == "fsdp" else "megatron"
    table = {
        f"{ACTOR}.model_engine": "model_engine",
        **_same("rollout", "nnodes n_gpus_per_node", ROLLOUT),
        **_same(ACTOR, "loss_mode clip_cov_ratio clip_cov_lb clip_cov_ub", f"{ACTOR}.policy_loss"),
        **_same(f"{ACTOR}.policy_loss", "tau_pos tau_neg", ACTOR),
        **_same(ACTOR, ENTROPY, f"{ACTOR}.{section}"),
        **_same(REF, ENTROPY, f"{REF}.{section}"),
        **_same(ACTOR, "entropy_checkpointing", f"{ACTOR}.fsdp_config"),
        **_same(REF, "entropy_checkpointing", f"{REF}.fsdp_config"),
        **_same(ACTOR, "use_remove_padding use_fused_kernels", "actor_rollout_ref.model"),
        f"{ACTOR}.grad_clip": f"{ACTOR}.optim.clip_grad",
        "critic.grad_clip": "critic.optim.clip_grad",
        f"{ACTOR}.megatron.router_replay": f"{ACTOR}.router_replay",
        "data.preprocessing_num_workers": "data.filter_overlong_prompts_workers",
        "algorithm.lambd": "algorithm.lam",
        "algorithm.pg_clip": f"{ACTOR}.clip_ratio",
        "algorithm.value_clip": "critic.cliprange_value",
        **_reward_moves(),
        **_roll_moves(),
    }
    for role, target in ((ACTOR, f"{ACTOR}.fsdp_config"), (REF, f"{REF}.fsdp_config"), ("critic", "critic.fsdp")):
        table[f"{role}.ulysses_sequence_parallel_size"] = f"{target}.ulysses_sequence_parallel_size"
        model = "critic.model" if role == "critic" else "actor_rollout_ref.model"
        table[f"{role}.megatron.use_remove_padding"] = f"{model}.use_remove_padding"
    for role in (ACTOR, "critic"):
        table[f"{role}.optim.grad_clip"] = f"{role}.optim.clip_grad"
        schedule = "lr_scheduler_type" if engine == "fsdp" else "lr_decay_style"
        table[f"{role}.optim.warmup_style"] = f"{role}.optim.{schedule}"
    return table


def _reward_moves() -> dict[str, str]:
    """verl reads these only in some of its programs; here they always reach the reward."""
    return {
        "reward_model.reward_manager": "reward.reward_manager.name",
        "reward_model.reward_manager.name": "reward.reward_manager.name",
        "reward_model.reward_kwargs": "reward.reward_kwargs",
        "reward_model.num_workers": "reward.num_workers",
        "reward_model.reward_loop_source": "reward.reward_manager.source",
        "reward_model.reward_loop_module_path": "reward.reward_manager.module",
        "reward_model.reward_loop_class_name": "reward.reward_manager.name",
        "reward_model.overlong_buffer": "reward.reward_kwargs.overlong_buffer_cfg",
        "reward_model.model.path": "reward.reward_model.model_path",
        "reward_model.rollout": "reward.reward_model.rollout",
        **_same("reward_model", "enable enable_resource_pool n_gpus_per_node nnodes", "reward.reward_model"),
        "custom_reward_function": "reward.custom_reward_function",
        "sandbox_fusion": "reward.sandbox_fusion",
        "trainer.reward_check": "reward.report.enable",
    }


def _roll_moves() -> dict[str, str]:
    """ROLL's spellings of what is read and how it is validated."""
    return {
        "eval_steps": "trainer.test_freq",
        "actor_train.data_args.file_name": "data.train_files",
        "actor_train.data_args.preprocessing_num_workers": "data.filter_overlong_prompts_workers",
        **_same("actor_train.data_args", "dataset_dir template domain_interleave_probs", "data"),
        "validation.data_args.file_name": "data.val_files",
        "validation.generating_args": f"{ROLLOUT}.val_kwargs",
        "validation.generating_args.num_return_sequences": f"{ROLLOUT}.val_kwargs.n",
    }


# Sections whose legacy nulls mean "not set here" and never overwrite.
NULL_IS_UNSET = ("reward_model", "custom_reward_function", "sandbox_fusion")


def move(item: Item, engine: str) -> Item | None:
    """The item under its present name; None when it is not legacy."""
    if item.key in SPECIAL:
        return SPECIAL[item.key](item)
    table = moves(engine)
    name = covering(item.key, table)
    if name is None:
        return None
    return replace(item, key=table[name] + item.key[len(name) :], origin=f"legacy of {item.key} ({item.origin})")


def _importance_sampling(item: Item) -> Item:
    value = {"token": "vanilla", "seq": "gspo"}.get(item.value, item.value)
    return _special(item, f"{ACTOR}.policy_loss.loss_mode", value)


def _dual_clip(item: Item) -> Item:
    """ROLL's switch: 1 + 2 x its default pg_clip of 0.2; `combine` corrects it for another pg_clip."""
    return _special(item, f"{ACTOR}.clip_ratio_c", 1.4 if item.value is True else None)


def _special(item: Item, key: str, value: Any) -> Item:
    origin = f"legacy of {item.key} ({item.origin})"
    return replace(item, key=key, text=to_text(value), value=value, origin=origin)


SPECIAL = {
    "algorithm.importance_sampling": _importance_sampling,
    "algorithm.dual_clip_loss": _dual_clip,
}
LOWER_BOUNDS = {
    f"{CORRECTION}.rollout_is_threshold_lower": f"{CORRECTION}.rollout_is_threshold",
    f"{CORRECTION}.rollout_rs_threshold_lower": f"{CORRECTION}.rollout_rs_threshold",
}


def combine(items: list[Item], default_upper: dict[str, Any]) -> tuple[list[Item], list[str]]:
    """Old groups of keys that became one value; returns the new items and one notice per change.

    (lower, upper) thresholds become the text "low_high"; ROLL's dual_clip_loss uses its own pg_clip; the
    oldest overlong buffer had no max_resp_len: it used the response length.
    """
    by_key, notices = {item.key: item for item in items}, []
    for lower_key, upper_key in LOWER_BOUNDS.items():
        lower = by_key.pop(lower_key, None)
        if lower is None:
            continue
        notices.append(f"{lower_key} moved into {upper_key} as text low_high ({lower.origin})")
        if lower.value is None:
            continue
        upper = by_key.get(upper_key)
        value = f"{lower.value}_{upper.value if upper is not None else default_upper[upper_key]}"
        by_key[upper_key] = replace(
            lower, key=upper_key, value=value, text=to_text(value), origin=f"legacy of {lower_key} ({lower.origin})"
        )
    buffer, longest = by_key.get(f"{OVERLONG}.overlong_buffer_cfg.enable"), f"{OVERLONG}.max_resp_len"
    if (
        buffer is not None
        and buffer.value is True
        and "overlong_buffer.enable" in buffer.origin
        and longest not in by_key
    ):
        notices.append(f"{longest}: taken from data.max_response_length, as with the old reward_model.overlong_buffer")
        reference = "${data.max_response_length}"
        by_key[longest] = replace(buffer, key=longest, text=reference, value=reference)
    dual, clip = by_key.get(f"{ACTOR}.clip_ratio_c"), by_key.get(f"{ACTOR}.clip_ratio")
    if dual is not None and clip is not None and "dual_clip_loss" in dual.origin and dual.value is not None:
        value = 1 + 2 * float(clip.value)
        by_key[dual.key] = replace(dual, value=value, text=to_text(value))
    return list(by_key.values()), notices
