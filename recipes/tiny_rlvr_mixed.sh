#!/usr/bin/env bash
# RLVR on four domains at once with a tiny random Qwen3, FSDP2 engine, on a CPU: sums, code in a sandbox, instructions, choice.
# Needs:     2 cores, 4 GB of memory, less than 3 minutes; root or user namespaces (or bubblewrap) for the code sandbox
# Command:   bash recipes/tiny_rlvr_mixed.sh [override …]     (WORK=DIR: another folder for its files)
# Really run: CPU; a slow test runs it and reads the metrics of every tag
set -euo pipefail
cd "$(dirname "$0")/.."

work=${WORK:-runs/tiny_rlvr_mixed}
model=$work/model
data=$work/data
[[ -f $model/config.json ]] || python3 -m scripts.make_tiny --family qwen3 --out "$model"
[[ -f $data/val.jsonl ]] || python3 -m scripts.make_mixed_data "$data"

PROMPTS=(
  data.train_files="$data/train.jsonl"
  data.val_files="$data/val.jsonl"
  data.train_batch_size=8
  'data.domain_interleave_probs={math_rule:0.25,code_sandbox:0.25,ifeval:0.25,crossthinkqa:0.25}'
  data.max_prompt_length=128
  data.max_response_length=32
)
MODEL=(actor_rollout_ref.model.path="$model")
ACTOR=(
  actor_rollout_ref.actor.fsdp_config.dtype=float32
  actor_rollout_ref.actor.ppo_mini_batch_size=8
  actor_rollout_ref.actor.use_dynamic_bsz=True
  actor_rollout_ref.actor.ppo_max_token_len_per_gpu=4096
  actor_rollout_ref.actor.optim.lr=1e-3
)
ROLLOUT=(
  actor_rollout_ref.rollout.name=hf
  actor_rollout_ref.rollout.n=4
  actor_rollout_ref.rollout.tensor_model_parallel_size=1
  actor_rollout_ref.rollout.dtype=float32
  actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes=1
)
REWARD=(
  reward.num_workers=1
  reward.code_sandbox.isolation=auto   # bubblewrap, else namespaces of our own; never without
  reward.report.enable=True
  reward.report.prompts=24
  reward.report.n=2
)
ALGORITHM=(algorithm.adv_estimator=grpo)
TRAINER=(
  trainer.device=cpu
  trainer.n_gpus_per_node=1
  trainer.total_training_steps=3
  trainer.test_freq=3
  trainer.val_before_train=False
  trainer.default_local_dir="$work/run"
  trainer.resume_mode=disable
)
exec python3 -m trainer.main model_engine=fsdp \
  "${PROMPTS[@]}" "${MODEL[@]}" "${ACTOR[@]}" "${ROLLOUT[@]}" "${REWARD[@]}" "${ALGORITHM[@]}" "${TRAINER[@]}" "$@"
