"""Where a rank stands in the parallel layout, and the process groups that go with it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch.distributed as dist


@dataclass(frozen=True)
class Layout:
    """Sizes and this rank's coordinates: tensor (tp), pipeline (pp, vpp chunks a stage), expert (ep) and
    expert-tensor (etp) parallelism. Ranks beyond these axes (data, context parallel) hold copies."""

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    ep: int = 1
    etp: int = 1
    tp_rank: int = 0
    pp_rank: int = 0
    ep_rank: int = 0
    etp_rank: int = 0

    def __post_init__(self) -> None:
        for axis in ("tp", "pp", "ep", "etp"):
            size, rank = vars(self)[axis], vars(self)[f"{axis}_rank"]
            if not 0 <= rank < size:
                raise ValueError(f"got {axis}_rank={rank}; expected 0 <= rank < {axis}={size}; fix the layout")

        self.position  # noqa: B018  raises if the coordinates contradict each other

    @property
    def axes(self) -> dict[str, int]:
        """Number of ranks a tensor may be cut over: dense tensors over tp, experts over ep x etp."""
        return {"tp": self.tp, "expert": self.ep * self.etp}

    def part(self, axis: str) -> int:
        """This rank's number on an axis; experts count etp fastest, as Megatron-Core's groups do."""
        return self.tp_rank if axis == "tp" else self.ep_rank * self.etp + self.etp_rank

    @property
    def stage_ranks(self) -> int:
        """Ranks of a stage that hold one copy of the model together."""
        return math.lcm(*self.axes.values())

    @property
    def position(self) -> int:
        """This rank's number among them: consecutive ranks share a tp group, and an expert group."""
        for position in range(self.stage_ranks):
            if all(position % size == self.part(axis) for axis, size in self.axes.items()):
                return position
        raise ValueError(
            f"got tp_rank={self.tp_rank} of {self.tp} on a rank with expert number {self.part('expert')} of "
            f"{self.axes['expert']}; expected both to count the same ranks of a stage; fix the layout"
        )

    @classmethod
    def at(cls, position: int, stage: int = 0, **sizes: int) -> Layout:
        """The layout of one rank of a copy, by its number in its stage."""
        tp, ep, etp = (sizes.get(axis, 1) for axis in ("tp", "ep", "etp"))
        expert = position % (ep * etp)
        ranks = {"tp_rank": position % tp, "ep_rank": expert // etp, "etp_rank": expert % etp, "pp_rank": stage}
        return cls(**sizes, **ranks)

    @property
    def is_source(self) -> bool:
        """The one rank of a model copy that hands out full tensors."""
        return self.pp_rank == 0 and self.position == 0

    def receivers(self, axis: str) -> list[int]:
        """Which ranks of this rank's group on `axis` want tensors whole: the source, where it is one of them."""
        return [0] if self.position == self.part(axis) else []


@dataclass(frozen=True)
class Groups:
    """Process groups of the axes above, `expert` being ep x etp; None where there is one rank."""

    tp: dist.ProcessGroup | None = None
    pp: dist.ProcessGroup | None = None
    expert: dist.ProcessGroup | None = None

    def check(self, layout: Layout) -> None:
        """ValueError if a group is missing, or its size or this rank's place in it is not as the layout says."""
        wanted = {
            "tp": (layout.tp, layout.tp_rank),
            "pp": (layout.pp, layout.pp_rank),
            "expert": (layout.axes["expert"], layout.part("expert")),
        }
        for axis, (size, rank) in wanted.items():
            group = vars(self)[axis]
            got = (1, 0) if group is None else (group.size(), group.rank())
            if got != (size, rank):
                raise ValueError(
                    f"got a {axis} process group of {got[0]} ranks with this one at {got[1]}; expected {size} and "
                    f"{rank} as in the layout; hand Groups({axis}=...) the group that Megatron-Core built"
                )
