"""Run a function in a process of its own: a vLLM engine takes its process over (group, threads, memory binding)."""

from __future__ import annotations

import faulthandler
import importlib.util
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

# The mark of every test that starts vLLM.
needs_vllm = (
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="the package vllm is not installed"),
)


def run(fn: Callable[..., Any], *args: Any, timeout: float = 240.0) -> Any:
    """`fn(*args)` in a fresh process. `fn` is a module-level function of an importable test module.

    AssertionError with the child's traceback, or with its stacks when it is not done after `timeout` seconds; its
    process group, vLLM's workers included, is gone afterwards.
    """
    with tempfile.TemporaryDirectory() as folder:
        child = multiprocessing.get_context("spawn").Process(target=_main, args=(fn, folder, args))
        child.start()
        try:
            child.join(timeout)
            if child.is_alive():
                os.kill(child.pid, signal.SIGUSR1)
                time.sleep(1.0)
                raise AssertionError(f"{fn.__name__}: not done after {timeout} s:\n{_read(folder, 'stacks')}")
            if (Path(folder) / "error").exists():
                raise AssertionError(f"{fn.__name__} failed:\n{_read(folder, 'error')}")
            assert child.exitcode == 0, f"{fn.__name__} ended with status {child.exitcode}"
            return torch.load(Path(folder) / "result", weights_only=False)
        finally:
            _end_group(child)


def _main(fn: Callable[..., Any], folder: str, args: tuple) -> None:
    os.setsid()  # whatever it starts can be found by its group
    stacks = open(Path(folder) / "stacks", "w")  # noqa: SIM115
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    torch.set_num_threads(1)
    try:
        torch.save(fn(*args), Path(folder) / "result")
    except BaseException:
        (Path(folder) / "error").write_text(traceback.format_exc())
        raise SystemExit(1) from None


def _read(folder: str, name: str) -> str:
    path = Path(folder) / name
    return path.read_text() if path.exists() else "nothing was written"


def _end_group(child: multiprocessing.Process) -> None:
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except ProcessLookupError:
        if child.is_alive():
            child.kill()  # it never came to lead a group
    child.join()
