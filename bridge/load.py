"""Import: each rank reads the bytes of its own shard straight into its live tensors."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from bridge.layout import Layout
from bridge.plan import Placed, Unit
from bridge.problems import raise_all
from bridge.source_check import Readable

CHUNK_BYTES = 1 << 20  # copied, then looked at while still in the cache


@dataclass(frozen=True)
class LoadReport:
    """Bytes read by this rank, seconds, the largest rounding (name, absolute difference) where the file is wider
    than the live tensor (None: nothing was narrowed), and how many tensors of the file were left out, by reason."""

    bytes_read: int
    seconds: float
    rounding: tuple[str, float] | None
    left_out: dict[str, int] = field(default_factory=dict)


def load_units(
    units: list[Unit],
    live: Mapping[str, Tensor],
    source: Readable,
    layout: Layout,
    left_out: dict[str, int],
    where: str,
) -> LoadReport:
    """Write every element of every live tensor exactly once. ValueError naming all that hold NaN afterwards."""
    start, before, writer = time.perf_counter(), source.bytes_read, Writer(source)
    unwritten = set(live)
    for unit in sorted(units, key=lambda unit: source.place(next(iter(unit.hf)))):
        names = list(unit.hf)
        for placed in unit.placed:
            unwritten.remove(placed.live.name)
            writer.write(placed, names, live[placed.live.name], layout.part(placed.op.axis))
    assert not unwritten, f"in no unit of this stage: {sorted(unwritten)}"
    raise_all(
        [f"{name}: holds NaN" for name in writer.spoilt],
        f"weights loaded from {where} are not numbers",
        "finite weights in the file",
        "use another checkpoint",
    )
    return LoadReport(source.bytes_read - before, time.perf_counter() - start, writer.rounding, left_out)


class Writer:
    """Copies blocks in, and notes what a reader of the file should know."""

    def __init__(self, source: Readable) -> None:
        self._source = source
        self.spoilt: list[str] = []
        self.rounding: tuple[str, float] | None = None

    def write(self, placed: Placed, hf: list[str], live: Tensor, part: int) -> None:
        """All blocks of one live tensor, cast to its dtype. That blocks neither overlap nor leave a gap is proven
        in the plan; here their sizes must add up."""
        rows, healthy = 0, True
        for block in placed.blocks(part):
            piece = (*[slice(None)] * block.dim, slice(block.hf_start, block.hf_start + block.length))
            values, target = self._source.read(hf[block.source], piece), block.of_live(live)
            healthy &= copy_checked(values, target)
            self._note_rounding(hf[block.source], values, target)
            rows += block.length
        if placed.op.pads:
            live[rows:].zero_()  # rows of the vocabulary padding
        else:
            assert rows == live.shape[placed.op.dim or 0], f"{placed.live.name}: {rows} rows of {list(live.shape)}"
        if not healthy:
            self.spoilt.append(placed.live.name)

    def _note_rounding(self, name: str, values: Tensor, target: Tensor) -> None:
        if values.dtype.itemsize > target.dtype.itemsize:
            difference = float((values - target.to(values.device, values.dtype)).abs().max())
            if self.rounding is None or difference > self.rounding[1]:
                self.rounding = (name, difference)


def copy_checked(values: Tensor, target: Tensor) -> bool:
    """target <- values, piece by piece; False if the result holds NaN."""
    rows = max(1, CHUNK_BYTES // max(1, target[0].numel() * target.element_size()))
    healthy = True
    for start in range(0, len(target), rows):
        piece = target[start : start + rows]
        piece.copy_(values[start : start + rows])
        healthy &= not has_nan(piece)
    return healthy


def has_nan(tensor: Tensor) -> bool:
    """NaN survives a sum, which is 15 times as fast as `isnan` on CPU; a NaN sum may also be inf - inf."""
    return bool(tensor.sum().isnan()) and bool(tensor.isnan().any())
