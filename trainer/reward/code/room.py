"""One process tree in a room: how it is started, watched and ended."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Sequence
from enum import Enum
from typing import Any

from trainer.reward.code.isolation import Isolation
from trainer.reward.code.limits import Limits
from trainer.reward.code.tree import kill_descendants, usage

TICK_S = 0.02  # between two looks at memory and CPU time
END_S = 5.0  # what the kernel may take to clear a room away
START_S = 30.0  # until the program runs, on a busy machine
ROOMS_AT_A_TIME = 16  # of one process, at most: they are users of their own
_numbers = itertools.count()


class RoomBroken(Exception):
    """The room could not be made or does not obey: says nothing about the program."""


class Over(Enum):
    """The limit that ended a case."""

    TIME = "timeout"
    MEMORY = "memory_limit"
    OUTPUT = "output_limit"


def in_memory(content: bytes) -> int:
    """Descriptor of a file without a name, to be read from its start."""
    descriptor = os.memfd_create("case")
    with os.fdopen(os.dup(descriptor), "wb") as file:
        file.write(content)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


class Pipe:
    """The reading end of what a room writes; keeps at most `limit` bytes and notes when there was more."""

    def __init__(self, limit: int) -> None:
        self.reader, self.writer = os.pipe()
        os.set_blocking(self.reader, False)
        self.content, self.ended, self.too_much = bytearray(), False, False
        self._limit = limit

    def read(self) -> None:
        """Take what is there, without waiting."""
        while not self.ended and not self.too_much:
            try:
                part = os.read(self.reader, 1 << 16)
            except BlockingIOError:
                return
            self.ended = not part
            self.content += part
            if len(self.content) > self._limit:
                self.too_much = True
                del self.content[self._limit :]

    def close_writer(self) -> None:
        if self.writer >= 0:
            os.close(self.writer)
            self.writer = -1

    def close(self) -> None:
        self.close_writer()
        os.close(self.reader)


class Room:
    """A started room. Use it as a context manager: at its end nothing of it is left."""

    def __init__(
        self,
        isolation: Isolation,
        limits: Limits,
        command: list[str],
        *,
        files: dict[str, str] | None = None,
        stdin: int = subprocess.DEVNULL,
        pipes: Sequence[Pipe] = (),
        descriptors: Sequence[int] = (),
    ) -> None:
        """`pipes` become stdout and stderr, `descriptors` keep their numbers. RoomBroken when nothing starts."""
        self.limits, self.pipes = limits, tuple(pipes)
        self._status = Pipe(1 << 16)
        place = isolation.settings(limits.tmp_mb)
        self._work = place["work"] if isolation.kind == "rlimit" else None
        settings = {
            **place,
            "parent": os.getpid(),
            "number": os.getpid() * ROOMS_AT_A_TIME + next(_numbers) % ROOMS_AT_A_TIME,
            "argv": command,
            "files": files or {},
            "limits": limits.rlimits(isolation.kind != "rlimit"),
            "status": self._status.writer,
            "descriptors": list(descriptors),
        }
        self._watch_tasks = isolation.kind == "rlimit"
        self.process = self._start(isolation, settings, stdin)
        self._watched = os.pidfd_open(self.process.pid)

    def _start(self, isolation: Isolation, settings: dict[str, Any], stdin: int) -> subprocess.Popen:
        told = in_memory(json.dumps(settings).encode())
        outputs = [pipe.writer for pipe in self.pipes] or [subprocess.DEVNULL]
        try:
            return subprocess.Popen(
                isolation.launcher(told, self.limits.tmp_mb),
                stdin=stdin,
                stdout=outputs[0],
                stderr=outputs[-1],
                env=settings["environment"],
                pass_fds=(told, self._status.writer, *settings["descriptors"]),
                cwd="/",
            )
        except OSError as error:
            self._status.close()
            raise RoomBroken(str(error)) from error
        finally:
            os.close(told)
            self._status.close_writer()
            for pipe in self.pipes:
                pipe.close_writer()

    def wait_ready(self) -> None:
        """Until the program itself runs. RoomBroken with the reason when it never does."""
        deadline = time.monotonic() + START_S
        while not self._status.ended:
            select.select([self._status.reader], [], [], max(0.0, deadline - time.monotonic()))
            self._status.read()
            if time.monotonic() > deadline:
                break
        if self._status.content != b"ready":
            for pipe in self.pipes:
                pipe.read()
            told = bytes(self._status.content) or b"".join(bytes(pipe.content) for pipe in self.pipes)
            raise RoomBroken(told.decode("utf-8", "replace").strip() or "it ended before its program started")

    def is_running(self) -> bool:
        return self.process.poll() is None

    def over(self) -> Over | None:
        """The limit that the tree is over at this moment."""
        used = usage(self.process.pid)
        if used.memory > self.limits.memory_mb << 20 or (self._watch_tasks and used.tasks > self.limits.processes):
            return Over.MEMORY
        if used.cpu_s > self.limits.cpu_s:
            return Over.TIME
        return Over.OUTPUT if any(pipe.too_much for pipe in self.pipes) else None

    def __enter__(self) -> Room:
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Kill the whole tree and wait until it is gone."""
        try:
            deadline = time.monotonic() + END_S
            while self.is_running() and time.monotonic() < deadline:
                kill_descendants(self.process.pid)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.process.wait(0.05)
            self.process.kill()
            self.process.wait()
        finally:
            os.close(self._watched)
            for pipe in (self._status, *self.pipes):
                pipe.close()
            if self._work is not None:
                shutil.rmtree(self._work, ignore_errors=True)  # never follows links

    @property
    def ended(self) -> int:
        """Descriptor that is readable when the launcher has ended."""
        return self._watched


def watch(main: Room, others: Sequence[Room], deadline: float) -> Over | None:
    """Wait until the program of `main` ends, and read what all of them print. The limit that was hit, or None."""
    rooms = (main, *others)
    while True:
        pipes = [pipe for room in rooms for pipe in room.pipes if not (pipe.ended or pipe.too_much)]
        left = deadline - time.monotonic()
        select.select([main.ended, *(pipe.reader for pipe in pipes)], [], [], min(TICK_S, max(0.0, left)))
        running = main.is_running()  # before the reading: what it printed up to its end counts
        for pipe in pipes:
            pipe.read()
        over = next((over for room in rooms if (over := room.over()) is not None), None)
        if not running or over is not None:
            return over
        if left <= 0:
            return Over.TIME
