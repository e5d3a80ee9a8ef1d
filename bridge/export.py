"""Export: from gathered shards to full Hugging Face tensors."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from bridge.gather import Gatherer, Shard, pack
from bridge.ops import Shape
from bridge.plan import Unit


def export_units(
    units: list[Unit], live: Mapping[str, Tensor], gatherer: Gatherer, limit: int, yields: bool
) -> Iterator[tuple[str, Tensor]]:
    """(name, full tensor) in plan order where `yields`; other ranks only take part in the collectives."""
    items = [
        (unit.owner, [Shard(p.live.shape, p.live.dtype, p.parts, p.op.axis) for p in unit.placed]) for unit in units
    ]
    buckets = pack(items, limit)
    ends = [0]
    for bucket in buckets:
        ends.append(ends[-1] + len(bucket.items))
    scratch = Scratch()

    def live_of(number: int) -> list[Tensor]:
        return [live[placed.live.name] for unit in units[ends[number] : ends[number + 1]] for placed in unit.placed]

    gathered = gatherer.run(buckets, live_of)
    try:
        for number, parts in enumerate(gathered):
            if yields:
                for unit, unit_parts in zip(units[ends[number] : ends[number + 1]], parts, strict=True):
                    yield from assemble(unit, unit_parts, scratch)
    finally:
        gathered.close()


class Scratch:
    """One reused piece of memory for the tensor being yielded."""

    def __init__(self) -> None:
        self._memory: Tensor | None = None

    def empty(self, shape: Shape, like: Tensor) -> Tensor:
        size = math.prod(shape) * like.element_size()
        if self._memory is None or self._memory.numel() < size:
            self._memory = torch.empty(size, dtype=torch.uint8, device=like.device)
        return self._memory[:size].view(like.dtype).view(shape)


def assemble(unit: Unit, parts: list[list[Tensor]], scratch: Scratch) -> Iterator[tuple[str, Tensor]]:
    """Full tensors of a unit from the parts of its live tensors: by reference where the source lies in one
    piece of memory, else one copy into the scratch memory."""
    pieces: list[list] = [[] for _ in unit.hf]
    for placed, shards in zip(unit.placed, parts, strict=True):
        for part, shard in enumerate(shards):
            for block in placed.blocks(part):
                pieces[block.source].append((block, block.of_live(shard)))
    for (name, shape), own in zip(unit.hf.items(), pieces, strict=True):
        own.sort(key=lambda piece: piece[0].hf_start)
        whole = joined([piece for _, piece in own], shape)
        if whole is None:
            whole = scratch.empty(shape, own[0][1])
            for block, piece in own:
                block.of_hf(whole).copy_(piece)
        yield name, whole


def joined(pieces: list[Tensor], shape: Shape) -> Tensor | None:
    """The concatenation on dim 0 as a view, if the pieces lie one after another in the same memory."""
    first = pieces[0]
    if len(pieces) == 1 and first.shape == shape and first.is_contiguous():
        return first
    end, storage = first.data_ptr(), first.untyped_storage().data_ptr()
    for piece in pieces:
        same = piece.untyped_storage().data_ptr() == storage and piece.data_ptr() == end
        if not (same and piece.is_contiguous() and piece.shape[1:] == shape[1:]):
            return None
        end += piece.numel() * piece.element_size()
    return first.as_strided(shape, torch.empty(shape, device="meta").stride())
