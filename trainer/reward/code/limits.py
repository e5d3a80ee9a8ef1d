"""How much one case may use."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """cpu_s, wall_s per case and row_s per row in seconds; memory_mb of all processes of a case together;
    `processes` counts threads too; output_kb is what may be printed, or four times what is expected."""

    cpu_s: float = 8.0
    wall_s: float = 10.0
    row_s: float = 60.0
    memory_mb: int = 512
    processes: int = 64
    file_mb: int = 16
    tmp_mb: int = 64
    open_files: int = 64
    output_kb: int = 1024

    def rlimits(self, isolated: bool) -> dict[str, int]:
        """For setrlimit in each process; the sums over processes are watched from outside. Outside a user
        namespace the number of processes would count those of the whole user."""
        found = {
            "RLIMIT_CPU": math.ceil(self.cpu_s),
            "RLIMIT_AS": self.memory_mb << 20,
            "RLIMIT_FSIZE": self.file_mb << 20,
            "RLIMIT_NOFILE": self.open_files,
            "RLIMIT_CORE": 0,
            "RLIMIT_MEMLOCK": 0,
            "RLIMIT_MSGQUEUE": 0,
        }
        return found | ({"RLIMIT_NPROC": self.processes} if isolated else {})

    def output_bytes(self, expected: str) -> int:
        return max(self.output_kb << 10, 4 * len(expected.encode("utf-8", "surrogatepass")))
