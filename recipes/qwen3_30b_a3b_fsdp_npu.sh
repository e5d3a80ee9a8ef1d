#!/usr/bin/env bash
# GRPO on Qwen3-30B-A3B with the FSDP engine and routing replay R3: the twin of qwen3_30b_a3b_megatron_npu.sh.
# Needs:     one Atlas A3 node (16 dies of 64 GB), 1.2 TB of host memory, a bf16 checkpoint, rows that math_rule scores
# Command:   MODEL_PATH=… TRAIN_FILE=… VAL_FILE=… RUN_DIR=… bash recipes/qwen3_30b_a3b_fsdp_npu.sh [override …]
# Really run: no, untested on NPU. The tests compose every key and add up the bytes.
set -euo pipefail
cd "$(dirname "$0")/.."

model=${MODEL_PATH:?set MODEL_PATH to the folder of Qwen3-30B-A3B}
run=${RUN_DIR:?set RUN_DIR to the folder for metrics and checkpoints}
[[ -f $model/config.json ]] || { echo "MODEL_PATH=$model: no config.json in it; download the model first" >&2; exit 2; }

PROMPTS=(
  data.train_files="${TRAIN_FILE:?set TRAIN_FILE to a .parquet or .jsonl file}"
  data.val_files="${VAL_FILE:?set VAL_FILE to a .parquet or .jsonl file}"
  data.train_batch_size=128
  data.max_prompt_length=1024
  data.max_response_length=7168
  data.filter_overlong_prompts=True
)
MODEL=(actor_rollout_ref.model.path="$model")
# Everything is cut into 16 pieces: 28.43 GiB of fp32 weights, gradients and Adam moments of a die's 61.27
ACTOR=(
  actor_rollout_ref.actor.fsdp_config.param_offload=True   # the rollout needs the room: 455 GiB of the host in all
  actor_rollout_ref.actor.fsdp_config.optimizer_offload=True
  actor_rollout_ref.actor.ppo_mini_batch_size=64
  actor_rollout_ref.actor.use_dynamic_bsz=True
  actor_rollout_ref.actor.ppo_max_token_len_per_gpu=8192
  actor_rollout_ref.actor.clip_ratio_high=0.28
  actor_rollout_ref.actor.router_replay.mode=R3
  actor_rollout_ref.actor.optim.lr=1e-6
  actor_rollout_ref.nccl_timeout=3660   # a minute more than HCCL's own limit
)
ROLLOUT=(
  actor_rollout_ref.rollout.name=vllm
  actor_rollout_ref.rollout.n=8
  actor_rollout_ref.rollout.tensor_model_parallel_size=4
  actor_rollout_ref.rollout.expert_parallel_size=4   # 15 GiB of weights per die
  actor_rollout_ref.rollout.gpu_memory_utilization=0.7
)
ALGORITHM=(algorithm.adv_estimator=grpo)
TRAINER=(
  trainer.device=npu
  trainer.n_gpus_per_node=16
  trainer.total_training_steps=200
  trainer.test_freq=10
  trainer.save_freq=20
  trainer.max_actor_ckpt_to_keep=2
  trainer.default_local_dir="$run"
  trainer.env.HCCL_CONNECT_TIMEOUT=1800
  trainer.env.HCCL_EXEC_TIMEOUT=3600
  trainer.env.HCCL_NPU_SOCKET_PORT_RANGE=auto
)
exec python3 -m trainer.main model_engine=fsdp \
  "${PROMPTS[@]}" "${MODEL[@]}" "${ACTOR[@]}" "${ROLLOUT[@]}" "${ALGORITHM[@]}" "${TRAINER[@]}" "$@"
