#!/usr/bin/env bash
# GRPO on GLM-5 (744B, DeepSeek Sparse Attention) with the Megatron engine; absorbed by MindSpeed core_r0.16.0.
# Needs:     32 Atlas A3 nodes (512 dies of 64 GB), 1.2 TB of host memory each, shared storage;
#            a bf16 checkpoint, rows that math_rule scores
# Command:   MODEL_PATH=… TRAIN_FILE=… VAL_FILE=… RUN_DIR=… bash recipes/glm5_dsa_megatron_npu.sh [override …]
# Really run: no, untested on NPU. The tests compose every key, plan the layout and add up the bytes.
# Not built: rollout.data_parallel_size is refused (with rollout.expert_parallel_size=16 the rest composes).
set -euo pipefail
cd "$(dirname "$0")/.."

model=${MODEL_PATH:?set MODEL_PATH to the folder of GLM-5}
run=${RUN_DIR:?set RUN_DIR to the folder for metrics and checkpoints}
[[ -f $model/config.json ]] || { echo "MODEL_PATH=$model: no config.json in it; download the model first" >&2; exit 2; }

PROMPTS=(
  data.train_files="${TRAIN_FILE:?set TRAIN_FILE to a .parquet or .jsonl file}"
  data.val_files="${VAL_FILE:?set VAL_FILE to a .parquet or .jsonl file}"
  data.train_batch_size=128
  data.max_prompt_length=2048
  data.max_response_length=14336
  data.filter_overlong_prompts=True
)
MODEL=(actor_rollout_ref.model.path="$model")
# python3 -m bridge plan --tp 8 --pp 8 --layers 9,10,10,10,10,10,10,9 --ep 64 --absorb --whole-down --experts grouped \
#   --vocab-multiple 8 --world 512
#   fullest stage: weights 3.75 + gradients 7.50 + optimizer 17.58 = 28.83 GiB of a die's 61.27
ACTOR=(
  actor_rollout_ref.actor.megatron.tensor_model_parallel_size=8
  actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=8
  actor_rollout_ref.actor.megatron.expert_model_parallel_size=64
  actor_rollout_ref.actor.megatron.param_offload=True   # the rollout needs the room
  actor_rollout_ref.actor.megatron.grad_offload=True
  actor_rollout_ref.actor.megatron.optimizer_offload=True
  actor_rollout_ref.actor.ppo_mini_batch_size=64
  actor_rollout_ref.actor.use_dynamic_bsz=True
  actor_rollout_ref.actor.ppo_max_token_len_per_gpu=16384
  actor_rollout_ref.actor.clip_ratio_high=0.28
  actor_rollout_ref.actor.router_replay.mode=R3
  actor_rollout_ref.actor.optim.lr=1e-6
  actor_rollout_ref.nccl_timeout=3660   # a minute more than HCCL's own limit
)
mcore=+actor_rollout_ref.actor.megatron.override_transformer_config
ASCEND=(
  $mcore.num_layers_in_first_pipeline_stage=9
  $mcore.num_layers_in_last_pipeline_stage=9
  $mcore.use_flash_attn=True
  # these four work together only
  $mcore.use_{dsa_absorb,fused_lightning_indexer,fused_sparse_flash_attention,fused_lightning_indexer_kl_loss}=True
  $mcore.use_fused_swiglu=True
  $mcore.moe_grouped_gemm=True
  $mcore.moe_permute_fusion=True
  $mcore.recompute_granularity=full
  $mcore.recompute_method=uniform
  $mcore.recompute_num_layers=1
)
ROLLOUT=(
  actor_rollout_ref.rollout.name=vllm
  actor_rollout_ref.rollout.n=8
  actor_rollout_ref.rollout.tensor_model_parallel_size=16
  actor_rollout_ref.rollout.data_parallel_size=4
  actor_rollout_ref.rollout.expert_parallel_size=64
  actor_rollout_ref.rollout.max_num_seqs=64
  actor_rollout_ref.rollout.gpu_memory_utilization=0.8
)
ALGORITHM=(algorithm.adv_estimator=grpo)
TRAINER=(
  trainer.device=npu
  trainer.nnodes=32
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
exec python3 -m trainer.main model_engine=megatron \
  "${PROMPTS[@]}" "${MODEL[@]}" "${ACTOR[@]}" "${ASCEND[@]}" "${ROLLOUT[@]}" "${ALGORITHM[@]}" "${TRAINER[@]}" "$@"
