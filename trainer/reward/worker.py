"""One scoring process: `python -m trainer.reward.worker FD PARENT_PID`.

Started as a plain program, not through multiprocessing, so that it never imports the caller's main
module (and with it torch). Jobs come over the connection FD; each is answered by a RewardResult or by
the text of a traceback.
"""

from __future__ import annotations

import asyncio
import ctypes
import importlib
import inspect
import os
import signal
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from trainer.reward.result import RewardResult

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main(descriptor: int, parent: int) -> None:
    """Build the scorer named by the first message, say so, then answer jobs until the parent hangs up."""
    die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    connection = Connection(descriptor)
    module, name, arguments = connection.recv()
    scorer = getattr(importlib.import_module(module), name)(**arguments)
    connection.send("ready")
    with asyncio.Runner() as runner:
        while True:
            try:
                job = connection.recv()
            except EOFError:
                return
            connection.send(runner.run(answer(scorer, job)))


async def answer(scorer: Callable[..., Any], job: tuple[Any, ...]) -> RewardResult | str:
    """The scorer's result; whatever it raises comes back as text, for the parent to decide about."""

    async def call() -> RewardResult:
        result = scorer(*job)
        return await result if inspect.isawaitable(result) else result

    [outcome] = await asyncio.gather(call(), return_exceptions=True)
    if isinstance(outcome, BaseException):
        return "".join(traceback.format_exception(outcome))
    return outcome


def die_with(parent: int) -> None:
    """Be killed when the parent goes, however it goes and whatever this process is busy with."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it went before the line above
        os._exit(1)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
