"""Keys of public scripts that are accepted without effect, or refused with a reason."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from trainer.config.patterns import covering, expand

ENGINE_SECTIONS = "{actor_rollout_ref.actor.fsdp_config,actor_rollout_ref.ref.fsdp_config,critic.fsdp}"
MEGATRON_SECTIONS = "{actor_rollout_ref.actor,actor_rollout_ref.ref,critic}.megatron"
PROFILERS = "{actor_rollout_ref.actor,actor_rollout_ref.ref,actor_rollout_ref.rollout,critic}.profiler"
MODELS = "{actor_rollout_ref,critic}.model"
ROLLOUT = "actor_rollout_ref.rollout"
NO_SHELL = "no shell command is run from a configuration"

# pattern -> why it has no effect
IGNORED = {
    "{transfer_queue,trainer.use_legacy_worker_impl}": "data plane and workers are our own",
    "data.{return_raw_chat,return_raw_input_ids,return_full_prompt}": "ids and messages are always kept",
    "data.{return_multi_modal_inputs,use_shm,min_response_length}": "nothing reads it",
    MODELS + ".mtp.{speculative_algorithm,speculative_num_steps,speculative_eagle_topk}": "belongs to SGLang",
    MODELS + ".mtp.speculative_num_draft_tokens": "belongs to SGLang",
    MODELS + ".lora.{freeze_vision_model,freeze_vision_projection,freeze_language_model}": "text models only",
    ENGINE_SECTIONS + ".{strategy,forward_prefetch,use_orig_params}": "belongs to FSDP1; FSDP2 is used",
    "{actor_rollout_ref.ref,critic}.megatron.router_replay": "reference and critic never replay routes",
    "actor_rollout_ref.ref.router_replay": "the reference never replays routes",
    MEGATRON_SECTIONS + ".vanilla_mbridge": "megatron.bridge chooses the weight bridge",
    "{actor_rollout_ref.actor,critic}.optim.use_checkpoint_opt_param_scheduler": "a resume goes on in the schedule",
    "critic.{forward_max_token_len_per_gpu,forward_micro_batch_size_per_gpu}": "nothing reads it",
    "critic.forward_micro_batch_size": "nothing reads it",
    ROLLOUT + ".mode": "generation is always asynchronous",
    ROLLOUT + ".{disable_log_stats,layered_summon,skip_tokenizer_init,multi_stage_wake_up}": "nothing reads it",
    ROLLOUT + ".{over_sample_rate,moe_tensor_parallel_size}": "nothing reads it",
    ROLLOUT
    + ".{engine_kwargs.sglang,engine_kwargs.trtllm,sglang_engine_mode}": "belongs to an engine that is not offered",
    ROLLOUT + ".{layer_name_map,server,limit_images,prometheus,trace}": "nothing reads it",
    ROLLOUT + ".{mtp,qat}": "follows the model's section",
    "trainer.{use_v1,v1.sync,v1.separate_async.hybrid_rollout}": "there is one trainer",
    "trainer.v1.sampler.{sync_refill_failed_groups,custom_sampler,sampler_kwargs}": "there is one sampler",
    "global_profiler.{relocate_results,finish_hook_cmd,finish_hook_all_ranks,finish_hook_ranks}": NO_SHELL,
    PROFILERS + ".{relocate_results,finish_hook_cmd,finish_hook_all_ranks,finish_hook_ranks}": NO_SHELL,
}


@dataclass(frozen=True)
class Refusal:
    """Why a key is refused, what to do, and which values pass all the same (null always does)."""

    reason: str
    fix: str = "remove it"
    passes: tuple[Any, ...] = ()


DERIVED = Refusal("it is derived", passes=(False,))
PER_GPU = Refusal("a global micro size depends on the number of ranks")
QAT = Refusal("NVFP4 training is not offered")

# pattern -> refusal. A whole section passes while its `enable` is off.
REFUSED = {
    "rollout.{n,total_rollout_steps}": Refusal("the fully asynchronous program is not offered"),
    "async_training": Refusal("the fully asynchronous program is not offered"),
    "distillation": Refusal("a teacher pool is not offered"),
    "data.image_key": Refusal("text only", passes=("images",)),
    "data.video_key": Refusal("text only", passes=("videos",)),
    "data.audio_key": Refusal("text only", passes=("audios",)),
    "data.image_patch_size": Refusal("text only", passes=(14,)),
    "data.mm_processor_kwargs": Refusal("text only", passes=({},)),
    "data.{tool_config_path,function_tool_path}": Refusal("tools are not offered"),
    "actor_rollout_ref.actor.ppo_micro_batch_size": PER_GPU,
    "critic.ppo_micro_batch_size": PER_GPU,
    "actor_rollout_ref.{ref,rollout}.log_prob_micro_batch_size": PER_GPU,
    "{actor_rollout_ref.actor,actor_rollout_ref.ref,critic}.rollout_n": Refusal("it is derived from rollout.n"),
    "actor_rollout_ref.actor.use_rollout_log_probs": Refusal(
        "not offered", "algorithm.rollout_correction.bypass_mode=True", (False,)
    ),
    "actor_rollout_ref.actor.freeze_vision_tower": Refusal("text models only", passes=(False,)),
    "{actor_rollout_ref.actor,critic}.profile": Refusal("replaced by profiler", "use the profiler section"),
    "actor_rollout_ref.actor.qat": QAT,
    ENGINE_SECTIONS + ".qat": QAT,
    MEGATRON_SECTIONS + ".qat": QAT,
    ENGINE_SECTIONS + ".forward_only": DERIVED,
    MEGATRON_SECTIONS + ".forward_only": DERIVED,
    ENGINE_SECTIONS + ".turbo_config": Refusal("belongs to an engine that is not offered"),
    "{actor_rollout_ref.actor,critic}.optim.total_training_steps": Refusal(
        "it is derived", "trainer.total_training_steps=N", (-1,)
    ),
    "{actor_rollout_ref.actor,critic}.optim.{muon_momentum,muon_nesterov,muon_split_qkv,muon_scale_mode}": Refusal(
        "Muon is not offered", passes=(0.95, True, "spectral")
    ),
    "{actor_rollout_ref.actor,critic}.optim.{muon_coefficient_type,muon_num_ns_steps,muon_tp_mode}": Refusal(
        "Muon is not offered", passes=("quintic", 5, "blockwise")
    ),
    "{actor_rollout_ref.actor,critic}.optim.{muon_fp32_matmul_prec,muon_extra_scale_factor}": Refusal(
        "Muon is not offered", passes=("medium", 1.0)
    ),
    "{actor_rollout_ref.actor,critic}.optim.{muon_scalar_optimizer,muon_match_adamw_update_rms}": Refusal(
        "Muon is not offered", passes=("adam", False)
    ),
    "{actor_rollout_ref.actor,critic}.optim.use_layer_wise_distributed_optimizer": Refusal(
        "Muon is not offered", passes=(False,)
    ),
    ROLLOUT + ".pipeline_model_parallel_size": Refusal(
        "the rollout has no pipeline", f"{ROLLOUT}.tensor_model_parallel_size=N", (1,)
    ),
    ROLLOUT + ".{multi_turn,disaggregation,custom}": Refusal("not offered"),
    ROLLOUT + ".agent.{agent_loop_config_path,custom_async_server,agent_loop_manager_class}": Refusal("not offered"),
    ROLLOUT + ".checkpoint_manager_class": Refusal("not offered"),
    "trainer.default_hdfs_dir": Refusal("HDFS is not offered", "trainer.default_local_dir=DIRECTORY"),
    "trainer.del_local_ckpt_after_load": Refusal("a checkpoint is never deleted by reading it", passes=(False,)),
}
PER_GPU_FIX = {
    key: f"{key}_per_gpu"
    for key in (
        "actor_rollout_ref.actor.ppo_micro_batch_size",
        "critic.ppo_micro_batch_size",
        "actor_rollout_ref.ref.log_prob_micro_batch_size",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size",
    )
}


@cache
def ignored_names() -> dict[str, str]:
    return {name: reason for pattern, reason in IGNORED.items() for name in expand(pattern)}


@cache
def refused_names() -> dict[str, Refusal]:
    return {name: refusal for pattern, refusal in REFUSED.items() for name in expand(pattern)}


def ignored(key: str) -> tuple[str, str] | None:
    """(listed name, reason) when the key has no effect."""
    name = covering(key, ignored_names())
    return None if name is None else (name, ignored_names()[name])


def refused(key: str) -> tuple[str, Refusal] | None:
    """(listed name, refusal) when the key is never accepted."""
    name = covering(key, refused_names())
    return None if name is None else (name, refused_names()[name])
