"""How the rows of one Megatron-Core tensor come from Hugging Face tensors.

Every fused layout is described once, as `Run`s: stretches of source rows that lie one after another in the
full fused tensor. `split_for` turns the runs into `Block`s for the shard of one rank. Import copies
`hf -> live` block by block; export copies the same blocks `live -> hf`: the two directions cannot disagree.

A, G, hd: query heads, key-value groups, head size. All matrices are [out, in] on both sides; nothing is transposed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

Shape = tuple[int, ...]


class Run(NamedTuple):
    """`length` rows of source tensor `source`, from row `start`."""

    source: int
    start: int
    length: int


class Block(NamedTuple):
    """live[live_start : live_start + length] equals hf[source][hf_start : hf_start + length], along `dim`;
    the other dimension is whole."""

    source: int
    dim: int
    hf_start: int
    live_start: int
    length: int

    def of_hf(self, hf: Tensor) -> Tensor:
        return hf.narrow(self.dim, self.hf_start, self.length)

    def of_live(self, live: Tensor) -> Tensor:
        return live.narrow(self.dim, self.live_start, self.length)


def chunk(runs: list[Run], start: int, stop: int) -> list[Run]:
    """The part of concatenated runs between rows `start` and `stop` (rows beyond the runs are padding)."""
    kept, position = [], 0
    for source, first, length in runs:
        low, high = max(start, position), min(stop, position + length)
        if low < high:
            kept.append(Run(source, first + low - position, high - low))
        position += length
    return kept


def to_blocks(runs: list[Run], dim: int) -> list[Block]:
    blocks, position = [], 0
    for source, first, length in runs:
        blocks.append(Block(source, dim, first, position, length))
        position += length
    return blocks


@dataclass(frozen=True)
class Op(ABC):
    """One layout. `dim` is the dimension cut over the ranks of `axis`, None where every rank holds a copy.
    `pads`: the full live tensor may have more rows than its source; the surplus is zero."""

    dim: int | None = 0
    axis = "tp"
    pads = False

    @abstractmethod
    def runs(self, hf: list[Shape]) -> list[Run]:
        """The full live tensor as concatenated source rows along `dim`."""

    def full_shape(self, hf: list[Shape]) -> Shape:
        """Shape of the unsplit live tensor."""
        dim = self.dim or 0
        rows = sum(run.length for run in self.runs(hf))
        return (*hf[0][:dim], rows, *hf[0][dim + 1 :])

    def parts_of(self, live: Shape, hf: list[Shape], parts: int) -> int | None:
        """Number of pieces the tensor is really cut into, told by its live shape: `parts`, 1 (a copy on each
        rank), or None if the live shape fits neither."""
        full = self.full_shape(hf)
        if live == full:
            return 1
        if self.dim is None or full[self.dim] % parts:
            return None
        cut = (*full[: self.dim], full[self.dim] // parts, *full[self.dim + 1 :])
        return parts if live == cut else None

    def split_for(self, live: Shape, hf: list[Shape], parts: int, part: int) -> list[Block]:
        """Blocks of the shard `part` of `parts`: here a plain chunk of the full tensor."""
        dim = self.dim or 0
        return to_blocks(chunk(self.runs(hf), part * live[dim], (part + 1) * live[dim]), dim)


@dataclass(frozen=True)
class Rename(Op):
    """The same tensor under another name."""

    dim: int | None = None

    def runs(self, hf: list[Shape]) -> list[Run]:
        return [Run(0, 0, hf[0][self.dim or 0])]


@dataclass(frozen=True)
class PadVocab(Rename):
    """Embedding and head [V, H]: the live rows of all ranks together may exceed V. Always cut on dim 0."""

    dim: int | None = 0
    pads = True

    def parts_of(self, live: Shape, hf: list[Shape], parts: int) -> int | None:
        return parts if live[1:] == hf[0][1:] and live[0] * parts >= hf[0][0] else None
