#!/usr/bin/env bash
# PPO with a critic (GAE) on a tiny random Qwen3, Megatron engine, on a CPU.
# Needs:     2 cores, 4 GB of memory, less than 3 minutes
# Command:   bash recipes/tiny_ppo_critic.sh [override …]     (WORK=DIR: another folder for its files)
# Really run: CPU; a slow test runs it and sees the reward rise
set -euo pipefail
cd "$(dirname "$0")/.."

work=${WORK:-runs/tiny_ppo_critic}
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
)
MODEL=(actor_rollout_ref.model.path="$model")
ACTOR=(
  actor_rollout_ref.actor.megatron.dtype=float32
  actor_rollout_ref.actor.ppo_mini_batch_size=16
  actor_rollout_ref.actor.use_dynamic_bsz=True
  actor_rollout_ref.actor.ppo_max_token_len_per_gpu=4096
  actor_rollout_ref.actor.optim.lr=1e-3
)
CRITIC=(
  critic.megatron.dtype=float32
  critic.use_dynamic_bsz=True
  critic.ppo_max_token_len_per_gpu=4096
  critic.optim.lr=3e-3
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
)
ALGORITHM=(
  algorithm.adv_estimator=gae
  algorithm.lam=0.95
  trainer.critic_warmup=2
)
TRAINER=(
  trainer.device=cpu
  trainer.n_gpus_per_node=1
  trainer.total_training_steps=20
  trainer.val_before_train=False
  trainer.default_local_dir="$work/run"
  trainer.resume_mode=disable
)
exec python3 -m trainer.main model_engine=megatron \
  "${PROMPTS[@]}" "${MODEL[@]}" "${ACTOR[@]}" "${CRITIC[@]}" "${ROLLOUT[@]}" "${REWARD[@]}" "${ALGORITHM[@]}" \
  "${TRAINER[@]}" "$@"
