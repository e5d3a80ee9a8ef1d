"""An exactly resumable walk over the prompts.

The state is an index, a few numbers per domain: resuming replays nothing, and any prompts drawn after it, in
any portions, equal those of the unbroken run.
"""

from __future__ import annotations

import hashlib
import json
import logging
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

from trainer.prompts.encoding import encode_rows
from trainer.prompts.errors import FieldProblem, Problems
from trainer.prompts.interleave import block_pattern, share_problems
from trainer.prompts.row import Row
from trainer.prompts.rows import RowList
from trainer.prompts.templates import PromptEncoder
from trainer.prompts.walk import Walk, epoch_order

logger = logging.getLogger(__name__)

Truncation = Literal["error", "left", "right", "middle"]
ALL = ""  # name of the one walk over all rows, where no shares of domains are given


@dataclass(frozen=True)
class PromptItem:
    """One prompt of a batch; `uid` groups its answers, `think_open` is for the scorer."""

    uid: str
    row: Row
    token_ids: tuple[int, ...]
    think_open: bool = False


class PromptSource:
    """Prompts without end, by the batch or in any number; the tail of an epoch is carried into the next one.

    Every row is tokenised once, at construction (`workers`, `cache_dir`: see encode_rows). Rows over
    `max_prompt_length` tokens are dropped and counted (`filter_overlong`), cut (`truncation`), or refused.

    With `domain_shares` (domain -> share, summing to 1) every `mix_block` prompts in a row (default: a batch) hold
    each domain in its share; a domain has its own shuffle and epoch, so a small one wraps round alone.

    Raises DataError: D28 shares that do not fit the rows, D29 too long, D30 fewer rows than a batch, D31 template
    failure, D32 nothing left.
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
        domain_shares: Mapping[str, float] | None = None,
        mix_block: int | None = None,
        workers: int = 1,
        cache_dir: Path | None = None,
    ) -> None:
        self.batch_size, self.shuffle, self.seed = batch_size, shuffle, seed
        self.encoder = encoder
        self.loaded = rows if isinstance(rows, RowList) else RowList(rows, {})
        self.rows: list[Row] = []
        self.overlong: Counter[str] = Counter()  # dropped rows per tag
        self.truncated: Counter[str] = Counter()  # cut rows per tag
        self._ids: list[array[int]] = []
        problems = Problems(max_reported_errors)
        encoded = encode_rows(rows, encoder, workers, cache_dir)
        for row, found in zip(rows, encoded, strict=True):
            self._keep(row, found, max_prompt_length, truncation, filter_overlong, problems)
        problems.raise_if_any()
        shares = dict(domain_shares or {})
        self._check(shares, problems)
        self._walks = self._domains(shares)
        self._pattern = block_pattern(shares, mix_block or batch_size) if shares else [ALL]
        self._slot = 0  # place of the next prompt in the pattern
        for name in sorted(self._walks.keys() - set(self._pattern)):
            logger.warning("no prompt of domain %s: its share of %d prompts is less than one", name, len(self._pattern))
        self._files = {name: facts.fingerprint for name, facts in self.loaded.files.items()}
        settings = [seed, shuffle, max_prompt_length, truncation, filter_overlong, len(self.rows), encoder.fingerprint]
        settings.append(sorted(shares.items()))
        self._settings = hashlib.sha256(json.dumps(settings).encode()).hexdigest()

    def _keep(
        self,
        row: Row,
        found: tuple[int, ...] | FieldProblem,
        limit: int,
        truncation: Truncation,
        drop: bool,
        problems: Problems,
    ) -> None:
        if isinstance(found, FieldProblem):
            problems.add(found, *row.origin)
            return
        too_long = len(found) > limit
        if too_long and drop:
            self.overlong[row.tag] += 1
            return
        try:
            ids = truncate(found, limit, truncation)
        except FieldProblem as problem:
            problems.add(problem, *row.origin)
            return
        self.truncated[row.tag] += too_long
        self.rows.append(row)
        self._ids.append(array("q", ids))

    def _check(self, shares: Mapping[str, Any], problems: Problems) -> None:
        files = ", ".join(dict.fromkeys(row.origin[0] for row in self.loaded))
        kept, total = len(self.rows), len(self.loaded)
        if kept == 0:
            got = f"kept 0 of {total} (overlong {self.overlong.total()})"
            problems.add(FieldProblem("D32", None, got, "at least one batch", "Raise data.max_prompt_length"), files)
        elif kept < self.batch_size:
            got = f"{kept} rows, train_batch_size {self.batch_size}, 0 steps"
            fix = "Add data or lower the batch"
            problems.add(FieldProblem("D30", None, got, f"at least {self.batch_size}", fix), files)
        if shares and kept:
            for problem in share_problems(shares, {row.domain for row in self.rows}):
                problems.add(problem, files)
        problems.raise_if_any()

    def _domains(self, shares: Mapping[str, float]) -> dict[str, Walk]:
        if not shares:
            return {ALL: Walk(range(len(self.rows)), self.seed, self.shuffle)}
        rows: dict[str, list[int]] = {name: [] for name in shares}
        for index, row in enumerate(self.rows):
            rows[row.domain].append(index)
        return {name: Walk(of, self.seed, self.shuffle, name) for name, of in rows.items()}

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def lengths(self) -> list[int]:
        """Prompt tokens of the kept rows."""
        return [len(ids) for ids in self._ids]

    def examples(self) -> dict[str, tuple[int, ...]]:
        """The token ids of the first kept prompt of each tag."""
        first: dict[str, int] = {}
        for index, row in enumerate(self.rows):
            first.setdefault(row.tag, index)
        return {tag: tuple(self._ids[index]) for tag, index in first.items()}

    @property
    def epoch(self) -> int:
        """Passes over all rows that are complete, from 0; with shares, those of the slowest domain."""
        return min(walk.epoch for name, walk in self._walks.items() if name in self._pattern)

    @property
    def consumed(self) -> int:
        """Prompts handed out."""
        return sum(walk.consumed for walk in self._walks.values())

    def batches_in(self, epochs: int) -> int:
        """Full batches in that many epochs."""
        return epochs * len(self.rows) // self.batch_size

    def next_batch(self) -> list[PromptItem]:
        """The next `batch_size` prompts, running on into the next epoch where needed."""
        return self.next(self.batch_size)

    def next(self, count: int) -> list[PromptItem]:
        """The next `count` prompts: the same ones in the same order, whatever the portions."""
        return [self._next() for _ in range(count)]

    def _next(self) -> PromptItem:
        walk = self._walks[self._pattern[self._slot]]
        self._slot = (self._slot + 1) % len(self._pattern)
        return self._item(*walk.next())

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
            "domains": {name: walk.state_dict() for name, walk in self._walks.items()},
            "block": len(self._pattern),
            "slot": self._slot,
            "files": self._files,
            "settings": self._settings,
        }

    def load_state_dict(self, state: dict[str, Any], *, allow_changed_files: bool = False) -> None:
        """Continue where `state` was taken. Changed files, seed or filter settings are a ValueError;
        with `allow_changed_files` the epoch of every domain starts again instead."""
        difference = self._difference(state)
        if difference and not allow_changed_files:
            raise ValueError(f"{difference}; undo the change or set data.allow_changed_files=true to restart the epoch")
        for name, walk in self._walks.items():
            if name in state["domains"]:
                walk.load_state_dict(state["domains"][name])
        # With another batch size the mix starts at its beginning; the walks go on where they were.
        self._slot = state["slot"] if state["block"] == len(self._pattern) else 0
        if difference:
            logger.warning("%s; epoch %d starts again from its first prompt", difference, self.epoch)
            for walk in self._walks.values():
                walk.position = 0

    def _difference(self, state: dict[str, Any]) -> str:
        for name in sorted(self._files.keys() | state["files"].keys()):
            now, then = self._files.get(name), state["files"].get(name)
            if now != then:
                return f"got data file {name} with {_show(now)}; expected {_show(then)} as in the checkpoint"
        if self._settings != state["settings"]:
            return (
                f"got data settings {self._settings[:12]} (seed {self.seed}); expected {state['settings'][:12]} "
                f"(seed {state['seed']}) as in the checkpoint: data.seed, data.shuffle, data.max_prompt_length, "
                "data.truncation, data.filter_overlong_prompts, data.domain_interleave_probs, tokenizer and template "
                "must stay the same"
            )
        return ""


def _show(fingerprint: dict[str, Any] | None) -> str:
    if fingerprint is None:
        return "no such file"
    return f"{fingerprint['size']} bytes, {fingerprint['rows']} rows, sha256 {fingerprint['sha256'][:12]}"


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
