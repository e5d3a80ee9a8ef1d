"""Multi-head latent attention and the sparse-attention indexer: rows ordered by head."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from bridge.ops.base import Op, Run, Shape


@dataclass(frozen=True)
class HeadRows(Op):
    """Rows `first` .. `first + rows` of each head of a source with `head_rows` rows a head; cut by whole heads.

    `kv_b_proj` has dn key rows, then dv value rows in each head. Two heads, dn=2, dv=1, source rows 0..5:
    the key half (linear_k_up_proj) is rows 0 1 3 4, the value half (linear_v_up_proj) rows 2 5; with two
    tensor-parallel ranks the second holds 3 4 and 5. All rows of a head: the tensor as it is.
    """

    heads: int = 0
    head_rows: int = 0
    first: int = 0
    rows: int = 0

    @classmethod
    def whole(cls, heads: int, head_rows: int) -> HeadRows:
        return cls(heads=heads, head_rows=head_rows, rows=head_rows)

    def runs(self, hf: list[Shape]) -> list[Run]:
        if self.rows == self.head_rows:
            return [Run(0, 0, self.heads * self.rows)]
        return [Run(0, head * self.head_rows + self.first, self.rows) for head in range(self.heads)]

    def parts_of(self, live: Shape, hf: list[Shape], parts: int) -> int | None:
        return super().parts_of(live, hf, parts) if self.heads % parts == 0 else None


class RopeRows(NamedTuple):
    """Which of a head's D rows carry a position, the first or the last dr of them, and how these pair up:
    neighbours (interleaved) or row k with row k + dr/2 (half)."""

    first: bool
    interleaved: bool

    @classmethod
    def named(cls, name: str) -> RopeRows:
        """From "first-interleaved", "first-half", "last-interleaved" or "last-half"."""
        layouts = {str(cls(first, paired)): cls(first, paired) for first in (True, False) for paired in (True, False)}
        if name not in layouts:
            raise ValueError(f"got indexer rows {name!r}; expected one of {sorted(layouts)}; correct the name")
        return layouts[name]

    def __str__(self) -> str:
        return f"{'first' if self.first else 'last'}-{'interleaved' if self.interleaved else 'half'}"


def indexer_order(source: RopeRows, target: RopeRows, dim: int, rope: int) -> tuple[int, ...]:
    """Row k of a head in layout `target` is row `order[k]` of the same head in layout `source`.

    Queries and keys move alike and scores are dot products, so every such reordering is exact.
    """
    start = 0 if source.first else dim - rope
    turning = list(range(start, start + rope))
    still = [row for row in range(dim) if row not in turning]
    if source.interleaved and not target.interleaved:
        turning = turning[0::2] + turning[1::2]
    elif target.interleaved and not source.interleaved:
        turning = [row for pair in zip(turning[: rope // 2], turning[rope // 2 :], strict=True) for row in pair]
    return tuple(turning + still if target.first else still + turning)


@dataclass(frozen=True)
class IndexerRows(Op):
    """The rows of each indexer head in another order; a copy on every tensor-parallel rank."""

    dim: int | None = None
    heads: int = 1
    order: tuple[int, ...] = ()

    def runs(self, hf: list[Shape]) -> list[Run]:
        size = len(self.order)
        one = _runs_of(self.order)
        return [Run(0, head * size + start, length) for head in range(self.heads) for start, length in one]


@cache
def _runs_of(order: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """(start, length) of the ascending stretches of `order`."""
    found: list[tuple[int, int]] = []
    for row in order:
        if found and sum(found[-1]) == row:
            found[-1] = (found[-1][0], found[-1][1] + 1)
        else:
            found.append((row, 1))
    return tuple(found)
