"""Status of every key of the tree.

1  works first        2  later, refused until built        H  a speed or memory hint, no-op until built
`rewards` stands for `rewards.<domain>.<key>`. The dataclasses and these tables must agree (tested).
"""

from __future__ import annotations

from functools import cache
from typing import Literal

from trainer.config.patterns import covering, expand_all

Status = Literal["1", "2", "H"]

ROOT_1 = (
    "model_engine",
    "{actor_rollout_ref,critic}.nccl_timeout",
    "ray_kwargs.ray_init.runtime_env",
    "rewards",
)
DATA_1 = (
    "data.{train_files,val_files,train_batch_size,gen_batch_size,max_prompt_length,max_response_length}",
    "data.{prompt_key,reward_fn_key,truncation,filter_overlong_prompts,filter_overlong_prompts_workers}",
    "data.{shuffle,validation_shuffle,seed,trust_remote_code}",
    "data.{dataset_dir,domain_interleave_probs,template,template_by_tag,chat_template_path,default_system}",
    "data.{missing_id,duplicate_ids,max_reported_errors,max_line_bytes,length_bucket,bucket_prompts}",
    "data.prompt_cache_dir",
    "data.allow_changed_files",
)
MODEL_1 = (
    "{actor_rollout_ref,critic}.model.{path,trust_remote_code,override_config,use_remove_padding}",
    "{actor_rollout_ref,critic}.model.enable_gradient_checkpointing",
)
ACTOR_1 = (
    "actor_rollout_ref.actor.{strategy,ppo_mini_batch_size,ppo_micro_batch_size_per_gpu,use_dynamic_bsz}",
    "actor_rollout_ref.actor.{ppo_max_token_len_per_gpu,ppo_epochs,shuffle,data_loader_seed}",
    "actor_rollout_ref.actor.{clip_ratio,clip_ratio_low,clip_ratio_high,clip_ratio_c}",
    "actor_rollout_ref.actor.{loss_agg_mode,loss_scale_factor,entropy_coeff,calculate_entropy}",
    "actor_rollout_ref.actor.{use_kl_loss,kl_loss_coef,kl_loss_type,use_torch_compile}",
    "actor_rollout_ref.actor.policy_loss.{loss_mode,clip_cov_ratio,clip_cov_lb,clip_cov_ub,kl_cov_ratio}",
    "actor_rollout_ref.actor.policy_loss.{ppo_kl_coef,dro_beta}",
    "actor_rollout_ref.actor.{tau_pos,tau_neg,calculate_sum_pi_squared,reuse_old_log_probs,length_loss}",
    "actor_rollout_ref.actor.router_replay",
    "{actor_rollout_ref.actor,critic}.checkpoint.{save_contents,load_contents}",
)
FSDP_1 = (
    "{actor_rollout_ref.actor.fsdp_config,actor_rollout_ref.ref.fsdp_config,critic.fsdp}"
    ".{param_offload,optimizer_offload,offload_policy,fsdp_size,reshard_after_forward,model_dtype,dtype,seed}",
    "{actor_rollout_ref.actor.fsdp_config,actor_rollout_ref.ref.fsdp_config,critic.fsdp}"
    ".{ulysses_sequence_parallel_size,mixed_precision,full_determinism,use_torch_compile}",
)
MEGATRON_1 = (
    "{actor_rollout_ref.actor,actor_rollout_ref.ref,critic}.megatron"
    ".{tensor_model_parallel_size,pipeline_model_parallel_size,expert_model_parallel_size,context_parallel_size}",
    "{actor_rollout_ref.actor,actor_rollout_ref.ref,critic}.megatron"
    ".{expert_tensor_parallel_size,virtual_pipeline_model_parallel_size,sequence_parallel,use_distributed_optimizer}",
    "{actor_rollout_ref.actor,actor_rollout_ref.ref,critic}.megatron"
    ".{param_offload,grad_offload,optimizer_offload,use_mbridge,bridge,dtype,seed,override_transformer_config}",
)
OPTIM_1 = (
    "{actor_rollout_ref.actor,critic}.optim"
    ".{lr,weight_decay,betas,clip_grad,lr_warmup_steps,lr_warmup_steps_ratio,override_optimizer_config}",
    "{actor_rollout_ref.actor,critic}.optim"
    ".{lr_scheduler_type,min_lr_ratio,num_cycles,zero_indexed_step,optimizer_impl}",
    "{actor_rollout_ref.actor,critic}.optim.{lr_decay_style,lr_decay_steps,min_lr,lr_warmup_init}",
    "{actor_rollout_ref.actor,critic}.optim.{weight_decay_incr_style,lr_wsd_decay_style,lr_wsd_decay_steps}",
)
REF_CRITIC_1 = (
    "actor_rollout_ref.ref.{log_prob_micro_batch_size_per_gpu,log_prob_use_dynamic_bsz}",
    "actor_rollout_ref.ref.{log_prob_max_token_len_per_gpu,strategy,use_torch_compile}",
    "critic.{enable,strategy,ppo_mini_batch_size,ppo_micro_batch_size_per_gpu,use_dynamic_bsz}",
    "critic.{ppo_max_token_len_per_gpu,ppo_epochs,shuffle,data_loader_seed}",
    "critic.{cliprange_value,loss_agg_mode,loss_scale_factor}",
)
ROLLOUT_1 = (
    "actor_rollout_ref.rollout.{name,n,temperature,top_p,top_k,do_sample,repetition_penalty,ignore_eos,seed}",
    "actor_rollout_ref.rollout.{tensor_model_parallel_size,data_parallel_size,expert_parallel_size}",
    "actor_rollout_ref.rollout.{gpu_memory_utilization,free_cache_engine,enforce_eager,cudagraph_capture_sizes}",
    "actor_rollout_ref.rollout.{max_num_batched_tokens,max_num_seqs,max_model_len,prompt_length,response_length}",
    "actor_rollout_ref.rollout.{enable_chunked_prefill,enable_prefix_caching,load_format,dtype,calculate_log_probs}",
    "actor_rollout_ref.rollout.{log_prob_micro_batch_size_per_gpu,log_prob_use_dynamic_bsz}",
    "actor_rollout_ref.rollout.{log_prob_max_token_len_per_gpu,val_kwargs,enable_rollout_routing_replay}",
    "actor_rollout_ref.rollout.{moe_load_balance_metrics_interval,engine_kwargs,checkpoint_engine}",
)
REWARD_1 = (
    "reward.{reward_manager,num_workers,reward_kwargs,length_penalty}",
    "reward.custom_reward_function.{path,name,reward_kwargs}",
)
ALGORITHM_1 = (
    "algorithm.{adv_estimator,gamma,lam,norm_adv_by_std_in_grpo,use_kl_in_reward,kl_penalty,kl_ctrl,filter_groups}",
    "algorithm.rollout_correction.{rollout_is,rollout_is_threshold,rollout_is_batch_normalize}",
    "algorithm.rollout_correction.{rollout_rs,rollout_rs_threshold,bypass_mode,loss_type}",
    "algorithm.{norm_mean_type,norm_std_type,reward_clip,advantage_clip,whiten_advantages,whiten_scope}",
    "algorithm.{max_len_mask,difficulty_mask,difficulty_low_threshold,difficulty_high_threshold}",
    "algorithm.{error_max_len_clip,error_max_len_threshold,correct_threshold}",
    "algorithm.{difficulty_loss_weight,difficulty_source,difficulty_range,length_loss_weight}",
)
TRAINER_1 = (
    "trainer.{nnodes,n_gpus_per_node,device,project_name,experiment_name,logger}",
    "trainer.{total_epochs,total_training_steps,save_freq,test_freq,val_before_train,val_only}",
    "trainer.{log_val_generations,resume_mode,resume_from_path,default_local_dir}",
    "trainer.{max_actor_ckpt_to_keep,max_critic_ckpt_to_keep,rollout_data_dir,validation_data_dir}",
    "trainer.{balance_batch,critic_warmup,v1.trainer_mode}",
    "trainer.{seed,env,logger_kwargs,resume_allow_changes,nonfinite_grad,consistency,overfit_patience}",
)

