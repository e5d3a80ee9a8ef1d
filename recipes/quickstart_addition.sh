#!/usr/bin/env bash
# GRPO on sums of two numbers with SmolLM2-135M-Instruct; Megatron engine, 2 ranks, CPU.
# Needs:     2 cores, 6 GB of memory, about 5 minutes
# Command:   bash recipes/quickstart_addition.sh [override …]     (scripts/quickstart.sh installs first)
# Really run: CPU, both engines (README, "What was really run")
set -euo pipefail
cd "$(dirname "$0")/.."

model=runs/models/SmolLM2-135M-Instruct
data=runs/data/addition
[[ -f $model/config.json ]] || python scripts/get_smollm2.py $model
[[ -f $data/val.jsonl ]] || python scripts/make_addition_data.py $data

PROMPTS=(
  data.train_files=$data/train.jsonl
  data.val_files=$data/val.jsonl
  data.train_batch_size=8
  data.max_prompt_length=64
  data.max_response_length=16
)
MODEL=(
  actor_rollout_ref.model.path=$model
  actor_rollout_ref.model.enable_gradient_checkpointing=False
)
ROLLOUT=(
  actor_rollout_ref.rollout.name=hf
  actor_rollout_ref.rollout.n=8
  actor_rollout_ref.rollout.temperature=1.0
  actor_rollout_ref.rollout.tensor_model_parallel_size=1
  actor_rollout_ref.rollout.dtype=float32   # its rounding would add to that of the bf16 training forward
  actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes=64
)
REWARD=(
  "rewards={math_rule:{tag_included:[addition],answer:last_number}}"
  reward.num_workers=1
)
ALGORITHM=(
  algorithm.adv_estimator=grpo
)
UPDATE=(
  actor_rollout_ref.actor.ppo_mini_batch_size=8
  actor_rollout_ref.actor.use_dynamic_bsz=True
  actor_rollout_ref.actor.ppo_max_token_len_per_gpu=2048
  actor_rollout_ref.actor.optim.lr=2e-5
  "actor_rollout_ref.actor.optim.betas=[0.9,0.95]"
)
TRAINER=(
  trainer.device=cpu
  trainer.n_gpus_per_node=2
  trainer.total_training_steps=12
  trainer.test_freq=4
  trainer.save_freq=12
  trainer.max_actor_ckpt_to_keep=1
  "trainer.logger=[console,tensorboard]"
  trainer.log_val_generations=2
  trainer.default_local_dir=runs/quickstart
  'trainer.rollout_data_dir=${trainer.default_local_dir}/rollouts'
  trainer.resume_mode=disable
)

exec python3 -m trainer.main model_engine=megatron \
  "${PROMPTS[@]}" "${MODEL[@]}" "${ROLLOUT[@]}" "${REWARD[@]}" "${ALGORITHM[@]}" "${UPDATE[@]}" "${TRAINER[@]}" "$@"
