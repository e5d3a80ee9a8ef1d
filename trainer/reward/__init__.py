"""Answers -> scores, in processes that may be killed. Imports no device library."""

from trainer.reward.dispatch import RewardManager
from trainer.reward.result import RewardResult
from trainer.reward.spec import SCORED_DOMAINS, SPARE_S, TIMEOUT_S, CustomSpec, DomainSpec, OverlongSpec
from trainer.reward.stopped import ScoringStopped

__all__ = [
    "SCORED_DOMAINS",
    "SPARE_S",
    "TIMEOUT_S",
    "CustomSpec",
    "DomainSpec",
    "OverlongSpec",
    "RewardManager",
    "RewardResult",
    "ScoringStopped",
]
