"""Several Hugging Face matrices in one Megatron-Core matrix: gate and up, query, key and value."""

from __future__ import annotations

from dataclasses import dataclass

from bridge.ops.base import Block, Op, Run, Shape, to_blocks


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
