"""From configuration to a ready Trainer: everything cheap first, so that bad input ends before a worker starts."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

from engines.device import get_device
from engines.spec import RolloutEngineSpec, TrainEngineSpec
from trainer import checkpoint, wiring
from trainer.advantage import AdvantageOptions, find_estimator
from trainer.cluster import Cluster, Pool, WorkerGroup
from trainer.config import Config, Loaded, diff, save_config
from trainer.consistency import ConsistencyLimits, ConsistencyMonitor
from trainer.console import Console
from trainer.loop import Plan, Rooms, Trainer
from trainer.loss import LossOptions, PolicyLoss
from trainer.metrics import MetricLog
from trainer.policy import Policy
from trainer.prompts import PromptEncoder, PromptSource, load_rows, load_tokenizer, write_report
from trainer.reward import CustomSpec, DomainSpec, OverlongSpec, RewardManager
from trainer.rollout import RolloutGroup
from trainer.workers import RolloutWorker, TrainWorker

log = logging.getLogger(__name__)
REPOSITORY = Path(__file__).resolve().parent.parent

# A resumed run that differs here would not be the same experiment; trainer.resume_allow_changes permits it.
IDENTITY = (
    "model_engine",
    "actor_rollout_ref.model.path",
    "actor_rollout_ref.rollout.n",
    "actor_rollout_ref.rollout.seed",
    "data.train_files",
    "data.train_batch_size",
    "data.max_prompt_length",
    "data.max_response_length",
    "data.seed",
    "trainer.seed",
)
