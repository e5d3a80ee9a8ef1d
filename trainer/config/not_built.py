"""What this release does not do yet. Defaults pass; everything else listed here is refused.

A line is removed in the commit that builds the behaviour. `BUILT_LATER` names keys that the status
tables call later but that work already.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from trainer.config.errors import ConfigError
from trainer.config.keys import status_of
from trainer.config.legacy import Item
from trainer.config.patterns import covering, expand_all
from trainer.config.schema import leaves
from trainer.config.values import to_text

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
FSDP = "{actor_rollout_ref.actor.fsdp_config,actor_rollout_ref.ref.fsdp_config,critic.fsdp}"
LEARNERS = "{actor_rollout_ref.actor,critic}"

NOT_BUILT = (
    "data.bucket_prompts",
    f"{ACTOR}.router_replay.{{record_file,replay_file}}",
    f"{LEARNERS}.checkpoint.load_contents",
    f"{FSDP}.{{ulysses_sequence_parallel_size,full_determinism}}",
    f"{LEARNERS}.optim.{{zero_indexed_step,optimizer_impl,override_optimizer_config}}",
    f"{LEARNERS}.optim.{{weight_decay_incr_style,lr_wsd_decay_style,lr_wsd_decay_steps}}",
    f"{ROLLOUT}.{{data_parallel_size,moe_load_balance_metrics_interval}}",
    f"{ROLLOUT}.checkpoint_engine.custom_backend_module",
    f"{ROLLOUT}.do_sample",
    "reward.reward_manager.{source,module}",
    "algorithm.filter_groups.max_inflight_gen_batches",
    "trainer.logger_kwargs",
)
BUILT_LATER = (
    "actor_rollout_ref.hybrid_engine",
    "actor_rollout_ref.model.dsa.split_kv_up",
    "data.{train_max_samples,val_max_samples,dataloader_num_workers,val_batch_size,apply_chat_template_kwargs}",
    f"{ROLLOUT}.{{nnodes,n_gpus_per_node,enable_sleep_mode,sleep_level,standalone_gpu_memory_utilization}}",
    f"{ROLLOUT}.scheduling_policy",
    "trainer.v1.{separate_async,sampler.max_off_policy_threshold}",
    "reward.{timeout_s,max_failed_frac,custom_reward_function.domains,code_sandbox,sandbox_fusion,report}",
    "algorithm.rollout_correction.rollout_token_veto_threshold",
)
# key -> the values that work; the default is not exempt
BUILT_VALUES: dict[str, tuple[Any, ...]] = {
    "algorithm.adv_estimator": (
        *("gae", "grpo", "grpo_passk", "rloo", "opo", "gpg", "reinforce", "reinforce_plus_plus"),
        *("reinforce_plus_plus_baseline", "remax", "optimal_token_baseline"),
    ),
    f"{ROLLOUT}.dtype": ("bfloat16", "float32"),
    "actor_rollout_ref.model.use_remove_padding": (True,),
    "critic.model.use_remove_padding": (True,),
    "reward.reward_manager.name": ("naive", "dapo"),
    "trainer.v1.trainer_mode": ("sync", "separate_async"),
}
BUILT_VALUES |= {
    f"{role}.{leaf}": values
    for role in (ACTOR, "critic")
    for leaf, values in (
        ("megatron.use_mbridge", (True,)),
        ("megatron.dtype", ("bfloat16", "float32")),
        ("optim.lr_decay_style", ("constant", "linear", "cosine")),
    )
}
BUILT_VALUES |= {
    f"{section}.{leaf}": values
    for section in (f"{ACTOR}.fsdp_config", "actor_rollout_ref.ref.fsdp_config", "critic.fsdp")
    for leaf, values in (
        ("model_dtype", ("bfloat16", "float32")),
        ("dtype", ("bfloat16", "float32")),
        ("mixed_precision.param_dtype", (None, "bfloat16", "float32")),
        ("mixed_precision.reduce_dtype", (None, "bfloat16", "float32")),
        ("mixed_precision.buffer_dtype", (None, "float32")),
    )
}
LOGGERS = ("console", "tensorboard", "csv", "jsonl")
BUILT_DOMAINS = ("choice", "code_sandbox", "crossthinkqa", "ifeval", "llm_judge", "math_rule")
# What to paste where "remove it" is not enough.
FIX = {
    "algorithm.adv_estimator": "algorithm.adv_estimator=grpo",
}
# Speed and memory settings of vLLM: harmless, and without effect, under another rollout.
VLLM_ONLY = (
    f"{ROLLOUT}.{{gpu_memory_utilization,free_cache_engine,enforce_eager,max_num_batched_tokens}}",
    f"{ROLLOUT}.{{enable_chunked_prefill,enable_prefix_caching,cudagraph_capture_sizes,scheduling_policy}}",
    f"{ROLLOUT}.{{enable_sleep_mode,sleep_level,standalone_gpu_memory_utilization,engine_kwargs.vllm}}",
)
# Switches whose every value leads to the same result in this release, and why.
NO_OP = {
    f"{ACTOR}.use_torch_compile": "torch.compile is not used yet",
    "actor_rollout_ref.ref.use_torch_compile": "torch.compile is not used yet",
    f"{ACTOR}.fsdp_config.use_torch_compile": "torch.compile is not used yet",
    "actor_rollout_ref.ref.fsdp_config.use_torch_compile": "torch.compile is not used yet",
    "actor_rollout_ref.ref.fsdp_config.optimizer_offload": "the reference has no optimizer",
    "data.dataloader_num_workers": "prompts are read in the main process",
    f"{ROLLOUT}.load_format": "the trainer's weights come before the first request",
    "critic.fsdp.use_torch_compile": "torch.compile is not used yet",
    "critic.nccl_timeout": "the critic shares the actor's process groups; set actor_rollout_ref.nccl_timeout",
    "trainer.max_critic_ckpt_to_keep": "a critic is saved and removed with its actor",
}


@cache
def _names(patterns: tuple[str, ...]) -> frozenset[str]:
    return frozenset(expand_all(patterns))


def is_built(key: str) -> bool:
    """Whether a leaf may differ from its default (BUILT_VALUES may still narrow it)."""
    if covering(key, _names(NOT_BUILT)):
        return False
    return status_of(key) == "1" or covering(key, _names(BUILT_LATER)) is not None


def is_effective(key: str) -> bool:
    """Built, and somebody reads it: neither a hint nor a setting of another rollout."""
    hint = status_of(key) == "H" or key in NO_OP or covering(key, _names(VLLM_ONLY)) is not None
    return is_built(key) and not hint


def baseline(values: Mapping[str, Any], engine: str) -> dict[str, Any]:
    """The same tree with every unbuilt key at its default (before inheritance)."""
    return {key: values[key] if is_built(key) else leaf.typed_default for key, leaf in leaves(engine).items()}


def refuse(
    values: Mapping[str, Any], defaults: Mapping[str, Any], explicit: Mapping[str, Item], engine: str
) -> list[ConfigError]:
    """One error per key whose value needs something that is not built. `defaults` is the inherited
    `baseline`. An inherited value is reported at the key it comes from only."""
    errors = []
    for key, leaf in leaves(engine).items():
        value = values[key]
        given = any(name == key or name.startswith(f"{key}.") for name in explicit)
        if not given and value != leaf.typed_default:
            continue
        if key == "data.gen_batch_size" and value != values["data.train_batch_size"]:
            if not values["algorithm.filter_groups.enable"]:
                expected = "null, data.train_batch_size, or algorithm.filter_groups.enable=True"
                errors.append(_error(key, value, explicit, expected))
        elif key == "algorithm.adv_estimator" and ":" in value:
            continue  # an own function, imported and checked at start
        elif key in BUILT_VALUES and value not in BUILT_VALUES[key]:
            errors.append(_error(key, value, explicit, " or ".join(map(_show, BUILT_VALUES[key]))))
        elif key == "trainer.logger":
            unknown = [name for name in value if name not in LOGGERS]
            if unknown:
                errors.append(_logger_error(value, unknown, explicit))
        elif status_of(key) != "H" and not is_built(key) and value != defaults[key]:
            errors.append(_error(key, value, explicit, f"the default, {_show(defaults[key])}"))
    errors += _domain_errors(values["rewards"], explicit)
    return errors


def notices(values: Mapping[str, Any], explicit: Mapping[str, Item], engine: str) -> list[str]:
    """One warning per given key that has no effect in this release."""
    found = []
    without_vllm = values[f"{ROLLOUT}.name"] != "vllm"
    for key, leaf in leaves(engine).items():
        if key not in explicit or values[key] == leaf.typed_default:
            continue
        if status_of(key) == "H":
            found.append(f"{key}={_show(values[key])} has no effect yet: a speed or memory hint")
        elif key in NO_OP and values[key] is not False:
            found.append(f"{key}={_show(values[key])} has no effect: {NO_OP[key]}")
        elif without_vllm and covering(key, _names(VLLM_ONLY)):
            found.append(f"{key}={_show(values[key])} has no effect: it belongs to rollout.name=vllm")
    return found


def _error(key: str, value: Any, explicit: Mapping[str, Item], expected: str) -> ConfigError:
    given = "" if key in explicit else " (the default)"
    position = explicit[key].position if key in explicit else None
    leaf = key.rpartition(".")[2]
    return ConfigError(
        "not.built", key, f"{leaf}={_show(value)}{given}: not built yet", expected, FIX.get(key, "remove it"), position
    )


def _logger_error(value: tuple[str, ...], unknown: list[str], explicit: Mapping[str, Item]) -> ConfigError:
    kept = [name for name in value if name in LOGGERS] or ["console"]
    position = explicit["trainer.logger"].position if "trainer.logger" in explicit else None
    return ConfigError(
        "not.built",
        "trainer.logger",
        f"logger {', '.join(unknown)}: not built yet",
        f"any of {', '.join(LOGGERS)}",
        f"trainer.logger=[{','.join(kept)}]",
        position,
    )


def _domain_errors(rewards: Mapping[str, Any], explicit: Mapping[str, Item]) -> list[ConfigError]:
    errors = []
    for name, domain in rewards.items():
        worker = domain.worker or name
        if worker not in BUILT_DOMAINS or worker != name:
            item = next((item for key, item in explicit.items() if key.startswith(f"rewards.{name}.")), None)
            errors.append(
                ConfigError(
                    "not.built",
                    f"rewards.{name}",
                    f"domain {name} with scorer {worker}: not built yet",
                    f"domain {', '.join(BUILT_DOMAINS)}, or a function of your own",
                    "remove it   (or reward.custom_reward_function.path=FILE)",
                    item.position if item is not None else None,
                )
            )
        for leaf in ("infer_batch_size", "template"):
            key = f"rewards.{name}.{leaf}"
            if key in explicit and explicit[key].value is not None:
                errors.append(_error(key, explicit[key].value, explicit, "the default, null"))
    return errors


def _show(value: Any) -> str:
    return value if isinstance(value, str) else to_text(value)
