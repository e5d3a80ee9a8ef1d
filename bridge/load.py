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
    """Write every live tensor exactly once. ValueError naming all that hold NaN afterwards."""
    start, before, rounding, spoilt = time.perf_counter(), checkpoint.bytes_read, Rounding(), []
    unwritten = set(live)
    for unit in sorted(units, key=lambda unit: checkpoint.place(next(iter(unit.hf)))):
        for placed in unit.placed:
            unwritten.remove(placed.live.name)
            if not write(placed, list(unit.hf), live[placed.live.name], checkpoint, part, rounding):
                spoilt.append(f"{placed.live.name}: holds NaN")
    assert not unwritten, f"in no unit of this stage: {sorted(unwritten)}"
    raise_all(
        spoilt,
        f"weights loaded from {checkpoint.directory} are not numbers",
        "finite weights in the file",
        "use another checkpoint",
    )
    return LoadReport(checkpoint.bytes_read - before, time.perf_counter() - start, rounding.largest)


class Rounding:
    """The largest difference between a value of the file and the same value in a narrower live dtype."""

    def __init__(self) -> None:
        self.largest: tuple[str, float] | None = None

    def note(self, name: str, source: Tensor, target: Tensor) -> None:
        if source.dtype.itemsize > target.dtype.itemsize:
            difference = float((source - target.to(source.device, source.dtype)).abs().max())
            if self.largest is None or difference > self.largest[1]:
                self.largest = (name, difference)


def write(placed: Placed, hf: list[str], live: Tensor, checkpoint: HfCheckpoint, part: int, rounding: Rounding) -> bool:
    """Copy the blocks of one live tensor in, casting to its dtype; False if it holds NaN afterwards.

    It is filled with NaN first: a part that no block writes cannot keep an old value.
    """
    filled = 0
    live.fill_(float("nan"))
    for block in placed.blocks(part):
        rows = slice(block.hf_start, block.hf_start + block.length)
        source, target = checkpoint.read(hf[block.source], (*[slice(None)] * block.dim, rows)), block.of_live(live)
        target.copy_(source)
        filled = block.live_start + block.length
        rounding.note(hf[block.source], source, target)
    if placed.op.pads:
        live[filled:].zero_()  # rows of the vocabulary padding
    return not has_nan(live)


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
