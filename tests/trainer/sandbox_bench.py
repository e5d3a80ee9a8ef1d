"""Rows, rooms and bystanders for the tests of the code sandbox."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from trainer.prompts.row import Message, Row
from trainer.reward.code.tree import descendants

SHORT = {
    **{"cpu_s": 1.0, "wall_s": 2.5, "row_s": 20.0, "memory_mb": 200, "processes": 24},
    **{"file_mb": 4, "tmp_mb": 8, "output_kb": 64},
}
SAMPLES = Path(__file__).parents[3] / "shared" / "data" / "code_10.jsonl"


PROBES = {
    "unshare": ["unshare", "--user", "--map-root-user", "--mount", "--pid", "--fork", "--net", "--mount-proc", "true"],
    "bwrap": ["bwrap", "--unshare-pid", "--unshare-net", "--ro-bind", "/", "/", "--proc", "/proc", "true"],
    "rlimit": ["true"],
}


def needs(kind: str) -> None:
    """Skip, with the reason, where the host cannot isolate this way: asked of the host's own tools, not of our code."""
    probe = PROBES[kind]
    if shutil.which(probe[0]) is None:
        pytest.skip(f"no command {probe[0]}")
    done = subprocess.run(probe, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode != 0:
        pytest.skip(f"no isolation by {kind} here: {done.stderr.strip()}")


def code_row(case_type: str, *cases: dict[str, str]) -> Row:
    return Row("1", "KodCode", "code_sandbox", (Message("user", "?"),), case_type=case_type, cases=cases)


def sample_rows() -> list[tuple[Row, str]]:
    """(row, reference program) of the sample file."""
    if not SAMPLES.exists():
        pytest.skip(f"no sample file {SAMPLES}")
    found = []
    for line in SAMPLES.read_text().splitlines():
        raw = json.loads(line)
        cases = json.loads(raw["test_cases"]) if isinstance(raw["test_cases"], str) else raw["test_cases"]
        kind = {"input": "stdin"}.get(raw["case_type"], raw["case_type"])
        found.append((code_row(kind, *cases), json.loads(raw["ground_truth"])[0]))
    return found


def fenced(code: str) -> str:
    return f"Here it is.\n```python\n{code}\n```"


@dataclass
class Host:
    """What a program of the host should not be able to reach, as replacements for `@NAME@` in an attack."""

    folder: Path
    places: dict[str, str]

    def fill(self, text: str) -> str:
        for name, value in self.places.items():
            text = text.replace(f"@{name}@", value)
        return text

    def port_is_free(self) -> bool:
        with socket.socket() as probe:
            probe.settimeout(1)
            return probe.connect_ex(("127.0.0.1", int(self.places["FREE_PORT"]))) != 0

    def is_untouched(self) -> bool:
        return [path.name for path in (self.folder / "victim").iterdir()] == ["kept"]


@contextlib.contextmanager
def open_host() -> Iterator[Host]:
    """A host with secrets in a file and in the environment, and servers that would tell the right answers."""
    folder = Path(tempfile.mkdtemp(prefix="host-"))
    os.chmod(folder, 0o777)
    (folder / "victim").mkdir(mode=0o777)
    os.chmod(folder / "victim", 0o777)
    (folder / "victim" / "kept").write_text("kept")
    (folder / "answers.jsonl").write_text("square(3) == 9\nsquare(-5) == 25\n")
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, folder)
        tcp = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        unix, abstract = stack.enter_context(socket.socket(socket.AF_UNIX)), f"friend-{os.getpid()}"
        unix.bind(str(folder / "friend"))
        os.chmod(folder / "friend", 0o777)
        hidden = stack.enter_context(socket.socket(socket.AF_UNIX))
        hidden.bind(f"\0{abstract}")
        for server in (tcp, unix, hidden):
            server.listen()
            threading.Thread(target=_tell_answers, args=(server,), daemon=True).start()
        with socket.create_server(("127.0.0.1", 0)) as probe:
            free = probe.getsockname()[1]
        os.environ.update(ANSWER_TO_3="9", ANSWER_TO_5="25")
        stack.callback(lambda: [os.environ.pop(name) for name in ("ANSWER_TO_3", "ANSWER_TO_5")])
        places = {
            "SECRET_FILE": str(folder / "answers.jsonl"),
            "VICTIM": str(folder / "victim"),
            "TCP_PORT": str(tcp.getsockname()[1]),
            "FREE_PORT": str(free),
            "UNIX_SOCKET": str(folder / "friend"),
            "ABSTRACT": abstract,
        }
        yield Host(folder, places)


def _tell_answers(server: socket.socket) -> None:
    with contextlib.suppress(OSError, ValueError):
        while True:
            with server.accept()[0] as caller:
                caller.sendall(str(int(caller.recv(100)) ** 2).encode())


def left_behind(before: set[str], seconds: float = 15.0) -> list[str]:
    """What is there now, was not before, and does not go: processes below this one or of a room's user, files of rooms.
    Rooms of other tests come and go meanwhile."""
    deadline, left = time.monotonic() + seconds, traces() - before
    while left and time.monotonic() < deadline:
        time.sleep(0.02)
        left &= traces()
    return sorted(left)


def traces() -> set[str]:
    found = {f"child {pid}" for pid in descendants(os.getpid())}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and entry.stat().st_uid >= 1 << 30:
                found.add(f"process {entry.name}")
    for path in (*Path(tempfile.gettempdir()).iterdir(), *Path("/dev/shm").iterdir()):
        with contextlib.suppress(OSError):
            if path.name.startswith("room-") or path.lstat().st_uid >= 1 << 30:
                found.add(str(path))
    return found
