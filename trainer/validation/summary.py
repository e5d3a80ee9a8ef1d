"""Validation numbers from scored samples, per tag. Pure: order and number of ranks change nothing.

Accuracy is read from `acc`, never from the training score. N is the number of samples per prompt;
best, worst and maj are bootstrap estimates: 1000 draws of n samples with replacement per prompt.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

logger = logging.getLogger(__name__)

DRAWS, SEED = 1000, 42


@dataclass(frozen=True)
class ValRecord:
    """One scored answer. `uid` names the prompt (the same at every step), `index` the sample of it;
    `length` is in response tokens, `finish_reason` is stop, length or abort."""

    uid: str
    tag: str
    id: str
    index: int
    prompt: str
    answer: str
    pred: str | None
    gold: str | None
    acc: float | None
    score: float
    reason: str
    length: int
    finish_reason: str
    failed: bool = False


def summarise(records: Sequence[ValRecord]) -> dict[str, float]:
    """All metrics by name.

    `val_correct/<tag>/mean` is the share of samples with acc >= 1, `val_correct/all/mean` the same over
    all samples. `val-core/<tag>/acc/` has mean@N, best@n/mean and maj@n/mean for n = 2, 4, 8, ... and N;
    `val-aux/<tag>/` has std@N, worst@n/mean, pass@n, response_length/mean, clip_ratio and failed.
    Failed samples and those without accuracy are left out; a tag with none left is NaN.
    """
    tags: dict[str, list[ValRecord]] = {}
    for record in sorted(records, key=lambda r: (r.tag, r.uid, r.index)):
        tags.setdefault(record.tag, []).append(record)
    metrics: dict[str, float] = {}
    for tag, of_tag in tags.items():
        metrics[f"val_correct/{tag}/mean"] = _share_right(of_tag)
        metrics |= _of_tag(tag, of_tag)
        if not any(_counts(record) for record in of_tag):
            logger.warning("validation tag %s: none of %d samples has an accuracy", tag, len(of_tag))
    metrics["val_correct/all/mean"] = _share_right(records)
    return metrics


def _counts(record: ValRecord) -> bool:
    return not record.failed and record.acc is not None


def _share_right(records: Iterable[ValRecord]) -> float:
    right = [record.acc >= 1 for record in records if _counts(record)]
    return sum(right) / len(right) if right else math.nan


def _of_tag(tag: str, records: list[ValRecord]) -> dict[str, float]:
    core, aux = f"val-core/{tag}/acc", f"val-aux/{tag}"
    lengths, clipped = [r.length for r in records], [r.finish_reason == "length" for r in records]
    metrics = {
        f"{aux}/response_length/mean": sum(lengths) / len(lengths),
        f"{aux}/clip_ratio": sum(clipped) / len(clipped),
        f"{aux}/failed": float(sum(record.failed for record in records)),
    }
    samples: dict[str, int] = {}
    groups: dict[str, list[ValRecord]] = {}
    for record in records:
        samples[record.uid] = samples.get(record.uid, 0) + 1
        if _counts(record):
            groups.setdefault(record.uid, []).append(record)
    if not groups:
        return metrics
    prompts = list(groups.values())
    accs = [np.array([record.acc for record in prompt], dtype=np.float64) for prompt in prompts]
    most = max(samples.values())
    metrics[f"{core}/mean@{most}"] = _mean(acc.mean() for acc in accs)
    if most == 1:
        return metrics
    metrics[f"{aux}/std@{most}"] = _mean(acc.std() for acc in accs)
    for n in draw_sizes(most):
        metrics[f"{core}/best@{n}/mean"] = _mean(bootstrap(acc, n, np.max) for acc in accs)
        metrics[f"{aux}/worst@{n}/mean"] = _mean(bootstrap(acc, n, np.min) for acc in accs)
        metrics[f"{core}/maj@{n}/mean"] = _mean(
            majority([record.pred for record in prompt], acc, n) for prompt, acc in zip(prompts, accs, strict=True)
        )
        full = [acc for acc in accs if len(acc) >= n]
        if full:
            metrics[f"{aux}/pass@{n}"] = _mean(pass_at(len(acc), int((acc >= 1).sum()), n) for acc in full)
    return metrics


def _mean(values: Iterable[float]) -> float:
    return float(np.mean(list(values)))


def draw_sizes(most: int) -> list[int]:
    """2, 4, 8, ... below `most`, and `most`."""
    sizes = [2**k for k in range(1, most.bit_length()) if 2**k < most]
    return [*sizes, most]


def _draws(count: int, n: int) -> np.ndarray:
    """[DRAWS, n] sample numbers; the same for every prompt with `count` samples."""
    return np.random.RandomState(SEED).choice(count, size=(DRAWS, n))


def bootstrap(acc: np.ndarray, n: int, reduce: Callable[..., np.ndarray]) -> float:
    """Mean over draws of the best (np.max) or worst (np.min) of n samples."""
    return float(reduce(acc[_draws(len(acc), n)], axis=1).mean())


def majority(preds: Sequence[str | None], acc: np.ndarray, n: int) -> float:
    """Mean over draws of the accuracy of the most frequent prediction; ties go to the one seen first.

    Samples without prediction vote together for an empty answer with accuracy 0.
    """
    values = np.where([pred is None for pred in preds], 0.0, acc)
    names = {pred: place for place, pred in enumerate(dict.fromkeys(preds))}
    votes = np.array([names[pred] for pred in preds])
    total = 0.0
    for draw in _draws(len(acc), n):
        drawn = votes[draw].tolist()
        winner = max(dict.fromkeys(drawn), key=drawn.count)  # max keeps the first of equals
        total += values[draw[drawn.index(winner)]]
    return total / DRAWS


def pass_at(count: int, right: int, n: int) -> float:
    """Unbiased chance that n of `count` samples hold a right one: 1 - C(N-c, n)/C(N, n) (arXiv 2107.03374)."""
    return 1.0 - math.comb(count - right, n) / math.comb(count, n)


def write_samples(path: str | Path, records: Iterable[ValRecord]) -> None:
    """One JSON object a line, written to a temporary name and renamed when complete."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    with partial.open("w", encoding="utf-8") as stream:
        for record in records:
            stream.write(json.dumps(asdict(record), ensure_ascii=False) + "\n")
        stream.flush()
        os.fsync(stream.fileno())
    partial.replace(target)


def sample_table(records: Sequence[ValRecord], k: int, step: int | None = None) -> tuple[list[str], list[list[str]]]:
    """(columns, k rows of text): always the same prompts and samples, chosen by a hash of their uid.

    The column `step` is there when a step is given.
    """

    def place(record: ValRecord) -> bytes:
        return hashlib.sha256(f"{record.uid}#{record.index}".encode()).digest()

    columns = ["tag", "id", "prompt", "answer", "pred", "gold", "score"]
    rows = []
    for r in sorted(records, key=place)[:k]:
        rows.append([r.tag, r.id, r.prompt, r.answer, r.pred or "", r.gold or "", f"{r.score:g}"])
    if step is None:
        return columns, rows
    return ["step", *columns], [[str(step), *row] for row in rows]
