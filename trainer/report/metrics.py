"""Where a step's numbers go: metrics.csv, TensorBoard, JSON lines, and the reward curve.

Reductions happen before this file: a `Metric` knows its own (engines/metric.py). Here every value is a
plain float, one row per training step; step 0 is the validation before training.
"""

from __future__ import annotations

import csv
import json
import math
import os
from pathlib import Path

# First columns of metrics.csv, in data-flow order; all others follow in order of first appearance.
LEADING_COLUMNS = (
    "training/global_step",
    "training/epoch",
    "val_correct/all/mean",
    "reward/mean",
    "train/loss",
    "actor/grad_norm",
    "actor/entropy",
    "training/rollout_probs_diff_mean",
    "response_length/mean",
    "timing_s/step",
)

# Names other tools know a number by, logged beside the original.
ALIASES = {
    "time/step_total": "timing_s/step",
    "time/step_generate": "timing_s/gen",
    "time/step_train": "timing_s/update_actor",
    "time/step_model_update": "timing_s/update_weights",
    "time/val_step": "timing_s/testing",
    "train/loss": "actor/loss",
    "train/lr": "actor/lr",
    "reward/mean": "critic/score/mean",
    "critic/kl": "actor/reward_kl_penalty",
    "critic/kl_coef": "actor/reward_kl_penalty_coeff",
}

LOGGERS = ("console", "csv", "file", "jsonl", "tensorboard")


def with_aliases(row: dict[str, float]) -> dict[str, float]:
    return row | {alias: row[name] for alias, name in ALIASES.items() if name in row}


class CsvLog:
    """One row per step. A column that appears later is added at the end by rewriting the (small) file, so
    every row always has the same columns. A resumed run keeps the rows up to `resume_step`."""

    def __init__(self, path: Path, resume_step: int) -> None:
        self.path = path
        self._columns: list[str] = list(LEADING_COLUMNS)
        self._rows: list[dict[str, str]] = []
        if path.exists() and resume_step > 0:
            with path.open(newline="") as file:
                reader = csv.DictReader(file)
                self._columns = list(reader.fieldnames or [])
                self._rows = [row for row in reader if int(row["training/global_step"]) <= resume_step]
            self._rewrite()

    def write(self, row: dict[str, float]) -> None:
        new = [name for name in row if name not in self._columns]
        text = {name: _format(value) for name, value in row.items()}
        self._rows.append(text)
        if new or not self.path.exists():
            self._columns += new
            self._rewrite()
            return
        with self.path.open("a", newline="") as file:
            csv.DictWriter(file, self._columns, restval="").writerow(text)

    def _rewrite(self) -> None:
        partial = self.path.with_suffix(".csv.partial")
        with partial.open("w", newline="") as file:
            writer = csv.DictWriter(file, self._columns, restval="")
            writer.writeheader()
            writer.writerows(self._rows)
        os.replace(partial, self.path)

    @property
    def steps(self) -> set[int]:
        return {int(row["training/global_step"]) for row in self._rows}

    def column(self, name: str) -> list[tuple[int, float]]:
        """(step, value) pairs of the rows that have it."""
        return [(int(row["training/global_step"]), float(row[name])) for row in self._rows if row.get(name)]


class MetricLog:
    """All sinks of one run. `metrics.csv` is always written; `loggers` names the others."""

    def __init__(self, run_dir: Path, loggers: tuple[str, ...], resume_step: int) -> None:
        self.run_dir = run_dir
        self.csv = CsvLog(run_dir / "metrics.csv", resume_step)
        self._jsonl = run_dir / "metrics.jsonl" if {"jsonl", "file"} & set(loggers) else None
        if self._jsonl is not None and self._jsonl.exists():
            lines = self._jsonl.read_text().splitlines(keepends=True)
            kept = [line for line in lines if json.loads(line)["training/global_step"] <= resume_step]
            self._jsonl.write_text("".join(kept))
        self._board = None
        if "tensorboard" in loggers:
            from torch.utils.tensorboard import SummaryWriter  # only this logger needs the package

            self._board = SummaryWriter(str(run_dir / "tensorboard"), purge_step=resume_step + 1)

    def write(self, row: dict[str, float]) -> dict[str, float]:
        row = with_aliases(row)
        step = int(row["training/global_step"])
        self.csv.write(row)
        if self._jsonl is not None:
            with self._jsonl.open("a") as file:
                finite = {name: value if math.isfinite(value) else None for name, value in row.items()}
                file.write(json.dumps(finite) + "\n")
        if self._board is not None:
            for name, value in row.items():
                self._board.add_scalar(name, value, step)
            self._board.flush()
        return row

    def plot(self) -> Path:
        """reward_curve.png: training reward per step and validation accuracy, from the CSV."""
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot

        figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
        for name, label, style in (
            ("reward/mean", "training reward (mean of the step's samples)", {"marker": ".", "alpha": 0.8}),
            ("val_correct/all/mean", "validation accuracy (greedy)", {"marker": "o", "linewidth": 2}),
        ):
            points = self.csv.column(name)
            if points:
                axes.plot(*zip(*points, strict=True), label=label, **style)
        axes.set_xlabel("training step")
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend()
        path = self.run_dir / "reward_curve.png"
        figure.savefig(path, dpi=120)
        pyplot.close(figure)
        return path

    def close(self) -> None:
        if self._board is not None:
            self._board.close()


def _format(value: float) -> str:
    if isinstance(value, float) and math.isfinite(value) and value == int(value) and abs(value) < 1e15:
        return str(int(value))
    return repr(float(value)) if isinstance(value, float) else str(value)
