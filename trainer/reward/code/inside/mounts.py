"""The file system of a room: a small one in memory with the interpreter and the libraries, read-only."""

from __future__ import annotations

import contextlib
import os
from typing import Any

from trainer.reward.code.inside import kernel

DEVICES = ("null", "zero", "full", "random", "urandom")
STAGE = "/tmp"  # only a place to stand on: what is mounted here is seen by this process alone
# statvfs flag -> mount flag: a remount must keep what the outer world has locked (statvfs(3), mount(2))
KEPT = {0x8: kernel.MS_NOEXEC, 0x400: 0x400, 0x800: 0x800, 0x1000: 0x200000}  # noexec, noatime, nodiratime, relatime


def build_root(settings: dict[str, Any], uid: int) -> None:
    """Mount the room and make it the root. `read_only` maps places in the room to places outside."""
    kernel.mount("", "/", flags=kernel.MS_REC | kernel.MS_PRIVATE)
    sources = {place: os.open(source, os.O_PATH) for place, source in settings["read_only"].items()}
    devices = {name: os.open(f"/dev/{name}", os.O_PATH) for name in DEVICES}
    flags = kernel.MS_NOSUID | kernel.MS_NODEV
    kernel.mount("tmpfs", STAGE, "tmpfs", flags, "size=1m,mode=0755")
    for place in ("proc", "tmp"):
        os.makedirs(f"{STAGE}/{place}")
    # The temporary folder before the libraries: a checkout under /tmp is shown inside it.
    size = f"size={settings['tmp_bytes']},nr_inodes={settings['tmp_files']},mode=0700,uid={uid},gid={_gid(uid)}"
    kernel.mount("tmpfs", f"{STAGE}/tmp", "tmpfs", flags, size)
    for place, source in sources.items():
        _bind(source, STAGE + place)
    for place, target in settings["links"].items():
        os.makedirs(os.path.dirname(STAGE + place), exist_ok=True)
        os.symlink(target, STAGE + place)
    for name, source in devices.items():
        _bind(source, f"{STAGE}/dev/{name}", extra=kernel.MS_NOEXEC, device=True)
    os.symlink("/proc/self/fd", f"{STAGE}/dev/fd")
    os.symlink("/tmp", f"{STAGE}/dev/shm")
    kernel.mount("proc", f"{STAGE}/proc", "proc", flags | kernel.MS_NOEXEC)
    os.chdir(STAGE)
    kernel.pivot_root(".", ".")
    kernel.detach(".")
    os.chdir("/")
    kernel.mount("", "/", flags=kernel.MS_REMOUNT | kernel.MS_BIND | kernel.MS_RDONLY | flags)
    kernel.set_hostname("room")
    for descriptor in (*sources.values(), *devices.values()):
        os.close(descriptor)


def limit_files(settings: dict[str, Any]) -> None:
    """Bubblewrap limits the bytes of its temporary folder, not the number of files; only root can add that."""
    with contextlib.suppress(OSError):
        size = f"size={settings['tmp_bytes']},nr_inodes={settings['tmp_files']}"
        flags = kernel.MS_REMOUNT | kernel.MS_NOSUID | kernel.MS_NODEV
        kernel.mount("", "/tmp", flags=flags, data=size)


def _gid(uid: int) -> int:
    return uid if os.geteuid() == 0 else os.getegid()


def _bind(source: int, place: str, extra: int = 0, device: bool = False) -> None:
    """Show a file or folder read-only at another place, with everything mounted below it."""
    outside = f"/proc/self/fd/{source}"
    if os.path.isdir(outside):
        os.makedirs(place, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(place), exist_ok=True)
        os.close(os.open(place, os.O_CREAT | os.O_RDONLY, 0o644))
    kernel.mount(outside, place, flags=kernel.MS_BIND | kernel.MS_REC)
    for mounted in _mounts_below(place):
        kept = sum(flag for bit, flag in KEPT.items() if os.statvfs(mounted).f_flag & bit)
        flags = kernel.MS_REMOUNT | kernel.MS_BIND | kernel.MS_NOSUID | kept | extra
        kernel.mount("", mounted, flags=flags | (0 if device else kernel.MS_RDONLY | kernel.MS_NODEV))


def _mounts_below(place: str) -> list[str]:
    """`place` and every mount inside it."""
    with open("/proc/self/mountinfo", "rb") as file:  # blanks are written as \040
        escaped = [line.split()[4].decode("unicode_escape") for line in file]
    points = [os.fsdecode(point.encode("latin-1")) for point in escaped]
    return [point for point in points if point == place or point.startswith(f"{place}/")]
