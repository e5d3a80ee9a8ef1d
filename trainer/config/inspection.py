"""What a check sees: the complete tree, what was given by hand, the model's facts, and where to put findings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trainer.config.derived import facts_of, layout_text
from trainer.config.errors import ConfigError
from trainer.config.legacy import Item
from trainer.config.model_config import ModelFacts
from trainer.config.schema import Config

ARR = "actor_rollout_ref"
ACTOR, REF, ROLLOUT = f"{ARR}.actor", f"{ARR}.ref", f"{ARR}.rollout"


@dataclass
class Inspection:
    config: Config
    explicit: Mapping[str, Item]
    model: ModelFacts | None
    errors: list[ConfigError] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.facts: dict[str, Any] = facts_of(self.config)
        self.layout = layout_text(self.facts)

    def error(self, id: str, key: str, got: str, expected: str, fix: str) -> None:
        self.errors.append(ConfigError(id, key, got, expected, fix))

    def where(self, key: str) -> str:
        """` (argument 31)` when the key stands in argv."""
        item = self.explicit.get(key)
        return f" (argument {item.position})" if item is not None and item.position is not None else ""

    @property
    def actor(self) -> Any:
        return self.config.actor_rollout_ref.actor

    @property
    def ref(self) -> Any:
        return self.config.actor_rollout_ref.ref

    @property
    def rollout(self) -> Any:
        return self.config.actor_rollout_ref.rollout

    @property
    def needs_reference(self) -> bool:
        return self.actor.use_kl_loss or self.config.algorithm.use_kl_in_reward

    @property
    def max_length(self) -> int:
        """Tokens of the longest sample: prompt + response."""
        return self.config.data.max_prompt_length + self.config.data.max_response_length


def divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def nearest(target: int, choices: list[int]) -> int:
    """The choice closest to the target; of two equally close ones the larger."""
    return min(choices, key=lambda choice: (abs(choice - target), -choice))
