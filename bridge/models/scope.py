"""Where a family's rows apply."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from bridge.ops import Op, RopeRows, Shape
from bridge.rules import Rule

Config = dict[str, Any]


@dataclass(frozen=True)
class Target:
    """What the rows must know of the Megatron-Core side: expert-parallel ranks, whether it has extra prediction
    (MTP) layers, and the order of its indexer rows (None: that of the file)."""

    ep: int = 1
    mtp: bool = False
    indexer: RopeRows | None = None


@dataclass(frozen=True)
class Scope:
    """Name prefixes on both sides, and the layers (in Hugging Face's count) that have these rows."""

    layers: tuple[int, ...]
    live: str = "decoder.layers.{i}."
    hf: str = "model.layers.{i}."
    shift: int = 0
    form: str = ""

    def only(self, layers: Iterable[int]) -> Scope:
        kept = set(layers)
        return replace(self, layers=tuple(layer for layer in self.layers if layer in kept))

    def rule(self, live: str, hf: Mapping[str, Shape], op: Op, form: str = "", **options: Any) -> Rule:
        sources = {self.hf + name: shape for name, shape in hf.items()}
        forms = " ".join(filter(None, (self.form, form)))
        return Rule(self.live + live, sources, op, layers=self.layers, shift=self.shift, form=forms, **options)
