"""The driver of `assert` and `pytest` cases in a service that runs one program: tests and solution are two processes
there too. The service's own walls are all there is around them."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from typing import Any

from trainer.reward.code.inside import kernel
from trainer.reward.code.inside.check import judge

SOURCE = "solution.py"


def main(boot: str) -> None:
    """Read {"solution", "kind", "code", "nonce"} from stdin; the last line printed is the nonce and the verdict.

    `boot` is a program that makes our modules importable: the solution's process needs it too.
    """
    wanted: dict[str, Any] = json.loads(sys.stdin.read())
    with contextlib.suppress(OSError):
        kernel.prctl(kernel.PR_SET_DUMPABLE, 0)  # closes this process's memory to others of the same user
    with open(SOURCE, "w", encoding="utf-8", errors="surrogatepass") as file:
        file.write(wanted["solution"])
    calls, answers = os.pipe(), os.pipe()
    code = f"{boot}\nfrom trainer.reward.code.inside.serve import main\nmain({SOURCE!r}, {calls[0]}, {answers[1]})"
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        pass_fds=(calls[0], answers[1]),
    ) as solution:
        os.close(calls[0])
        os.close(answers[1])
        verdict = judge(wanted["kind"], wanted["code"], answers[0], calls[1])
        solution.kill()
    sys.stdout.write(f"\n{wanted['nonce']} {json.dumps(verdict)}\n")
    sys.stdout.flush()
    os._exit(0)
