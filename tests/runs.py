"""Whole runs of `python3 -m trainer.main` on a tiny model, as a user would start them."""

from __future__ import annotations

import csv
import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

from tests.tiny import write_tiny_model, write_tiny_tokenizer

REPOSITORY = Path(__file__).resolve().parent.parent
# Columns that measure time or memory: they differ from run to run.
TIMED = re.compile(r"timing_|time/|perf/|(val-)?reward/\w+/(latency_\w+|queue_max)")

# Rewards how much of the answer is digits: a tiny random model moves on it at once.
DIGITS_REWARD = """
import time

def compute_score(data_source, solution_str, ground_truth, extra_info, pause=0.0):
    time.sleep(pause)
    share = sum(c.isdigit() for c in solution_str) / max(1, len(solution_str))
    return {"score": share, "acc": float(share > 0.5)}
"""


def write_inputs(folder: Path, kind: str = "qwen3", **changes: object) -> dict[str, Path]:
    """Model (with `changes` to its configuration) and tokenizer, 12 training and 4 validation rows, a reward."""
    model = write_tiny_model(folder / "model", kind, **changes)
    write_tiny_tokenizer(model)
    paths = {"model": model, "reward": folder / "digits.py"}
    paths["reward"].write_text(DIGITS_REWARD)
    for name, count in (("train", 12), ("val", 4)):
        rows = [{"id": i, "tag": "math_rule", "prompt": f"{name} {i}?", "ground_truth": str(i)} for i in range(count)]
        paths[name] = folder / f"{name}.jsonl"
        paths[name].write_text("".join(json.dumps(row) + "\n" for row in rows))
    return paths


def overrides(inputs: dict[str, Path], run_dir: Path, engine: str, *more: str) -> list[str]:
    dtype = {
        "fsdp": ["actor_rollout_ref.actor.fsdp_config.dtype=float32"],
        "megatron": ["actor_rollout_ref.actor.megatron.dtype=float32"],
    }[engine]
    return [
        f"model_engine={engine}",
        f"actor_rollout_ref.model.path={inputs['model']}",
        f"data.train_files={inputs['train']}",
        f"data.val_files={inputs['val']}",
        "data.train_batch_size=4",
        "data.max_prompt_length=32",
        "data.max_response_length=8",
        "actor_rollout_ref.rollout.name=hf",
        "actor_rollout_ref.rollout.n=4",
        "actor_rollout_ref.rollout.dtype=float32",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
        "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes=1",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4",
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=4",
        "actor_rollout_ref.actor.optim.lr=1e-3",
        f"reward.custom_reward_function.path={inputs['reward']}",
        "reward.num_workers=1",
        "algorithm.adv_estimator=grpo",
        "trainer.device=cpu",
        "trainer.n_gpus_per_node=1",
        "trainer.total_training_steps=6",
        "trainer.save_freq=2",
        "trainer.test_freq=3",
        "actor_rollout_ref.actor.checkpoint.save_contents=[model,optimizer,extra,hf_model]",
        f"trainer.default_local_dir={run_dir}",
        *dtype,
        *more,
    ]


class Run:
    """One started run. All its processes, Ray's too, carry RUN_ID in their environment."""

    def __init__(self, arguments: list[str]) -> None:
        self.id = uuid.uuid4().hex
        self.process = subprocess.Popen(
            [sys.executable, "-m", "trainer.main", *arguments],
            cwd=REPOSITORY,
            env={**os.environ, "RUN_ID": self.id, "RAY_DEDUP_LOGS": "0"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def wait(self, timeout: float = 240) -> tuple[int, str]:
        """(exit status, everything it printed)."""
        try:
            output, _ = self.process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            self.process.kill()
            output, _ = self.process.communicate()
            raise AssertionError(f"the run did not end within {timeout} s:\n{output}") from None
        return self.process.returncode, output

    def processes(self) -> dict[int, str]:
        """pid -> command line of every live process of this run."""
        found = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    if f"RUN_ID={self.id}".encode() in (entry / "environ").read_bytes():
                        found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                except OSError:
                    continue  # it ended while we looked
        return found

    def wait_until_gone(self, timeout: float = 40, but: str | None = None) -> None:
        """All processes of the run have ended, except those whose command line matches `but`."""
        deadline = time.monotonic() + timeout
        while alive := {pid: name for pid, name in self.processes().items() if not (but and re.search(but, name))}:
            assert time.monotonic() < deadline, f"still alive after {timeout} s: {alive}"
            time.sleep(0.2)

    def wait_for_step(self, run_dir: Path, step: int, timeout: float = 180) -> None:
        deadline = time.monotonic() + timeout
        while not any(int(row["training/global_step"]) >= step for row in metrics(run_dir)):
            assert self.process.poll() is None, f"the run ended early:\n{self.process.communicate()[0]}"
            assert time.monotonic() < deadline, f"step {step} not reached within {timeout} s"
            time.sleep(0.02)

    def kill(self, pid: int) -> None:
        os.kill(pid, signal.SIGKILL)


def metrics(run_dir: Path) -> list[dict[str, str]]:
    path = run_dir / "metrics.csv"
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def untimed(rows: list[dict[str, str]]) -> list[dict[str, str]]:
    """Rows without the columns that measure time or memory, and whatever the order of the columns."""
    return [{name: value for name, value in row.items() if not TIMED.match(name)} for row in rows]
