"""Import: each rank reads the bytes of its own shard straight into its live tensors."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from bridge.mapping import TIED_HEAD, Placed, Unit, raise_all
from bridge.safetensors_io import HfCheckpoint

COMPARE_ROWS = 4096  # rows of a tied head compared at a time


@dataclass(frozen=True)
class LoadReport:
    """Bytes read by this rank, seconds, and the largest rounding (name, absolute difference) where the file
    is wider than the live tensor; None if nothing was narrowed."""

    bytes_read: int
    seconds: float
    rounding: tuple[str, float] | None


def load_units(units: list[Unit], live: Mapping[str, Tensor], checkpoint: HfCheckpoint, part: int) -> LoadReport:
    """Write every live tensor exactly once. Each is NaN before, none may be after: a part that no block
    wrote cannot keep an old value. One tensor at a time, while it is in the processor's cache."""
    start, before, roundings = time.perf_counter(), checkpoint.bytes_read, []
    unwritten, spoilt = set(live), []
    for unit in sorted(units, key=lambda unit: checkpoint.place(next(iter(unit.hf)))):
        for placed in unit.placed:
            name, target = placed.live.name, live[placed.live.name]
            unwritten.remove(name)
            target.fill_(float("nan"))
            roundings += write(placed, list(unit.hf), target, checkpoint, part)
            if has_nan(target):
                spoilt.append(f"{name}: holds NaN")
    assert not unwritten, f"in no unit of this stage: {sorted(unwritten)}"
    raise_all(
        spoilt,
        f"weights loaded from {checkpoint.directory} are not numbers",
        "finite weights in the file",
        "use another checkpoint",
    )
    rounding = max(roundings, key=lambda pair: pair[1], default=None)
    return LoadReport(checkpoint.bytes_read - before, time.perf_counter() - start, rounding)


def write(placed: Placed, hf: list[str], live: Tensor, checkpoint: HfCheckpoint, part: int) -> list[tuple[str, float]]:
    """Copy the blocks of one live tensor in, casting to its dtype; returns the roundings."""
    roundings, filled = [], 0
    for block in placed.blocks(part):
        rows = slice(block.hf_start, block.hf_start + block.length)
        source = checkpoint.read(hf[block.source], (*[slice(None)] * block.dim, rows))
        target = block.of_live(live)
        target.copy_(source)
        filled = max(filled, block.live_start + block.length)
        if source.dtype.itemsize > live.dtype.itemsize:
            difference = (source - target.to(source.device, source.dtype)).abs().max()
            roundings.append((hf[block.source], float(difference)))
    if placed.op.pads:
        live[filled:].zero_()  # rows of the vocabulary padding
    return roundings


def check_tied_head(checkpoint: HfCheckpoint, embedding: str) -> None:
    """A tied model's file may repeat the embedding as a head; a head of its own cannot be represented."""
    if TIED_HEAD not in checkpoint.names():
        return
    head, table = checkpoint.read(TIED_HEAD), checkpoint.read(embedding)
    same = head.shape == table.shape and all(
        torch.equal(head[row : row + COMPARE_ROWS], table[row : row + COMPARE_ROWS])
        for row in range(0, len(table), COMPARE_ROWS)
    )
    if not same:
        raise ValueError(
            f"got {TIED_HEAD} different from {embedding} in {checkpoint.directory}, with tie_word_embeddings=true; "
            "expected equal tensors; set tie_word_embeddings to false in config.json if the head is its own"
        )


def has_nan(tensor: Tensor) -> bool:
    """NaN survives a sum, which is 15 times as fast as `isnan` on CPU; a NaN sum may also be inf - inf."""
    return bool(tensor.sum().isnan()) and bool(tensor.isnan().any())
