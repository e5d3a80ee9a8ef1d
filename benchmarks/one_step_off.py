"""How much one-step-off saves: the same run synchronously and one batch ahead, on 1 training and 1 rollout process.

    python3 -m benchmarks.one_step_off [--steps 12] [--epochs 1] [key=value …]

Both modes place the two processes apart with one thread each, so only the overlap differs. With generation and training
of equal length the step could at best fall by half; `--epochs` (passes over a batch) balances them.
"""

from __future__ import annotations

import argparse
import csv
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
MODES = {
    "synchronous": ("actor_rollout_ref.hybrid_engine=False",),
    "one-step-off": (
        "trainer.v1.trainer_mode=separate_async",
        "trainer.v1.separate_async.num_warmup_batches=1",
        "trainer.v1.separate_async.parameter_sync_step=1",
    ),
}


def overrides(work: Path, run_dir: Path, steps: int, epochs: int) -> list[str]:
    return [
        "model_engine=fsdp",
        f"actor_rollout_ref.model.path={work}/model",
        f"data.train_files={work}/data/train.jsonl",
        f"data.val_files={work}/data/val.jsonl",
        "data.train_batch_size=8",
        "data.max_prompt_length=64",
        "data.max_response_length=96",
        "actor_rollout_ref.actor.fsdp_config.dtype=float32",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        "actor_rollout_ref.actor.use_dynamic_bsz=True",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=2048",
        f"actor_rollout_ref.actor.ppo_epochs={epochs}",
        "actor_rollout_ref.rollout.name=hf",
        "actor_rollout_ref.rollout.n=8",
        "actor_rollout_ref.rollout.ignore_eos=True",
        "actor_rollout_ref.rollout.dtype=float32",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
        "actor_rollout_ref.rollout.nnodes=1",
        "actor_rollout_ref.rollout.n_gpus_per_node=1",
        "actor_rollout_ref.rollout.checkpoint_engine.backend=nccl",
        "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes=16",
        "reward.custom_reward_function.path=recipes/digit_share.py",
        "reward.num_workers=1",
        "algorithm.adv_estimator=grpo",
        "trainer.device=cpu",
        "trainer.n_gpus_per_node=1",
        f"trainer.total_training_steps={steps}",
        "trainer.val_before_train=False",
        f"trainer.default_local_dir={run_dir}",
        "trainer.resume_mode=disable",
        "trainer.env.OMP_NUM_THREADS=1",
    ]


def measure(arguments: list[str], run_dir: Path) -> dict[str, float]:
    """Medians over the steps after the first two (the pipeline fills, allocators warm up)."""
    subprocess.run([sys.executable, "-m", "trainer.main", *arguments], cwd=REPOSITORY, check=True, stdout=sys.stderr)
    with (run_dir / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))[2:]
    names = ("step", "gen", "old_log_prob", "update_actor", "update_weights", "wait_rollout")
    found = {
        name: statistics.median(float(row[f"timing_s/{name}"]) for row in rows)
        for name in names
        if rows[0].get(f"timing_s/{name}")
    }
    return found | {"staleness": max(float(row["training/staleness/max"]) for row in rows)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--epochs", type=int, default=1)
    options, more = parser.parse_known_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        sizes = ("hidden_size=256", "intermediate_size=512", "num_hidden_layers=4", "head_dim=32", "vocab_size=2048")
        make = [sys.executable, "-m", "scripts.make_tiny", "--family", "qwen3", "--out", f"{work}/model", *sizes]
        subprocess.run(make, cwd=REPOSITORY, check=True, stdout=sys.stderr)
        data = [sys.executable, "-m", "scripts.make_addition_data", f"{work}/data"]
        subprocess.run(data, cwd=REPOSITORY, check=True, stdout=sys.stderr)
        results = {}
        for mode, switches in MODES.items():
            run_dir = work / mode
            arguments = [*overrides(work, run_dir, options.steps, options.epochs), *switches, *more]
            results[mode] = measure(arguments, run_dir)
            print(f"{mode:>14}  " + "  ".join(f"{name} {value:.3f}" for name, value in results[mode].items()))
        saved = 1 - results["one-step-off"]["step"] / results["synchronous"]["step"]
        print(f"step time falls by {saved:.0%}")


if __name__ == "__main__":
    main()
