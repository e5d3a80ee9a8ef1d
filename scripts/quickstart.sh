#!/usr/bin/env bash
# Train a real 135M chat model to add, by GRPO, on this machine: bash scripts/quickstart.sh [override …]
#   bash scripts/quickstart.sh model_engine=fsdp
#   bash scripts/quickstart.sh actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2
# Needs Python 3.11 or 3.12; makes .venv, the model and the data under runs/ when they are missing.
cd "$(dirname "$0")/.."
source scripts/venv.sh quickstart
exec bash recipes/quickstart_addition.sh "$@"
