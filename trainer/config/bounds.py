"""Numbers that must lie in a range before any arithmetic makes sense."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainer.config.errors import ConfigError
from trainer.config.legacy import Item
from trainer.config.patterns import expand_all

POSITIVE = (
    "data.{train_batch_size,gen_batch_size,max_prompt_length,max_response_length,val_batch_size}",
    "data.{length_bucket,filter_overlong_prompts_workers,max_reported_errors,max_line_bytes}",
    "actor_rollout_ref.nccl_timeout",
    "actor_rollout_ref.actor.{ppo_mini_batch_size,ppo_micro_batch_size_per_gpu,ppo_max_token_len_per_gpu,ppo_epochs}",
    "{actor_rollout_ref.actor,critic}.loss_scale_factor",
    "critic.{ppo_mini_batch_size,ppo_micro_batch_size_per_gpu,ppo_max_token_len_per_gpu,ppo_epochs,cliprange_value}",
    "actor_rollout_ref.ref.{log_prob_micro_batch_size_per_gpu,log_prob_max_token_len_per_gpu}",
    "actor_rollout_ref.{actor,ref}.fsdp_config.ulysses_sequence_parallel_size",
    "actor_rollout_ref.{actor,ref}.megatron.{tensor_model_parallel_size,pipeline_model_parallel_size}",
    "actor_rollout_ref.{actor,ref}.megatron.{context_parallel_size,expert_model_parallel_size}",
    "actor_rollout_ref.{actor,ref}.megatron.expert_tensor_parallel_size",
    "actor_rollout_ref.rollout.{n,tensor_model_parallel_size,data_parallel_size,expert_parallel_size}",
    "actor_rollout_ref.rollout.{max_num_batched_tokens,max_num_seqs,max_model_len,n_gpus_per_node}",
    "actor_rollout_ref.rollout.{log_prob_micro_batch_size_per_gpu,log_prob_max_token_len_per_gpu}",
    "actor_rollout_ref.rollout.val_kwargs.n",
    "actor_rollout_ref.rollout.{repetition_penalty,checkpoint_engine.update_weights_bucket_megabytes}",
    "reward.{num_workers,timeout_s,length_penalty.max_len}",
    "reward.code_sandbox.{cpu_s,wall_s,row_s,memory_mb,processes,file_mb,tmp_mb,open_files,output_kb}",
    "reward.sandbox_fusion.{max_concurrent,memory_limit_mb}",
    "algorithm.error_max_len_threshold",
    "trainer.{nnodes,n_gpus_per_node,total_epochs,total_training_steps,max_actor_ckpt_to_keep}",
    "reward.report.{prompts,n}",
    "trainer.{nonfinite_grad.max_consecutive,consistency.patience,overfit_patience}",
)
NOT_NEGATIVE = (
    "actor_rollout_ref.rollout.{nnodes,val_kwargs.temperature}",
    "{actor_rollout_ref.actor,critic}.optim.{lr,weight_decay,clip_grad,lr_warmup_steps_ratio}",
    "trainer.critic_warmup",
    "actor_rollout_ref.actor.{kl_loss_coef,router_replay.max_invalid_ratio}",
    "algorithm.{reward_clip,advantage_clip}",
    "reward.length_penalty.{coef,free_len}",
    "reward.report.min_std",
    "trainer.log_val_generations",
)
TOP_K = ("actor_rollout_ref.rollout.{top_k,val_kwargs.top_k}",)
SHARES = ("actor_rollout_ref.rollout.{top_p,val_kwargs.top_p}",)


def check(values: Mapping[str, Any], explicit: Mapping[str, Item]) -> list[ConfigError]:
    """One error per number out of its range; nulls and keys of the other engine pass."""
    errors = []
    rules = (
        (POSITIVE, lambda value: value > 0, "1 or more", "1"),
        (NOT_NEGATIVE, lambda value: value >= 0, "0 or more", "0"),
        (TOP_K, lambda value: value == -1 or value >= 1, "-1 (off), or 1 or more", "-1"),
        (SHARES, lambda value: 0 < value <= 1, "in (0, 1]", "1.0"),
    )
    for patterns, holds, expected, fix in rules:
        for key in expand_all(patterns):
            value = values.get(key)
            # A value that was not given is a default, or inherited from a key that is reported itself.
            if key in explicit and value is not None and not holds(value):
                position = explicit[key].position
                wanted = "more than 0" if isinstance(value, float) and expected == "1 or more" else expected
                errors.append(
                    ConfigError(
                        "value.range", key, f"{key.rpartition('.')[2]}={value}", wanted, f"{key}={fix}", position
                    )
                )
    for key in expand_all(("{actor_rollout_ref.actor,critic}.optim.betas",)):
        betas = values[key]
        if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
            errors.append(
                ConfigError("value.range", key, f"betas={list(betas)}", "two numbers in [0, 1)", f"{key}=[0.9,0.999]")
            )
    return errors