LATER = (
    "actor_rollout_ref.hybrid_engine",
    "ray_kwargs.{ray_init.num_cpus,timeline_json_file}",
    "skip.{rollout,rollout_tq,async_rollout}",
    "data.{train_max_samples,val_max_samples,dataloader_num_workers,val_batch_size,tokenizer,custom_cls}",
    "data.apply_chat_template_kwargs",
    "{actor_rollout_ref,critic}.model.{tokenizer_path,hf_config_path,custom_chat_template,external_lib}",
    "{actor_rollout_ref,critic}.model.{lora_rank,lora_alpha,target_modules,exclude_modules,lora_adapter_path}",
    "{actor_rollout_ref,critic}.model.{lora,mtp,dsa}",
    "{actor_rollout_ref.actor,critic}.checkpoint.{async_save,strict,save_lora_only,mbridge_config}",
    "{actor_rollout_ref.actor.fsdp_config,actor_rollout_ref.ref.fsdp_config,critic.fsdp}.wrap_policy",
    "{actor_rollout_ref.actor,actor_rollout_ref.ref,critic}.megatron"
    ".{override_ddp_config,override_mcore_model_config,use_dist_checkpointing,dist_checkpointing_path}",
    "{actor_rollout_ref.actor,actor_rollout_ref.ref,critic}.megatron"
    ".{use_megatron_fsdp,dynamic_context_parallel,max_seqlen_per_dp_cp_rank,dist_checkpointing_prefix}",
    "{actor_rollout_ref.actor,actor_rollout_ref.ref,critic}.megatron"
    ".{dist_ckpt_optim_fully_reshardable,distrib_optim_fully_reshardable_mem_efficient}",
    "{actor_rollout_ref.actor,critic}.optim.{optimizer,use_precision_aware_optimizer,main_grads_dtype}",
    "{actor_rollout_ref.actor,critic}.optim.{exp_avg_dtype,exp_avg_sq_dtype}",
    "actor_rollout_ref.rollout.{nnodes,n_gpus_per_node,quantization,quantization_config_file,agent}",
    "actor_rollout_ref.rollout.{logprobs_mode,scheduling_policy,full_determinism}",
    "actor_rollout_ref.rollout.{standalone_gpu_memory_utilization,enable_sleep_mode,sleep_level}",
    "reward.{reward_model,sandbox_fusion,max_failed_frac,timeout_s,report,code_sandbox}",
    "reward.custom_reward_function.domains",
    "algorithm.rollout_correction.rollout_token_veto_threshold",
    "algorithm.{gdpo_reward_keys,gdpo_reward_weights,use_pf_ppo,pf_ppo}",
    "trainer.{ray_wait_register_center_timeout,esi_redundant_time}",
    "trainer.v1.{separate_async,colocate_async,sampler}",
    "global_profiler.{tool,steps,save_path,profile_continuous_steps,global_tool_config}",
    "{actor_rollout_ref.actor,actor_rollout_ref.ref,actor_rollout_ref.rollout,critic}.profiler"
    ".{tool,enable,all_ranks,ranks,save_path,tool_config}",
)

