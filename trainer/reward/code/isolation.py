"""Which walls a room has: bubblewrap, namespaces of our own making, or limits only."""

from __future__ import annotations

import os
import sys
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

INSIDE = Path(__file__).resolve().parent / "inside"
ROOM = "/room"
PACKAGES = ("trainer", "trainer.reward", "trainer.reward.code")
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache", "/etc/alternatives")
ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "LANG": "C.UTF-8",
    **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
    "MALLOC_ARENA_MAX": "1",  # threads share a heap: each heap of its own would reserve 64 MiB of address space
    "PYTHONHASHSEED": "0",  # the order inside sets, and with it a score, is the same every time
}
FILES_PER_MB = 64  # a million empty files would fill the kernel's memory, not the temporary folder


@dataclass(frozen=True)
class Isolation:
    """A way to start rooms; `kind` is bwrap, unshare or rlimit."""

    kind: str

    def program(self, module: str, *arguments: object) -> list[str]:
        """Command line, as seen from inside a room, of one of our modules."""
        return _python(str(INSIDE.parent) if self.kind == "rlimit" else ROOM, module, *arguments)

    def launcher(self, descriptor: int, tmp_mb: int) -> list[str]:
        """Command line that the trainer starts; `descriptor` holds the launcher's settings."""
        if self.kind == "bwrap":
            return [*_bubblewrap(tmp_mb << 20), *_python(ROOM, "launch", descriptor)]
        return _python(str(INSIDE.parent), "launch", descriptor)

    def settings(self, tmp_mb: int) -> dict[str, Any]:
        """The part of the launcher's settings that says where a room is and what it shows."""
        work = tempfile.mkdtemp(prefix="room-") if self.kind == "rlimit" else "/tmp"
        read_only, links = _visible()
        return {
            "isolation": self.kind,
            "work": work,
            "environment": {**ENVIRONMENT, "HOME": work},
            "read_only": read_only,
            "links": links,
            "tmp_bytes": tmp_mb << 20,
            "tmp_files": max(1024, tmp_mb * FILES_PER_MB),
        }


def library_folders() -> list[str]:
    """Where installed packages are; their .pth files are not obeyed."""
    return [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages") and Path(path).is_dir()]


def _python(folder: str, module: str, *arguments: object) -> list[str]:
    """Run `inside/<module>.py` as part of its packages, without running those (they are not in the room)."""
    code = "\n".join(
        (
            "import sys",
            f"sys.path += {library_folders()!r}",
            f"for name in {PACKAGES!r}:",
            "    sys.modules[name] = type(sys)(name)",
            "    sys.modules[name].__path__ = []",
            f"sys.modules[{PACKAGES[-1]!r}].__path__ += [{folder!r}]",
            f"from {PACKAGES[-1]}.inside.{module} import main",
            f"main({', '.join(map(repr, arguments))})",
        )
    )
    return [os.path.realpath(sys.executable), "-S", "-s", "-P", "-c", code]


@cache
def _visible() -> tuple[dict[str, str], dict[str, str]]:
    """({place in the room: place outside}, {place: what the link there says}): interpreter and libraries only."""
    read_only, links = {f"{ROOM}/inside": str(INSIDE)}, {}
    for place in (*SYSTEM, sys.base_prefix, *map(os.path.realpath, library_folders()), *library_folders()):
        if os.path.islink(place) and place in SYSTEM:
            links[place] = os.readlink(place)
        elif os.path.exists(place) and not any(Path(place).is_relative_to(seen) for seen in read_only):
            read_only[place] = place
    return read_only, links


def _bubblewrap(tmp_bytes: int) -> list[str]:
    read_only, links = _visible()
    command = ["bwrap", "--die-with-parent", "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts"]
    command += ["--unshare-cgroup-try"] + ([] if os.geteuid() == 0 else ["--unshare-user"])
    # The temporary folder first: a checkout under /tmp is shown inside it.
    command += ["--perms", "1777", "--size", str(tmp_bytes), "--tmpfs", "/tmp"]
    for folder in sorted({str(parent) for place in read_only for parent in Path(place).parents} - {"/", "/tmp"}):
        command += ["--perms", "0755", "--dir", folder]
    for place, source in read_only.items():
        command += ["--ro-bind", source, place]
    for place, target in links.items():
        command += ["--symlink", target, place]
    command += ["--proc", "/proc", "--dev", "/dev", "--hostname", "room"]
    command += ["--perms", "1777", "--size", str(tmp_bytes), "--tmpfs", "/dev/shm"]
    return [*command, "--remount-ro", "/", "--chdir", "/tmp", "--"]
