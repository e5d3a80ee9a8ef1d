"""An exactly resumable walk over the prompts.

The order of an epoch is a pure function of (seed, epoch), so the state is a few numbers: resuming
replays nothing and any number of steps after it equals the unbroken run.
"""

from __future__ import annotations

import hashlib
import json
import logging
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import quote

import numpy as np

from trainer.prompts.errors import FieldProblem, Problems
from trainer.prompts.row import Row
from trainer.prompts.rows import RowList
from trainer.prompts.templates import PromptEncoder

logger = logging.getLogger(__name__)

Truncation = Literal["error", "left", "right", "middle"]


@dataclass(frozen=True)
class PromptItem:
    """One prompt of a batch; `uid` groups its answers, `think_open` is for the scorer."""

    uid: str
    row: Row
    token_ids: tuple[int, ...]
    think_open: bool = False


class PromptSource:
    """Batches of exactly `batch_size` prompts; the tail of an epoch is carried into the next one.

    Every row is tokenised once, at construction. Rows over `max_prompt_length` tokens are dropped and
    counted (`filter_overlong`), cut (`truncation`), or refused. Raises DataError: D29 too long,
    D30 fewer rows than a batch, D31 template failure, D32 nothing left.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        encoder: PromptEncoder,
        *,
        batch_size: int,
        shuffle: bool,
        seed: int,
        max_prompt_length: int,
        truncation: Truncation = "error",
        filter_overlong: bool = False,
        max_reported_errors: int = 20,
    ) -> None:
        self.batch_size, self.shuffle, self.seed = batch_size, shuffle, seed
        self.encoder, self.loaded = encoder, rows
        self.rows: list[Row] = []
        self.overlong: Counter[str] = Counter()  # dropped rows per tag
        self.epoch = 0  # epoch of the next prompt, from 0
        self.consumed = 0  # prompts handed out, over all epochs
        self._position = 0  # place in the current epoch's order
        self._ids: list[array[int]] = []
        self._order: tuple[int, list[int]] = (-1, [])
        self._read(rows, max_prompt_length, truncation, filter_overlong, max_reported_errors)
        self.loaded = rows if isinstance(rows, RowList) else RowList(rows, {})
        self._files = {name: facts.fingerprint for name, facts in self.loaded.files.items()}
        settings = [seed, shuffle, max_prompt_length, truncation, filter_overlong, len(self.rows), encoder.fingerprint]
        self._settings = hashlib.sha256(json.dumps(settings).encode()).hexdigest()

    def _read(self, rows: Sequence[Row], limit: int, truncation: Truncation, drop: bool, reported: int) -> None:
        problems = Problems(reported)
        for row in rows:
            try:
                ids = self.encoder.encode(row.messages)
                if len(ids) > limit and drop:
                    self.overlong[row.tag] += 1
                    continue
                self.rows.append(row)
                self._ids.append(array("q", truncate(ids, limit, truncation)))
            except FieldProblem as problem:
                problems.add(problem, *row.origin)
        problems.raise_if_any()
        files = ", ".join(dict.fromkeys(row.origin[0] for row in rows))
        kept, total = len(self.rows), len(rows)
        if kept == 0:
            got = f"kept 0 of {total} (overlong {self.overlong.total()})"
            problems.add(FieldProblem("D32", None, got, "at least one batch", "Raise data.max_prompt_length"), files)
        elif kept < self.batch_size:
            got = f"{kept} rows, train_batch_size {self.batch_size}, 0 steps"
            fix = "Add data or lower the batch"
            problems.add(FieldProblem("D30", None, got, f"at least {self.batch_size}", fix), files)
        problems.raise_if_any()

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def lengths(self) -> list[int]:
        """Prompt tokens of the kept rows."""
        return [len(ids) for ids in self._ids]

    def batches_in(self, epochs: int) -> int:
        """Full batches in that many epochs."""
        return epochs * len(self.rows) // self.batch_size

    def next_batch(self) -> list[PromptItem]:
        """The next `batch_size` prompts, running on into the next epoch where needed."""
        return [self._next() for _ in range(self.batch_size)]

    def _next(self) -> PromptItem:
        if self._position == len(self.rows):
            self.epoch, self._position = self.epoch + 1, 0
        if self._order[0] != self.epoch:
            self._order = (self.epoch, epoch_order(len(self.rows), self.seed, self.epoch, self.shuffle))
        item = self._item(self._order[1][self._position], self.epoch)
        self._position += 1
        self.consumed += 1
        return item

    def _item(self, index: int, epoch: int) -> PromptItem:
        row, ids = self.rows[index], tuple(self._ids[index])
        uid = f"{quote(row.tag, safe='/:')}#{quote(row.id, safe='/:')}#{epoch}"
        return PromptItem(uid, row, ids, self.encoder.opens_think(ids))

    def validation_batches(self, batch_size: int | None = None) -> Iterator[list[PromptItem]]:
        """Every row once, in file order or shuffled by the seed; the last batch may be short.

        Always the same uids, so that results of different steps can be compared.
        """
        size = batch_size or self.batch_size
        order = epoch_order(len(self.rows), self.seed, 0, self.shuffle)
        for start in range(0, len(order), size):
            yield [self._item(index, 0) for index in order[start : start + size]]

    def state_dict(self) -> dict[str, Any]:
        """JSON-able, of constant size."""
        return {
            "seed": self.seed,
            "epoch": self.epoch,
            "position": self._position,
            "consumed": self.consumed,
            "files": self._files,
            "settings": self._settings,
        }

    def load_state_dict(self, state: dict[str, Any], *, allow_changed_files: bool = False) -> None:
        """Continue where `state` was taken. Changed files, seed or filter settings are a ValueError;
        with `allow_changed_files` the epoch starts again instead."""
        difference = self._difference(state)
        if difference and not allow_changed_files:
            raise ValueError(f"{difference}; undo the change or set data.allow_changed_files=true to restart the epoch")
        self.epoch, self._position, self.consumed = state["epoch"], state["position"], state["consumed"]
        if difference:
            logger.warning("%s; epoch %d starts again from its first prompt", difference, self.epoch)
            self._position = 0

    def _difference(self, state: dict[str, Any]) -> str:
        for name in sorted(self._files.keys() | state["files"].keys()):
            now, then = self._files.get(name), state["files"].get(name)
            if now != then:
                return f"got data file {name} with {_show(now)}; expected {_show(then)} as in the checkpoint"
        if self._settings != state["settings"]:
            return (
                f"got data settings {self._settings[:12]} (seed {self.seed}); expected {state['settings'][:12]} "
                f"(seed {state['seed']}) as in the checkpoint: data.seed, data.shuffle, data.max_prompt_length, "
                "data.truncation, data.filter_overlong_prompts, tokenizer and template must stay the same"
            )
        return ""


def _show(fingerprint: dict[str, Any] | None) -> str:
    if fingerprint is None:
        return "no such file"
    return f"{fingerprint['size']} bytes, {fingerprint['rows']} rows, sha256 {fingerprint['sha256'][:12]}"


def epoch_order(count: int, seed: int, epoch: int, shuffle: bool) -> list[int]:
    """The order of `count` rows in an epoch. RandomState's stream is frozen across numpy versions (NEP 19)."""
    if not shuffle:
        return list(range(count))
    words = np.frombuffer(hashlib.sha256(f"{seed}:{epoch}".encode()).digest(), dtype="<u4")
    return np.random.RandomState(words).permutation(count).tolist()


def truncate(ids: tuple[int, ...], limit: int, how: Truncation) -> tuple[int, ...]:
    """`left` keeps the last tokens, `right` the first, `middle` both ends (limit 8 of 0..11: 0-3, 8-11)."""
    if len(ids) <= limit:
        return ids
    if how == "left":
        return ids[-limit:]
    if how == "right":
        return ids[:limit]
    if how == "middle":
        return ids[: limit // 2] + ids[len(ids) - (limit - limit // 2) :]
    expected, fix = f"<= {limit} (data.max_prompt_length)", "Filter, truncate or raise the limit"
    raise FieldProblem("D29", None, f"{len(ids)} tokens", expected, fix)
