"""How a stream of tensors becomes buckets, and buckets tensors again. Knows nothing of media and peers."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from engines.transport.base import ALIGN, Record


@dataclass
class Bucket:
    """The first `used` bytes of `flat` and the tensors in them, aligned to ALIGN bytes."""

    flat: Tensor
    records: list[Record]
    used: int


@dataclass
class Totals:
    tensors: int = 0
    nbytes: int = 0


def aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN


def pack(
    stream: Iterable[tuple[str, Tensor]],
    next_buffer: Callable[[], Tensor],
    capacity: int,
    flush_bytes: int,
    totals: Totals,
) -> Iterator[Bucket]:
    """Fill flat uint8 buffers of `capacity` bytes (a multiple of ALIGN) with tensors; yield each when it holds
    `flush_bytes` or the next tensor does not fit. A tensor larger than a buffer is cut. `totals` counts along."""
    bucket: Bucket | None = None
    for name, tensor in stream:
        tensor = tensor.detach()
        nbytes, begin = tensor.numel() * tensor.element_size(), 0
        totals.tensors += 1
        totals.nbytes += nbytes
        while begin < nbytes or begin == nbytes == 0:
            size = min(nbytes - begin, capacity)
            if bucket is not None and bucket.used + size > capacity:
                yield bucket
                bucket = None
            if bucket is None:
                bucket = Bucket(next_buffer(), [], 0)
            start = begin // tensor.element_size()
            record = Record(name, tuple(tensor.shape), tensor.dtype, bucket.used, size, start)
            _write(bucket.flat[bucket.used : bucket.used + size], tensor, record)
            bucket.records.append(record)
            bucket.used = aligned(bucket.used + size)
            begin += max(size, 1)
            if bucket.used >= min(flush_bytes, capacity):
                yield bucket
                bucket = None
    if bucket is not None:
        yield bucket


def _write(place: Tensor, tensor: Tensor, record: Record) -> None:
    if record.is_whole:  # also a strided tensor goes in with one copy
        place.view(tensor.dtype).view(tensor.shape).copy_(tensor)
        return
    flat = tensor.contiguous().view(-1)
    count = record.nbytes // tensor.element_size()
    place.view(tensor.dtype).copy_(flat[record.start : record.start + count])


class Unpacker:
    """Turns the buckets of one update into tensors. One that came in pieces is put together in memory of its own,
    the others are views of the bucket. `last` is the latest name, for errors."""

    def __init__(self) -> None:
        self.totals = Totals()
        self.last = "none yet"
        self._whole: Tensor | None = None

    def read(self, flat: Tensor, records: list[Record]) -> Iterator[tuple[str, Tensor]]:
        for record in records:
            self.last = record.name
            self.totals.nbytes += record.nbytes
            piece = flat[record.offset : record.offset + record.nbytes].view(record.dtype)
            if record.is_whole:
                self.totals.tensors += 1
                yield record.name, piece.view(record.shape)
                continue
            if record.start == 0:
                self._whole = torch.empty(record.shape, dtype=record.dtype, device=flat.device)
            self._whole.view(-1)[record.start : record.start + piece.numel()] = piece
            if record.start + piece.numel() == self._whole.numel():
                self.totals.tensors += 1
                yield record.name, self._whole
                self._whole = None


def checksum(flat: Tensor) -> int:
    """CRC-32 of a flat uint8 tensor; one on a device is copied to the host for it."""
    return zlib.crc32(flat.cpu().numpy())
