"""What an update must consist of: names and shapes of the model's file form, checked before vLLM sees a tensor.

vLLM's loaders would cut a tensor that is too long, without a word, and stop in the middle at an unknown name. What fits
reaches them; everything else is named in one error.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from engines.hf_model import build_on_meta, disk_layout, is_ignorable, report_names, tied_names
from engines.spec import ModelSpec


class Inventory:
    """Every tensor of the model, by the name it has on disk. Takes no memory for them."""

    def __init__(self, spec: ModelSpec) -> None:
        self.model = build_on_meta(spec, torch.bfloat16)
        self.shapes = {tensor.name: tensor.shape for tensor in disk_layout(self.model)}
        self.ties = tied_names(self.model)
        latent = [name for name in self.shapes if name.endswith(".kv_b_proj.weight")]
        # Kept until the update is over: what must equal its tied partner, and what vLLM derives other tensors from.
        self.kept = {*self.ties, *self.ties.values(), *latent[:1]}


class Delivery:
    """One update: iterating hands on copies of what fits, `check` raises for what did not."""

    def __init__(self, inventory: Inventory, stream: Iterable[tuple[str, Tensor]]) -> None:
        self._inventory, self._stream = inventory, iter(stream)
        self._missing = set(inventory.shapes)
        self._doubled: list[str] = []
        self._unknown: list[str] = []
        self._unusable: dict[str, str] = {}
        self.kept: dict[str, Tensor] = {}
        self.last = "nothing"
        self.broken = False  # the stream itself failed, not who reads it

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """vLLM holds on to a tensor until its layer is complete, hence the copies."""
        while (item := self._next()) is not None:
            self.last, tensor = item
            if self._fits(self.last, tensor):
                own = tensor.clone()
                if self.last in self._inventory.kept:
                    self.kept[self.last] = own
                if self.last not in self._inventory.ties:  # vLLM ties the head itself
                    yield self.last, own

    def _next(self) -> tuple[str, Tensor] | None:
        self.broken = True
        item = next(self._stream, None)
        self.broken = False
        return item

    def _fits(self, name: str, tensor: Tensor) -> bool:
        shapes, ties = self._inventory.shapes, self._inventory.ties
        if name in self._missing or (name in ties and name not in self.kept):
            self._missing.discard(name)
            expected = shapes[ties.get(name, name)]
            if tuple(tensor.shape) == expected:
                return True
            self._unusable[name] = f"{tuple(tensor.shape)}, expected {expected}"
        elif name in shapes or name in ties:
            self._doubled.append(name)
        elif not is_ignorable(self._inventory.model, name):
            self._unknown.append(name)
        return False

    def drain(self) -> None:
        """Read the rest: its producers may be collective."""
        for _ in self:
            pass

    def check(self, source: str) -> None:
        """ValueError with every name that was missing, doubled, unknown or of another shape."""
        report_names(sorted(self._missing), sorted(self._doubled), sorted(self._unknown), source)
        for name, partner in self._inventory.ties.items():
            if name in self.kept and not torch.equal(self.kept[name], self.kept[partner]):
                self._unusable[name] = f"not equal to {partner}, to which config.json ties it"
        if self._unusable:
            raise ValueError(
                f"got unusable tensors {self._unusable} in {source}; expected those of config.json; "
                "use the same config.json and override_config on both sides"
            )
