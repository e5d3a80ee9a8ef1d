"""Bring the shards of a bucket of tensors to the ranks that need them. Knows parts and groups, never names.

A bucket belongs to one pipeline stage. Its owner lays its shards into one flat send buffer:

    [ cut tensors (gathered over TP) | copies (equal on all TP ranks) ]      every tensor at a multiple of 256 bytes

The buffer is broadcast over the pipeline group, then its first part is gathered over the tensor-parallel
group: two collectives a bucket, however many tensors it holds. The last of them runs while the
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


@dataclass(frozen=True)
class Route:
    """What a rank does with a bucket: its own shards or another stage's, sent over the pipeline or not,
    wanted here or not; and where each shard lies in the send buffer, the cut ones first."""

    shards: list[Shard]
    mine: bool
    travels: bool
    wanted: bool
    offsets: list[int]
    cut_bytes: int
    all_bytes: int

    @property
    def send_bytes(self) -> int:
        """Without a journey over the pipeline, cut shards go straight to their place among the gathered ones, and
        copies stay where they are."""
        return self.all_bytes if self.travels else 0

    @property
    def gathers(self) -> bool:
        return self.wanted and self.cut_bytes > 0


class Gatherer:
    """Runs buckets through two sets of buffers in turn, one bucket ahead of its consumer.

    everywhere: every rank receives the tensors; otherwise only the source can rely on what it gets.
    """

    def __init__(self, layout: Layout, groups: Groups, device: torch.device, everywhere: bool) -> None:
        self._layout, self._groups, self._device, self._everywhere = layout, groups, device, everywhere

    def run(self, buckets: list[Bucket], live_of: Callable[[int], list[Tensor]]) -> Iterator[list[list[list[Tensor]]]]:
        """For each bucket: item -> shard -> its parts. `live_of(b)` gives the local shards of an own bucket b.

        Parts are views of live tensors or of a buffer, valid until the next bucket is asked for; [] for a shard
        that is not wanted here. Closing the iterator early first finishes the collectives, so that no other
        rank waits for this one.
        """
        routes = [self._route(bucket) for bucket in buckets]
        sending = max((route.send_bytes for route in routes), default=0)
        gathering = max((self._layout.tp * route.cut_bytes for route in routes if route.gathers), default=0)
        slots = [(self._empty(sending), self._empty(gathering)) for _ in buckets[:2]]

        def start(number: int) -> Callable[[], list[list[Tensor]]] | None:
            if number == len(buckets):
                return None
            live = [tensor.detach() for tensor in live_of(number)] if routes[number].mine else []
            return self._start(routes[number], live, buckets[number].owner, *slots[number % 2])

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

    def _route(self, bucket: Bucket) -> Route:
        shards = bucket.shards
        offsets, position, cut_bytes = [0] * len(shards), 0, 0
        for index in sorted(range(len(shards)), key=lambda index: shards[index].parts == 1):
            offsets[index], position = position, position + shards[index].slot_bytes
            cut_bytes = position if shards[index].parts > 1 else cut_bytes
        return Route(
            shards=shards,
            mine=bucket.owner == self._layout.pp_rank,
            travels=self._layout.pp > 1 and (self._everywhere or bucket.owner != 0),
            wanted=self._everywhere or self._layout.pp_rank == 0,
            offsets=offsets,
            cut_bytes=cut_bytes,
            all_bytes=position,
        )

    def _start(
        self, route: Route, live: list[Tensor], owner: int, send: Tensor, received: Tensor
    ) -> Callable[[], list[list[Tensor]]]:
        """Launch the collectives of a bucket; the returned function waits and gives the parts of each shard."""
        send, received = send[: route.send_bytes], received[: self._layout.tp * route.cut_bytes if route.gathers else 0]
        mine, works = received.view(self._layout.tp, -1)[self._layout.tp_rank], []
        packed = send if route.travels else mine
        for shard, offset, tensor in zip(route.shards, route.offsets, live, strict=route.mine):
            if offset < packed.numel():
                _view(packed, offset, shard).copy_(tensor)
        if route.travels:
            source = dist.get_global_rank(self._groups.pp, owner)
            works = [dist.broadcast(send, source, group=self._groups.pp, async_op=True)]
        if route.gathers:
            for work in works:
                work.wait()
            if route.travels:
                mine.copy_(send[: route.cut_bytes])
            works = self._all_gather(received, mine)

        def parts_of(index: int) -> list[Tensor]:
            shard, offset = route.shards[index], route.offsets[index]
            if not route.wanted:
                return []
            if shard.parts > 1:
                return [_view(received, part * route.cut_bytes + offset, shard) for part in range(shard.parts)]
            return [live[index] if route.mine else _view(send, offset, shard)]

        def finish() -> list[list[Tensor]]:
            for work in works:
                work.wait()
            return [parts_of(index) for index in range(len(route.shards))]

        return finish

    def _all_gather(self, received: Tensor, mine: Tensor) -> list[dist.Work]:
        """Fill `received` [tp * n] in place, of which this rank has written its own part `mine` [n].

        On CPU each rank broadcasts its part: gloo moves 3.5 GB/s that way and 0.3 GB/s in its all-gather
        (two processes, loopback). The source's own part stays home when nobody else wants it."""
        group, tp = self._groups.tp, self._layout.tp
        if received.device.type != "cpu":
            return [all_gather(received, mine, group=group, async_op=True)]
        rows = received.view(tp, -1)
        senders = range(tp) if self._everywhere else range(1, tp)
        return [dist.broadcast(rows[r], dist.get_global_rank(group, r), group=group, async_op=True) for r in senders]

    def _empty(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self._device)


def _view(buffer: Tensor, offset: int, shard: Shard) -> Tensor:
    size = math.prod(shard.shape) * shard.dtype.itemsize
    return buffer[offset : offset + size].view(shard.dtype).view(shard.shape)