HINTS = (
    "{actor_rollout_ref,critic}.model.{use_fused_kernels,fused_kernel_options,use_liger,use_shm}",
    "{actor_rollout_ref,critic}.model.{enable_activation_offload,tiled_mlp}",
    "actor_rollout_ref.actor.use_prefix_grouper",
    "{actor_rollout_ref.actor.fsdp_config,actor_rollout_ref.ref.fsdp_config,critic.fsdp}"
    ".{entropy_from_logits_with_chunking,entropy_from_logits_chunk_size,entropy_checkpointing}",
    "{actor_rollout_ref.actor.fsdp_config,actor_rollout_ref.ref.fsdp_config,critic.fsdp}"
    ".{pad_to_length,pad_to_length_bucket}",
    "{actor_rollout_ref.actor,actor_rollout_ref.ref,critic}.megatron"
    ".{entropy_from_logits_with_chunking,entropy_from_logits_chunk_size}",
    "{actor_rollout_ref.actor,actor_rollout_ref.ref,critic}.megatron"
    ".{pad_to_length,pad_to_length_bucket,pad_bshd_to_minibatch_max}",
)

FIRST = (
    ROOT_1
    + DATA_1
    + MODEL_1
    + ACTOR_1
    + FSDP_1
    + MEGATRON_1
    + OPTIM_1
    + REF_CRITIC_1
    + ROLLOUT_1
    + REWARD_1
    + ALGORITHM_1
    + TRAINER_1
)
STATUS: dict[Status, tuple[str, ...]] = {"1": FIRST, "2": LATER, "H": HINTS}


@cache
def status_table() -> dict[str, Status]:
    """Every listed key or section with its status."""
    table: dict[str, Status] = {}
    for status, patterns in STATUS.items():
        for key in expand_all(patterns):
            assert key not in table, f"{key} is listed twice"
            table[key] = status
    return table


def status_of(key: str) -> Status:
    """Status of a leaf; the longest listed prefix decides."""
    table = status_table()
    name = covering(key, table)
    assert name is not None, f"{key} is in no status table"
    return table[name]
