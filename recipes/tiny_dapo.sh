#!/usr/bin/env bash
# DAPO on a tiny random Qwen3, FSDP2 engine, on a CPU: clip-higher, token-mean, dynamic sampling, overlong shaping.
# Needs:     2 cores, 4 GB of memory, less than 3 minutes
# Command:   bash recipes/tiny_dapo.sh [override …]     (WORK=DIR: another folder for its files)
# Really run: CPU; a slow test runs it and sees the reward rise
set -euo pipefail
cd "$(dirname "$0")/.."

work=${WORK:-runs/tiny_dapo}
model=$work/model
data=$work/data
[[ -f $model/config.json ]] || python3 -m scripts.make_tiny --family qwen3 --out "$model"
[[ -f $data/val.jsonl ]] || python3 -m scripts.make_addition_data "$data"

PROMPTS=(
  data.train_files="$data/train.jsonl"
  data.val_files="$data/val.jsonl"
  data.train_batch_size=16
  data.max_prompt_length=64
  data.max_response_length=16
  data.gen_batch_size=16
)
MODEL=(actor_rollout_ref.model.path="$model")
ACTOR=(
  actor_rollout_ref.actor.fsdp_config.dtype=float32
  actor_rollout_ref.actor.ppo_mini_batch_size=16
  actor_rollout_ref.actor.use_dynamic_bsz=True
  actor_rollout_ref.actor.ppo_max_token_len_per_gpu=4096
  actor_rollout_ref.actor.optim.lr=1e-3
  actor_rollout_ref.actor.clip_ratio_low=0.2
  actor_rollout_ref.actor.clip_ratio_high=0.28
  actor_rollout_ref.actor.loss_agg_mode=token-mean
)
ROLLOUT=(
  actor_rollout_ref.rollout.name=hf
  actor_rollout_ref.rollout.n=4
  actor_rollout_ref.rollout.tensor_model_parallel_size=1
  actor_rollout_ref.rollout.dtype=float32
  actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes=1
)
REWARD=(
  reward.custom_reward_function.path=recipes/digit_share.py
  reward.num_workers=1
  reward.reward_manager.name=dapo
  reward.reward_kwargs.overlong_buffer_cfg.enable=True
  reward.reward_kwargs.overlong_buffer_cfg.len=4
  reward.reward_kwargs.overlong_buffer_cfg.penalty_factor=0.1
  reward.reward_kwargs.max_resp_len=16
)
ALGORITHM=(
  algorithm.adv_estimator=grpo
  algorithm.filter_groups.enable=True
  algorithm.filter_groups.metric=digits   # the raw number that the reward function returns
  algorithm.filter_groups.max_num_gen_batches=5
)
TRAINER=(
  trainer.device=cpu
  trainer.n_gpus_per_node=1
  trainer.total_training_steps=20
  trainer.val_before_train=False
  trainer.default_local_dir="$work/run"
  trainer.resume_mode=disable
)
exec python3 -m trainer.main model_engine=fsdp \
  "${PROMPTS[@]}" "${MODEL[@]}" "${ACTOR[@]}" "${ROLLOUT[@]}" "${REWARD[@]}" "${ALGORITHM[@]}" \
  "${TRAINER[@]}" "$@"
