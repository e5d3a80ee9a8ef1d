"""What validation says over time: the best step of each tag, and whether the run begins to overfit."""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.checkpoint import PREFIX

ALL = "all"


class ValidationHistory:
    """Keeps `best.json` in the run folder: tag (and `all`) -> step, val_correct and checkpoint.

    The checkpoint is a folder name beside the file, null where none of that step was kept. The first of equal
    steps counts as the best; a value that is not a number never does.

    With `patience` checks, one warning per run: val_correct/all/mean fell in each of the last `patience` checks
    while the training score rose over them. Everything it knows is in `state_dict`, for the checkpoint.
    """

    def __init__(self, run_dir: Path, patience: int | None = None) -> None:
        self._run_dir, self._patience = run_dir, patience
        self._best: dict[str, dict[str, float]] = {}
        self._checks: list[list[float | None]] = []  # the last `patience` + 1: accuracy, training score
        self._warned = False

    def update(self, step: int, metrics: Mapping[str, float], reward_mean: float | None) -> list[str]:
        """Note the validation metrics of a step; returns warnings. `reward_mean` is the mean training score since
        the validation before, None when there was no training step."""
        for name, value in metrics.items():
            if name.startswith("val_correct/") and name.endswith("/mean") and not math.isnan(value):
                tag = name.removeprefix("val_correct/").removesuffix("/mean")
                if tag not in self._best or value > self._best[tag]["val_correct"]:
                    self._best[tag] = {"step": step, "val_correct": value}
        self.write()
        if self._patience is None:
            return []
        self._checks.append([metrics[f"val_correct/{ALL}/mean"], reward_mean])
        del self._checks[: -self._patience - 1]
        if self._warned or not self._overfits():
            return []
        self._warned = True
        (first, _), (last, reward) = self._checks[0], self._checks[-1]
        return [
            f"step {step}: val_correct/all/mean fell in {self._patience} checks in a row, {first:.3f} -> {last:.3f}, "
            f"while the training score rose to {reward:.3f}; raise actor_rollout_ref.rollout.n or the KL coefficient, "
            f"or go back to step {self._best[ALL]['step']}, the best one (best.json)"
        ]

    def _overfits(self) -> bool:
        if len(self._checks) <= self._patience:
            return False
        accuracies = [accuracy for accuracy, _ in self._checks]
        rewards = [reward for _, reward in self._checks if reward is not None]
        falls = all(after < before for before, after in itertools.pairwise(accuracies))
        return falls and len(rewards) > 1 and rewards[-1] > rewards[0]

    def write(self) -> None:
        """Rewrite best.json; called again after a checkpoint was saved, since old ones go and new ones come."""
        table = {}
        for tag, best in sorted(self._best.items()):
            name = f"{PREFIX}{best['step']}"
            table[tag] = best | {"checkpoint": name if (self._run_dir / name).is_dir() else None}
        self._run_dir.mkdir(parents=True, exist_ok=True)
        partial = self._run_dir / ".best.json.partial"
        partial.write_text(json.dumps(table, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        os.replace(partial, self._run_dir / "best.json")

    def state_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {"best": self._best, "checks": self._checks, "warned": self._warned}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._best = dict(state["best"])
        self._checks = list(state["checks"])[-(self._patience or 0) - 1 :]
        self._warned = state["warned"]
        self.write()
