"""Answers -> scores, in processes that may be killed. Imports no device library."""

from trainer.reward.dispatch import RewardManager
from trainer.reward.result import RewardResult
from trainer.reward.spec import SCORED_DOMAINS, CustomSpec, DomainSpec, OverlongSpec

__all__ = ["SCORED_DOMAINS", "CustomSpec", "DomainSpec", "OverlongSpec", "RewardManager", "RewardResult"]
