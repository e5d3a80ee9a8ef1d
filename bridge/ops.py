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
    """One layout. `dim` is the dimension cut by tensor parallelism, None where every rank holds a copy.
    `pads`: the full live tensor may have more rows than its source; the surplus is zero."""

    dim: int | None = 0
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


@dataclass(frozen=True)
class GateUp(Op):
    """[gate ; up]. The shard of rank t is [gate_t ; up_t], not a chunk of the concatenation."""

    def runs(self, hf: list[Shape]) -> list[Run]:
        return [Run(source, 0, shape[0]) for source, shape in enumerate(hf)]

    def split_for(self, live: Shape, hf: list[Shape], parts: int, part: int) -> list[Block]:
        rows = live[0] // 2
        return to_blocks([Run(source, part * rows, rows) for source in range(2)], 0)

    def parts_of(self, live: Shape, hf: list[Shape], parts: int) -> int | None:
        return super().parts_of(live, hf, parts) if hf[0][0] % parts == 0 else None


@dataclass(frozen=True)
class QKV(Op):
    """Per key-value group: its A/G query heads, its key head, its value head; group after group.

    A=4, G=2, hd=1 gives the rows q0 q1 k0 v0 q2 q3 k1 v1. With more ranks than groups a chunk ends
    inside a group, even inside a head: Megatron-Core gathers the activations there.
    """

    heads: int = 0
    groups: int = 0
    head_dim: int = 0

    def runs(self, hf: list[Shape]) -> list[Run]:
        q_rows, rows = self.heads // self.groups * self.head_dim, self.head_dim
        return [
            run
            for group in range(self.groups)
            for run in (Run(0, group * q_rows, q_rows), Run(1, group * rows, rows), Run(2, group * rows, rows))
        ]

    def parts_of(self, live: Shape, hf: list[Shape], parts: int) -> int | None:
        legal = parts % self.groups == 0 or self.groups % parts == 0
        return super().parts_of(live, hf, parts) if legal else None
