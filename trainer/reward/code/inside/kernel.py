"""The Linux calls that a room needs and Python 3.11 does not offer. All raise OSError with the call's name."""

from __future__ import annotations

import ctypes
import os

CLONE_NEWNS, CLONE_NEWCGROUP, CLONE_NEWUTS, CLONE_NEWIPC = 0x20000, 0x2000000, 0x4000000, 0x8000000  # linux/sched.h
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = (
    *(0x1, 0x2, 0x4, 0x8, 0x20),
    *(0x1000, 0x4000, 0x40000),
)  # linux/mount.h
MNT_DETACH = 2
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_CAPBSET_DROP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 4, 24, 36, 38
CAP_SYS_ADMIN = 21
LINUX_CAPABILITY_VERSION_3 = 0x20080522

_libc = ctypes.CDLL(None, use_errno=True)


def _call(name: str, *arguments: object) -> None:
    if _libc[name](*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}{arguments}: {os.strerror(number)}")


def unshare(flags: int) -> None:
    _call("unshare", ctypes.c_int(flags))


def mount(source: str, target: str, kind: str = "", flags: int = 0, data: str = "") -> None:
    _call(
        "mount", source.encode(), target.encode(), kind.encode() or None, ctypes.c_ulong(flags), data.encode() or None
    )


def pivot_root(new: str, old: str) -> None:
    _call("pivot_root", new.encode(), old.encode())


def detach(target: str) -> None:
    _call("umount2", target.encode(), ctypes.c_int(MNT_DETACH))


def set_hostname(name: str) -> None:
    _call("sethostname", name.encode(), ctypes.c_size_t(len(name)))


def prctl(option: int, value: int) -> None:
    _call("prctl", ctypes.c_int(option), *(ctypes.c_ulong(number) for number in (value, 0, 0, 0)))


def has_capability(number: int) -> bool:
    with open("/proc/self/status") as file:
        effective = next(line for line in file if line.startswith("CapEff:"))
    return bool(int(effective.split()[1], 16) >> number & 1)


def drop_capabilities() -> None:
    """All of them, also out of what an exec could give back."""
    for number in range(64):
        try:
            prctl(PR_CAPBSET_DROP, number)
        except OSError:  # EINVAL beyond the last one this kernel knows, EPERM where we have none to drop
            break
    header = (ctypes.c_uint32 * 2)(LINUX_CAPABILITY_VERSION_3, 0)
    _call("capset", header, (ctypes.c_uint32 * 6)())
