"""The experts of a mixture-of-experts layer, spread over expert-parallel ranks."""

from __future__ import annotations

from dataclasses import dataclass

from bridge.ops.base import Block, Op, Run, Shape


@dataclass(frozen=True)
class PerExpert(Op):
    """Local expert j of *every* expert-parallel rank, seen as one tensor in `ep` x `etp` parts.

    Rank p holds the contiguous block of experts p * E/ep .. (p+1) * E/ep - 1, so part (p, t) is expert
    p * E/ep + j, cut for expert-tensor rank t as `op` says. Sources are those of expert j of rank 0, then of
    rank 1, and so on: one collective brings single experts together, never a whole stacked layer.
    """

    op: Op | None = None
    ep: int = 1
    axis = "expert"

    @classmethod
    def of(cls, op: Op, ep: int) -> PerExpert:
        return cls(dim=op.dim, op=op, ep=ep)

    def runs(self, hf: list[Shape]) -> list[Run]:
        return self.op.runs(self._one(hf))

    def full_shape(self, hf: list[Shape]) -> Shape:
        """Of one expert."""
        return self.op.full_shape(self._one(hf))

    def parts_of(self, live: Shape, hf: list[Shape], parts: int) -> int | None:
        etp = parts // self.ep
        return parts if self.op.parts_of(live, self._one(hf), etp) == etp else None

    def split_for(self, live: Shape, hf: list[Shape], parts: int, part: int) -> list[Block]:
        etp, one = parts // self.ep, self._one(hf)
        rank, piece = divmod(part, etp)
        blocks = self.op.split_for(live, one, etp, piece)
        return [block._replace(source=rank * len(one) + block.source) for block in blocks]

    def _one(self, hf: list[Shape]) -> list[Shape]:
        return hf[: len(hf) // self.ep]
