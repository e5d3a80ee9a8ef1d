"""Samples on disk, one JSON object a line: what was asked, answered, rewarded and learned from."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from engines.batch import TrainBatch


def write_jsonl(path: Path, rows: Iterable[dict]) -> None:
    """Under a temporary name first: a reader never sees half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    with partial.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
    os.replace(partial, path)


def rollout_rows(batch: TrainBatch, scored: Sequence, step: int) -> Iterator[dict]:
    """One row per sample of a training step (`trainer.rollout.scored.Scored`, in the order of `batch`)."""
    advantages = batch.rows(batch.tokens["advantages"])
    for each, advantages_S in zip(scored, advantages, strict=True):
        yield {
            "step": step,
            "uid": each.item.uid,
            "sample": each.sample.index,
            "tag": each.item.row.tag,
            "prompt": each.item.row.messages[-1].content,
            "answer": each.text,
            "gold": each.item.row.ground_truth,
            "pred": each.result.pred,
            "score": each.result.score,
            "acc": each.result.acc,
            "reason": each.result.reason,
            "advantage": float(advantages_S[-1]),
            "length": len(each.sample.response_ids),
            "finish_reason": each.sample.finish_reason,
            "policy_version": each.sample.weight_version,
        }
