"""Samples with their rewards in one line, and the batch that goes with them."""

from collections.abc import Sequence

from engines.base import Sample
from engines.batch import TrainBatch
from trainer.batching import build_batch
from trainer.prompts import Message, PromptItem, Row
from trainer.reward import RewardResult
from trainer.rollout.scored import Scored

PROMPT = (7, 8)


def one(
    uid: str = "a",
    score: float = 1.0,
    acc: float | None = None,
    length: int = 2,
    *,
    index: int = 0,
    finish: str = "stop",
    domain: str = "math_rule",
    failed: bool = False,
    extra: dict | None = None,
    version: int = 0,
    routes=None,
    **row,
) -> Scored:
    """One scored answer of `length` tokens; `acc` is the score unless given."""
    item = PromptItem(uid, Row(id=uid, tag="t", domain=domain, messages=(Message("user", "?"),), **row), PROMPT)
    sample = Sample(uid, index, PROMPT, [5] * length, [-0.5] * length, finish, version, routes)
    return Scored(
        item, sample, "text", RewardResult(score, score if acc is None else acc, extra=extra or {}, failed=failed)
    )


def batch_of(scored: Sequence[Scored]) -> TrainBatch:
    """What the loop hands on: response_mask on every response token, loss_mask 0 on samples that do not count."""
    batch = build_batch([each.sample for each in scored])
    batch.tokens["response_mask"] = batch.tokens["loss_mask"].clone()
    for row, each in zip(batch.rows(batch.tokens["loss_mask"]), scored, strict=True):
        row *= float(each.counts)
    return batch
