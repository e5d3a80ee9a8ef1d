"""Run a function on several gloo ranks, with a time-out that ends in the ranks' stacks, not in a hang."""

from __future__ import annotations

import faulthandler
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run_ranks(fn: Callable[..., Any], world: int, *args: Any, timeout: float = 120.0) -> list[Any]:
    """Call `fn(rank, world, *args)` in `world` fresh processes and return the results in rank order.

    `fn` must be a module-level function of an importable test module. The first failing rank's
    traceback is raised; ranks still running at the time-out print their stacks and are killed.
    """
    with tempfile.TemporaryDirectory() as folder:
        context = mp.get_context("spawn")
        ranks = [
            context.Process(target=_main, args=(fn, rank, world, folder, timeout, args), daemon=True)
            for rank in range(world)
        ]
        for process in ranks:
            process.start()
        deadline = time.monotonic() + timeout
        try:
            while any(process.is_alive() for process in ranks) and not list(Path(folder).glob("error*")):
                if time.monotonic() > deadline:
                    for process in ranks:
                        if process.is_alive():
                            os.kill(process.pid, signal.SIGUSR1)
                    time.sleep(1.0)
                    raise TimeoutError(f"{fn.__name__}: not finished on {world} ranks after {timeout} s")
                time.sleep(0.02)
            errors = sorted(Path(folder).glob("error*"))
            if errors:
                raise AssertionError(f"{fn.__name__} failed on {errors[0].name}:\n{errors[0].read_text()}")
            bad = [(i, p.exitcode) for i, p in enumerate(ranks) if p.exitcode != 0]
            assert not bad, f"{fn.__name__}: (rank, exit code) {bad}"
            return [torch.load(Path(folder) / f"result{rank}", weights_only=False) for rank in range(world)]
        finally:
            for process in ranks:
                if process.is_alive():
                    process.kill()
                process.join()


def _main(fn: Callable[..., Any], rank: int, world: int, folder: str, timeout: float, args: tuple) -> None:
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank), OMP_NUM_THREADS="1")
    try:
        store = dist.FileStore(f"{folder}/store", world)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=timeout))
        torch.save(fn(rank, world, *args), f"{folder}/result{rank}")
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        target = Path(folder) / f"error_rank{rank}"
        target.with_name(f".{target.name}").write_text(traceback.format_exc())
        target.with_name(f".{target.name}").rename(target)
        raise SystemExit(1) from None
