"""The way into a room: namespaces, limits, no rights left, then the room's program.

`python launch.py FD` reads its settings (JSON) from FD, a file in memory. Processes of a namespaced room:
this one, which waits outside; the room's first process, which reaps what others leave; the main program.
When the main program ends the first process ends, and with it the kernel kills whatever still runs.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import signal
import sys
from typing import Any

from trainer.reward.code.inside import kernel
from trainer.reward.code.inside.mounts import build_root, limit_files

NAMESPACES = (
    *(kernel.CLONE_NEWNS, kernel.CLONE_NEWPID, kernel.CLONE_NEWNET, kernel.CLONE_NEWIPC),
    *(kernel.CLONE_NEWUTS, kernel.CLONE_NEWCGROUP),
)


def main(descriptor: int) -> None:
    """Never returns. Faults go as text to the settings' `status` descriptor; "ready" is written when all is set."""
    with os.fdopen(descriptor, encoding="utf-8") as file:
        settings = json.load(file)
    status = settings["status"]
    try:
        code = _enter(settings, status)
    except (OSError, ValueError) as error:
        os.write(status, str(error).encode())
        code = 1
    os._exit(code)


def _enter(settings: dict[str, Any], status: int) -> int:
    """Fork into the room; the exit code of its main program, 128 + n after signal n."""
    isolation = settings["isolation"]
    if isolation != "bwrap":  # whose parent is in another world; it is killed with it
        _die_with(settings["parent"])
    uid = _own_uid(settings["number"])
    if isolation == "unshare":
        if not kernel.has_capability(kernel.CAP_SYS_ADMIN):
            _new_user(uid)
        kernel.unshare(sum(NAMESPACES))
    elif isolation == "rlimit":
        kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)  # strays of the room become our children, not init's
    lifeline, held = os.pipe()
    first = os.fork()
    if first:
        _close([lifeline, status, *settings["descriptors"]])
        return _reap_until(first)
    os.close(held)
    if isolation == "unshare":
        build_root(settings, uid)
    elif isolation == "bwrap":
        limit_files(settings)
    os.chdir(settings["work"])
    for name, content in settings["files"].items():
        with open(name, "w", encoding="utf-8", errors="surrogatepass") as file:
            file.write(content)
        os.chmod(name, 0o644)
    if isolation != "rlimit":
        _leave_rights(uid)
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    if select.select([lifeline], [], [], 0)[0]:  # the parent went before the line above
        os._exit(1)
    os.close(lifeline)
    if isolation == "rlimit":
        _become_main(settings, status)
    main_program = os.fork()
    if not main_program:
        _become_main(settings, status)
    _close([status, *settings["descriptors"]])
    return _reap_until(main_program)


def _close(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _die_with(parent: int) -> None:
    """Be killed when the scoring process goes, however it goes."""
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it went before the line above
        os._exit(1)


def _reap_until(wanted: int) -> int:
    """Wait for children until `wanted` ends."""
    while True:
        pid, status = os.wait()
        if pid == wanted:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


def _become_main(settings: dict[str, Any], status: int) -> None:
    os.setsid()
    for name, value in settings["limits"].items():
        number = vars(resource)[name]
        hard = resource.getrlimit(number)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(number, (value, value))
    keep = {0, 1, 2, status, *settings["descriptors"]}
    _close([descriptor for descriptor in _open_descriptors() if descriptor not in keep])
    os.set_inheritable(status, False)
    os.write(status, b"ready")
    os.execve(settings["argv"][0], settings["argv"], settings["environment"])


def _open_descriptors() -> list[int]:
    found = [int(name) for name in os.listdir("/proc/self/fd")]
    return [descriptor for descriptor in found if os.path.exists(f"/proc/self/fd/{descriptor}")]  # less the listing's


def _own_uid(number: int) -> int:
    """A user id that no other room has now: limits on processes count per user. For root only; others keep theirs."""
    if os.geteuid() != 0:
        return os.geteuid()
    with open("/proc/self/uid_map") as file:
        first, _, count = map(int, file.read().split()[:3])
    base, span = (1 << 30, 1 << 26) if first + count > 1 << 31 else (first + count // 2, max(1, count // 2))
    return base + number % span


def _leave_rights(uid: int) -> None:
    """From here on: an unprivileged user without capabilities, who cannot make user namespaces to get some."""
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
        kernel.prctl(kernel.PR_SET_DUMPABLE, 1)  # else /proc/self belongs to root and the maps cannot be written
    _new_user(uid)
    # bubblewrap hides the file: more namespaces stay possible there, without rights here
    with contextlib.suppress(OSError), open("/proc/sys/user/max_user_namespaces", "w") as file:
        file.write("0")
    kernel.drop_capabilities()


def _new_user(uid: int) -> None:
    gid = os.getegid()
    kernel.unshare(kernel.CLONE_NEWUSER)
    for name, content in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(content)


if __name__ == "__main__":
    main(int(sys.argv[1]))
