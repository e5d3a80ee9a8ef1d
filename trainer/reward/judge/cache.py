"""Verdicts already given, kept in a file that several runs may write at the same time."""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
from pathlib import Path

logger = logging.getLogger(__name__)

FILE = "llm_judge.jsonl"


def cache_key(*parts: str | float) -> str:
    """Hash of everything that a verdict depends on."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


class VerdictCache:
    """key -> verdict, in memory and, with a folder, as lines of `llm_judge.jsonl` in it.

    A line is appended in one write under a lock, so writers never mix; what others add during a run is seen by the
    next one. A line cut by a crash is skipped.
    """

    def __init__(self, folder: str | None) -> None:
        self._verdicts: dict[str, bool] = {}
        self._file: int | None = None
        if folder is None:
            return
        path = Path(folder).expanduser() / FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        lines = path.read_bytes().split(b"\n")
        if lines[-1]:
            self._append(b"\n")  # the next line must not continue a cut one
        unread = sum(not self._read(line) for line in lines if line)
        if unread:
            logger.warning("%s: %d of %d lines could not be read and are ignored", path, unread, len(lines))

    def get(self, key: str) -> bool | None:
        return self._verdicts.get(key)

    def put(self, key: str, verdict: bool) -> None:
        self._verdicts[key] = verdict
        if self._file is not None:
            self._append(json.dumps({"key": key, "verdict": verdict}).encode() + b"\n")

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _read(self, line: bytes) -> bool:
        try:
            record = json.loads(line)
            key, verdict = record["key"], record["verdict"]
        except (ValueError, KeyError, TypeError):
            return False
        if not isinstance(key, str) or not isinstance(verdict, bool):
            return False
        self._verdicts[key] = verdict
        return True

    def _append(self, line: bytes) -> None:
        assert self._file is not None, "the cache has no file"
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            os.write(self._file, line)
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)
