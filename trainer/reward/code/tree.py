"""A process and all that descend from it, read from /proc."""

from __future__ import annotations

import contextlib
import os
import signal
from dataclasses import dataclass
from pathlib import Path

TICKS = os.sysconf("SC_CLK_TCK")
PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Usage:
    """What a tree uses: memory in bytes, CPU time in seconds, processes and threads."""

    memory: int = 0
    cpu_s: float = 0.0
    tasks: int = 0


def descendants(pid: int) -> list[int]:
    """Children, their children and so on; a process that ends while we look is left out."""
    found, open_ends = [], [pid]
    while open_ends:
        parent = open_ends.pop()
        with contextlib.suppress(OSError):
            for thread in os.listdir(f"/proc/{parent}/task"):
                with contextlib.suppress(OSError):
                    children = [int(c) for c in Path(f"/proc/{parent}/task/{thread}/children").read_text().split()]
                    found += children
                    open_ends += children
    return found


def usage(pid: int) -> Usage:
    """The sum over the descendants of `pid`; memory that several of them share counts once."""
    memory, ticks, tasks = 0, 0, 0
    files: dict[tuple[int, int], int] = {}
    for member in descendants(pid):
        with contextlib.suppress(OSError, IndexError):
            stat = Path(f"/proc/{member}/stat").read_text().rpartition(")")[2].split()
            ticks += sum(map(int, stat[11:15]))  # user, system, and those of children that ended
            tasks += int(stat[17])
            memory += _resident(member)
            files |= _files_in_memory(member)
    return Usage(memory + sum(files.values()), ticks / TICKS, tasks)


def _resident(pid: int) -> int:
    """Bytes in memory, with a share of what others map too. A process may hide the shares, then all of it counts."""
    try:
        with open(f"/proc/{pid}/smaps_rollup") as file:
            return next(int(line.split()[1]) << 10 for line in file if line.startswith("Pss:"))
    except OSError:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE


def _files_in_memory(pid: int) -> dict[tuple[int, int], int]:
    """Bytes per open file that has no name on any disk: such a file need not be mapped to fill memory."""
    found = {}
    for name in os.listdir(f"/proc/{pid}/fd"):
        path = f"/proc/{pid}/fd/{name}"
        with contextlib.suppress(OSError):
            if os.readlink(path).startswith("/memfd:"):
                stat = os.stat(path)
                found[stat.st_dev, stat.st_ino] = stat.st_blocks * 512
    return found


def kill_descendants(pid: int) -> None:
    """SIGKILL, until nobody is left who could have forked meanwhile."""
    for _ in range(1000):
        members = [member for member in descendants(pid) if not _is_zombie(member)]
        if not members:
            return
        for member in members:
            with contextlib.suppress(ProcessLookupError):
                os.kill(member, signal.SIGKILL)


def _is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True
