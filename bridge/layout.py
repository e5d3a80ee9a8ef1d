"""Where a rank stands in the parallel layout, and the process groups that go with it."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist


@dataclass(frozen=True)
class Layout:
    """Sizes and this rank's coordinates: tensor (tp), pipeline (pp, vpp chunks a stage), expert (ep) and
    expert-tensor (etp) parallelism. Data and context parallel ranks hold copies and do not matter here."""

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

    @property
    def is_source(self) -> bool:
        """The one rank of a model copy that hands out full tensors."""
        return self.tp_rank == 0 and self.pp_rank == 0


@dataclass(frozen=True)
class Groups:
    """Process groups of the axes above; None where the axis has size 1."""

    tp: dist.ProcessGroup | None = None
    pp: dist.ProcessGroup | None = None
    ep: dist.ProcessGroup | None = None
    etp: dist.ProcessGroup | None = None

    def check(self, layout: Layout) -> None:
        """ValueError if a group is missing or has another size than the layout says."""
        for axis, group in vars(self).items():
            got, want = (1 if group is None else group.size()), vars(layout)[axis]
            if got != want:
                raise ValueError(
                    f"got a {axis} process group of {got} ranks; expected {want} as in the layout; "
                    f"hand Groups({axis}=...) the group that Megatron-Core built"
                )
