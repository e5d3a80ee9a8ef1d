"""Which isolation this host allows, tried out before the first answer is scored."""

from __future__ import annotations

import logging
import os
import shutil
import socket
import tempfile
from pathlib import Path

from trainer.reward.code.cases import CaseOutcome, CaseState, run_case
from trainer.reward.code.isolation import Isolation
from trainer.reward.code.limits import Limits
from trainer.reward.code.room import RoomBroken

logger = logging.getLogger(__name__)

KEY = "reward.code_sandbox.isolation"
HONEST = "print(int(input()) + 1)"
PRYING = """
import socket
found = []
try:
    open({path!r}).close()
    found.append("read a file of the host")
except OSError:
    pass
try:
    socket.create_connection(("127.0.0.1", {port}), 2)
    found.append("reached a port of the host")
except OSError:
    pass
print(", ".join(found) or "nothing")
"""
MISSING = {
    "bwrap": "apt-get install bubblewrap",
    "unshare": "run as root with CAP_SYS_ADMIN, or allow user namespaces (sysctl user.max_user_namespaces)",
}


def choose(wanted: str, limits: Limits) -> Isolation:
    """The isolation to use: `auto` takes bubblewrap or namespaces, whichever works. ValueError when none does.

    Limits without namespaces (rlimit) are only used when named: a program then sees the host's files and network.
    """
    if not Path(f"/proc/self/task/{os.getpid()}/children").exists():
        raise ValueError(
            f"got {KEY}={wanted} on a system without /proc/PID/task/TID/children; expected Linux with "
            "CONFIG_PROC_CHILDREN; set reward.sandbox_fusion.url to a service elsewhere"
        )
    if wanted == "rlimit":
        logger.warning("%s=rlimit: programs of the model can read this host's files and use its network", KEY)
    kinds = ("bwrap", "unshare") if wanted == "auto" else (wanted,)
    troubles = {}
    for kind in kinds:
        trouble = find_trouble(kind, limits)
        if trouble is None:
            return Isolation(kind)
        troubles[kind] = trouble
    told = "; ".join(f"{kind}: {trouble}" for kind, trouble in troubles.items())
    remedies = " or ".join(MISSING[kind] for kind in kinds if kind in MISSING)
    raise ValueError(
        f"got {KEY}={wanted}, which does not work here ({told}); expected a sandbox that runs an honest program and "
        f"hides the host; {remedies or 'see the message'}, or name {KEY}=rlimit if the host is a sandbox itself"
    )


def find_trouble(kind: str, limits: Limits) -> str | None:
    """Why rooms of this kind cannot be used, or None: an honest program must run, a prying one must find nothing."""
    if kind == "bwrap" and shutil.which("bwrap") is None:
        return "no command bwrap"
    isolation = Isolation(kind)
    try:
        honest = _outcome(isolation, limits, HONEST, "41", "42")
        if honest.state is not CaseState.PASSED:
            return f"an honest program ended with {honest.state.value}: {honest.detail}"
        if kind == "rlimit":
            return None
        with tempfile.NamedTemporaryFile() as file, socket.create_server(("127.0.0.1", 0)) as server:
            os.chmod(file.name, 0o644)
            prying = PRYING.format(path=file.name, port=server.getsockname()[1])
            found = _outcome(isolation, limits, prying, "", "nothing")
    except RoomBroken as error:
        return str(error)
    return None if found.state is CaseState.PASSED else "a program could reach the host's files or network"


def _outcome(isolation: Isolation, limits: Limits, source: str, stdin: str, expected: str) -> CaseOutcome:
    case = {"stdin": stdin, "expected_stdout": expected}
    return run_case(isolation, limits, source, "stdin", case, limits.wall_s)
