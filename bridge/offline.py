"""A whole model copy planned from its config alone: every rank's tensors, and the proof that they are complete."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from bridge.layout import Layout
from bridge.live import global_name
from bridge.models import Config, check_supported, family_extras, family_rules
from bridge.models.family import Extras
from bridge.pipeline import Stages
from bridge.plan import Placed, Plan, make_plan
from bridge.predict import Chunk, Form, predict


@dataclass(frozen=True)
class Tensor:
    """A tensor in a rank's state dict: its key there, what fills it, and from which Hugging Face tensors."""

    key: str
    placed: Placed
    sources: list[str]


@dataclass(frozen=True)
class OfflineModel:
    """`sizes` is the layout of any rank; `stages` the tensors of each pipeline stage, alike on all its ranks."""

    config: Config
    form: Form
    sizes: Layout
    layers: Stages
    dtype: torch.dtype
    stages: list[list[Chunk]]
    plan: Plan

    @classmethod
    def make(cls, config: Config, form: Form, sizes: Layout, layers: Stages, dtype: torch.dtype) -> OfflineModel:
        """ValueError listing everything that does not fit."""
        check_supported(config)
        stages = predict(config, form, sizes, layers, dtype)
        described = [
            [live._replace(name=global_name(live.name, chunk.first_layer)) for chunk in chunks for live in chunk.live]
            for chunks in stages
        ]
        plan = make_plan(family_rules(config, form.target(sizes.ep)), described, sizes.axes)
        return cls(config, form, sizes, layers, dtype, stages, plan)

    @property
    def extras(self) -> Extras:
        return family_extras(self.config, self.form.target(self.sizes.ep))

    def ranks(self) -> Iterator[Layout]:
        """Every rank of one model copy."""
        axes = {axis: vars(self.sizes)[axis] for axis in ("tp", "pp", "vpp", "ep", "etp")}
        for stage in range(self.sizes.pp):
            for position in range(self.sizes.stage_ranks):
                yield Layout.at(position, stage, **axes)

    def tensors(self, stage: int) -> list[Tensor]:
        """What a rank of this stage holds, under the names of its state dict: layers count from 0 in each chunk,
        and with several chunks a rank `model0.`, `model1.` tell them apart."""
        filled = {
            placed.live.name: (placed, list(unit.hf))
            for unit in self.plan.units
            if unit.owner == stage
            for placed in unit.placed
        }
        found = []
        for number, chunk in enumerate(self.stages[stage]):
            prefix = f"model{number}." if self.sizes.vpp > 1 else ""
            for live in chunk.live:
                found.append(Tensor(prefix + live.name, *filled[global_name(live.name, chunk.first_layer)]))
        return found
