"""Bring the shards of a bucket of tensors to the ranks that need them. Knows parts and groups, never names.

A bucket belongs to one pipeline stage. Its owner lays its shards into one flat send buffer:

    [ cut tensors (gathered over TP) | copies (equal on all TP ranks) ]      every tensor at a multiple of 256 bytes

The buffer is broadcast over the pipeline group, then its first part is gathered over the tensor-parallel
group: at most two collectives a bucket, however many tensors it holds. The last of them runs while the
bucket before is consumed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from bridge.layout import Groups, Layout

# torch 2.13 renamed it and warns about the old name; older versions have only that.
all_gather = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor

ALIGN = 256  # bytes: any dtype can be viewed at any offset, and copies stay vectorised


class Shard(NamedTuple):
    """Local shape and dtype of a tensor cut into `parts` over TP (1: the same on every TP rank)."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: int

    @property
    def slot_bytes(self) -> int:
        """Bytes it takes in a buffer, alignment included."""
        return math.ceil(math.prod(self.shape) * self.dtype.itemsize / ALIGN) * ALIGN


@dataclass
class Bucket:
    """Consecutive items of one owner, each a list of shards that stay together."""

    owner: int
    items: list[list[Shard]] = field(default_factory=list)

    @property
    def shards(self) -> list[Shard]:
        return [shard for item in self.items for shard in item]


def pack(items: list[tuple[int, list[Shard]]], limit: int) -> list[Bucket]:
    """Cut (owner, shards) items, in order, into buckets whose buffers take at most `limit` bytes; an item
    larger than that has a bucket of its own."""
    buckets: list[Bucket] = []
    used = 0
    for owner, shards in items:
        cost = sum(shard.slot_bytes * (1 + shard.parts if shard.parts > 1 else 1) for shard in shards)
        if not buckets or buckets[-1].owner != owner or used + cost > limit:
            buckets.append(Bucket(owner))
            used = 0
        buckets[-1].items.append(shards)
        used += cost
    return buckets


class Gatherer:
    """Runs buckets through two sets of buffers in turn, one bucket ahead of its consumer.

    everywhere: every rank receives the tensors; otherwise only the ranks of pipeline stage 0.
    """

    def __init__(self, layout: Layout, groups: Groups, device: torch.device, everywhere: bool) -> None:
        self._layout, self._groups, self._device, self._everywhere = layout, groups, device, everywhere
        self._buffers: dict[str, Tensor] = {}

    def run(self, buckets: list[Bucket], live_of: Callable[[int], list[Tensor]]) -> Iterator[list[list[list[Tensor]]]]:
        """For each bucket: item -> shard -> its parts. `live_of(b)` gives the local shards of an own bucket b.

        Parts are views of live tensors or of a buffer, valid until the next bucket is asked for. Closing the
        iterator early first finishes the collectives, so that no other rank waits for this one.
        """

        def start(number: int) -> Callable[[], list[list[Tensor]]] | None:
            return self._start(buckets[number], number, live_of) if number < len(buckets) else None

        finish = start(0)
        for number, bucket in enumerate(buckets):
            parts = iter(finish())
            finish = start(number + 1)
            try:
                yield [[next(parts) for _ in item] for item in bucket.items]
            except GeneratorExit:
                for later in range(number + 2, len(buckets) + 1):
                    finish()
                    finish = start(later)
                raise

    def _start(
        self, bucket: Bucket, number: int, live_of: Callable[[int], list[Tensor]]
    ) -> Callable[[], list[list[Tensor]]]:
        """Launch the collectives of a bucket; the returned function waits and gives the parts of each shard."""
        layout, mine = self._layout, bucket.owner == self._layout.pp_rank
        shards = bucket.shards
        live = [tensor.detach() for tensor in live_of(number)] if mine else []
        travels = layout.pp > 1 and (self._everywhere or bucket.owner != 0)
        receives = self._everywhere or layout.pp_rank == 0
        offsets, cut_bytes, all_bytes = _place(shards)
        send_bytes = all_bytes if travels else cut_bytes
        if not (travels or receives):
            return lambda: [[] for _ in shards]
        if not send_bytes:  # copies that are already here
            return lambda: [[tensor] for tensor in live]

        send = self._buffer(f"send{number % 2}", send_bytes)
        for index, tensor in enumerate(live):
            if offsets[index] < send_bytes:
                _view(send, offsets[index], shards[index]).copy_(tensor)
        work = None
        if travels:
            owner = dist.get_global_rank(self._groups.pp, bucket.owner)
            work = dist.broadcast(send, owner, group=self._groups.pp, async_op=True)
        received = send.unsqueeze(0)
        if cut_bytes and receives:
            if work is not None:
                work.wait()
            received = self._buffer(f"received{number % 2}", layout.tp * cut_bytes).view(layout.tp, cut_bytes)
            work = all_gather(received.view(-1), send[:cut_bytes], group=self._groups.tp, async_op=True)

        def finish() -> list[list[Tensor]]:
            if work is not None:
                work.wait()
            if not receives:
                return [[] for _ in shards]
            parts = []
            for index, (shard, offset) in enumerate(zip(shards, offsets, strict=True)):
                if shard.parts > 1:
                    parts.append([_view(received[part], offset, shard) for part in range(shard.parts)])
                else:
                    parts.append([live[index] if mine else _view(send, offset, shard)])
            return parts

        return finish

    def _buffer(self, name: str, size: int) -> Tensor:
        if name not in self._buffers or self._buffers[name].numel() < size:
            self._buffers[name] = torch.empty(size, dtype=torch.uint8, device=self._device)
        return self._buffers[name][:size]


def _place(shards: list[Shard]) -> tuple[list[int], int, int]:
    """Offset of each shard in the send buffer, bytes of the cut ones (they come first), bytes of all."""
    offsets, position = [0] * len(shards), 0
    cut = [index for index, shard in enumerate(shards) if shard.parts > 1]
    copies = [index for index, shard in enumerate(shards) if shard.parts == 1]
    for index in cut:
        offsets[index], position = position, position + shards[index].slot_bytes
    cut_bytes = position
    for index in copies:
        offsets[index], position = position, position + shards[index].slot_bytes
    return offsets, cut_bytes, position


def _view(buffer: Tensor, offset: int, shard: Shard) -> Tensor:
    size = math.prod(shard.shape) * shard.dtype.itemsize
    return buffer[offset : offset + size].view(shard.dtype).view(shard.shape)
