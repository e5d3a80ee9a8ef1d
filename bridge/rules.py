"""What a family declares: rules that say which live tensor holds which Hugging Face tensors."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from bridge.ops import Op, Shape

FIRST, LAST = -1, 1 << 30  # places of the embedding and of final norm and head, before and after all layers


class Place(NamedTuple):
    """Layer of the whole model (FIRST or LAST outside the layers), and local expert number (0 outside experts)."""

    layer: int
    expert: int = 0


@dataclass(frozen=True)
class Rule:
    """`mcore` is a global live name with `{i}` for the layer and `{j}` for the expert of a rank, `hf` its sources
    with their full shapes, `{i}` for the layer and `{e}` for the expert of the whole model.

    layers   numbers `{i}` may have in `hf`; the live number is smaller by `shift` (extra prediction layers)
    experts  experts a rank holds, where the name has `{j}`
    last     behind all layers in the stream
    copy     written on import, never exported
    dtype    what the live tensor must be held in, if not the model's dtype
    form     the spelling this rule belongs to, where Megatron-Core has several for the same weight
    """

    mcore: str
    hf: Mapping[str, Shape]
    op: Op
    layers: Collection[int] = ()
    shift: int = 0
    experts: int = 0
    last: bool = False
    copy: bool = False
    dtype: torch.dtype | None = None
    form: str = ""

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        text = re.escape(self.mcore).replace(r"\{i\}", r"(?P<i>\d+)").replace(r"\{j\}", r"(?P<j>\d+)")
        return re.compile(text)

    def match(self, name: str) -> Place | None:
        """Where `name` stands, if this rule claims it."""
        found = self._pattern.fullmatch(name)
        if found is None:
            return None
        numbers = {key: int(value) for key, value in found.groupdict().items()}
        if "i" not in numbers:
            return Place(LAST if self.last else FIRST)
        place = Place(numbers["i"] + self.shift, numbers.get("j", 0))
        return place if place.layer in self.layers and place.expert < max(self.experts, 1) else None

    def places(self) -> list[Place]:
        """Everywhere the rule applies."""
        if "{i}" not in self.mcore:
            return [Place(LAST if self.last else FIRST)]
        return [Place(layer, expert) for layer in self.layers for expert in range(max(self.experts, 1))]

    def live_name(self, place: Place, layer: int) -> str:
        """The live name at `place`, with the number `layer` in place of `{i}`."""
        return self.mcore.replace("{i}", str(layer)).replace("{j}", str(place.expert))

    def sources(self, place: Place) -> dict[str, Shape]:
        """Hugging Face name -> full shape, in the order the op counts its sources: for an expert of a rank, the
        sources of that expert on the first expert-parallel rank, then on the second, and so on."""
        if not self.experts:
            return {name.replace("{i}", str(place.layer)): shape for name, shape in self.hf.items()}
        return {
            name.replace("{i}", str(place.layer)).replace("{e}", str(rank * self.experts + place.expert)): shape
            for rank in range(self.op.ep)
            for name, shape in self.hf.items()
        }


class Live(NamedTuple):
    """A live tensor as its rank describes it: global name, local shape, dtype, and what its
    `tensor_model_parallel` attribute says (None: it has none)."""

    name: str
    shape: Shape
    dtype: torch.dtype
    marked_split: bool | None = None
