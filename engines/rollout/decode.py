"""The decode loop of the transformers rollout: prefill each prompt once, keep the batch full, hand out samples.

Shape legend: R rows, V vocabulary, T packed prompt tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from engines.base import Prompt, Sample, SamplingParams
from engines.batch import TrainBatch
from engines.hf_routing import forward_recording
from engines.rollout.kv_cache import KvCache, Layer, PrefillAttend
from engines.rollout.sampling import random_stream, sample

# Prompt tokens of one prefill pass: large enough for full matrix speed, small enough for modest memory.
_PREFILL_TOKENS = 8192
# Response positions reserved at first; the cache grows when responses turn out longer.
_FIRST_POSITIONS = 128


@dataclass
class _Prefix:
    """A prefilled prompt whose samples have not all started: its cache, the logits after its last token, and the
    experts of its tokens [T, layers, K] if they are asked for."""

    layers: list[Layer]
    logits_V: Tensor
    routes: Tensor | None


@dataclass
class _Waiting:
    prompt: Prompt
    started: int = 0
    prefix: _Prefix | None = None


@dataclass
class _Row:
    """One sample being written; `seen_V` (bool) only with a repetition penalty, `routes` (pieces of rows) only if
    asked for."""

    prompt: Prompt
    index: int
    stream: np.random.Generator
    seen_V: Tensor | None
    routes: list[Tensor]
    response: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)


class Decoder:
    """One generate() call. `max_rows` samples decode at a time; `max_length` bounds prompt plus response."""

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        sampling: SamplingParams,
        max_rows: int,
        max_length: int,
        return_routes: bool = False,
    ) -> None:
        self.model, self.device, self.sampling = model, device, sampling
        self.max_rows, self.max_length = max_rows, max_length
        self.return_routes = return_routes
        self.rows: list[_Row] = []
        self.waiting: deque[_Waiting] = deque()
        self.cache: KvCache | None = None

    def run(self, prompts: list[Prompt], version: int) -> Iterator[Sample]:
        """Yield finished samples stamped with `version`. No grad mode is left switched between items."""
        self.waiting = deque(_Waiting(prompt) for prompt in prompts)
        longest = max((len(prompt.token_ids) for prompt in prompts), default=0)
        self.cache = KvCache(
            max_rows=min(self.max_rows, self.sampling.n * len(prompts)),
            positions=longest + min(self.sampling.max_new_tokens, _FIRST_POSITIONS),
        )
        while self.waiting or self.rows:
            first = len(self.rows)
            logits_RV = self._admit()
            if logits_RV is not None:
                self._extend(first, logits_RV)
            yield from self._retire(version)
            if self.rows:
                self._extend(0, self._decode())
                yield from self._retire(version)

    @torch.no_grad()
    def _admit(self) -> Tensor | None:
        """Start samples while rows are free; returns the logits [R, V] of their first tokens."""
        logits = []
        while self.waiting and len(self.rows) < self.max_rows:
            head = self.waiting[0]
            if head.prefix is None:
                self._prefill()
            count = min(self.sampling.n - head.started, self.max_rows - len(self.rows))
            self.cache.fill(len(self.rows), count, head.prefix.layers)
            self.rows += [self._new_row(head, head.started + i) for i in range(count)]
            logits.append(head.prefix.logits_V.expand(count, -1))
            head.started += count
            if head.started == self.sampling.n:
                self.waiting.popleft()
        return torch.cat(logits) if logits else None

    def _new_row(self, head: _Waiting, index: int) -> _Row:
        prompt, seen_V = head.prompt, None
        if self.sampling.repetition_penalty != 1.0:
            seen_V = torch.zeros(self.model.config.vocab_size, dtype=torch.bool, device=self.device)
            seen_V[list(prompt.token_ids)] = True
        routes = [head.prefix.routes] if self.return_routes else []
        return _Row(prompt, index, random_stream(self.sampling.seed, prompt.uid, index), seen_V, routes)

    def _forward(self, **inputs: Any) -> tuple[Tensor, Tensor | None]:
        """Logits, and the experts of the tokens [T, layers, K] if asked for."""
        if not self.return_routes:
            return self.model(use_cache=False, **inputs).logits, None
        output, routes_TLK = forward_recording(self.model, use_cache=False, **inputs)
        return output.logits, routes_TLK

    def _prefill(self) -> None:
        """Run the next prompts through the model, as many as can start now and fit one pass."""
        group: list[_Waiting] = []
        tokens, free = 0, self.max_rows - len(self.rows)
        for item in self.waiting:
            tokens += len(item.prompt.token_ids)
            if group and (tokens > _PREFILL_TOKENS or len(group) * self.sampling.n >= free):
                break
            group.append(item)
        batch = TrainBatch.pack([item.prompt.token_ids for item in group])
        attend = PrefillAttend(batch.cu_seqlens)
        logits_1BV, routes_TLK = self._forward(
            input_ids=batch.input_ids.to(self.device).unsqueeze(0),
            position_ids=batch.position_ids.to(self.device).unsqueeze(0),
            attend=attend,
            logits_to_keep=(batch.cu_seqlens[1:] - 1).to(self.device),
        )
        bounds = batch.cu_seqlens.tolist()
        for b, item in enumerate(group):
            cut = slice(bounds[b], bounds[b + 1])
            layers = [tuple(x[cut] for x in layer) for layer in attend.layers]
            routes = routes_TLK[cut] if routes_TLK is not None else None
            item.prefix = _Prefix(layers, logits_1BV[0, b], routes)

    @torch.no_grad()
    def _decode(self) -> Tensor:
        """Feed every row its last token; returns the logits [R, V] of the next ones."""
        positions = [len(row.prompt.token_ids) + len(row.response) - 1 for row in self.rows]
        last_R1 = torch.tensor([[row.response[-1]] for row in self.rows], device=self.device)
        logits_R1V, routes_RLK = self._forward(
            input_ids=last_R1,
            position_ids=torch.tensor(positions, device=self.device).unsqueeze(-1),
            attend=self.cache.at(positions),
        )
        if routes_RLK is not None:
            for row, routes_1LK in zip(self.rows, routes_RLK.split(1), strict=True):
                row.routes.append(routes_1LK)
        return logits_R1V[:, 0]

    @torch.no_grad()
    def _extend(self, first: int, logits_RV: Tensor) -> None:
        """Append one sampled token to every row from `first` on."""
        rows = self.rows[first:]
        penalised = self.sampling.repetition_penalty != 1.0
        tokens_R, log_probs_R = sample(
            logits_RV,
            torch.tensor([row.stream.random() for row in rows], dtype=torch.float64).to(self.device),
            self.sampling,
            torch.stack([row.seen_V for row in rows]) if penalised else None,
        )
        for row, token, log_prob in zip(rows, tokens_R.tolist(), log_probs_R.tolist(), strict=True):
            row.response.append(token)
            row.log_probs.append(log_prob)
            if row.seen_V is not None:
                row.seen_V[token] = True

    def _retire(self, version: int) -> list[Sample]:
        """Take finished rows out and close the gaps with rows from the end."""
        reasons = {i: reason for i, row in enumerate(self.rows) if (reason := self._finish_reason(row))}
        done = [_sample(self.rows[i], reason, version) for i, reason in reasons.items()]
        left = len(self.rows) - len(done)
        gaps = [i for i in reasons if i < left]
        tail = [i for i in range(left, len(self.rows)) if i not in reasons]
        if gaps:
            with torch.no_grad():
                self.cache.move(tail, gaps)
            for gap, i in zip(gaps, tail, strict=True):
                self.rows[gap] = self.rows[i]
        del self.rows[left:]
        return done

    def _finish_reason(self, row: _Row) -> str | None:
        if not self.sampling.ignore_eos and row.response[-1] in self.sampling.eos_token_ids:
            return "stop"
        full = len(row.prompt.token_ids) + len(row.response) >= self.max_length
        return "length" if full or len(row.response) >= self.sampling.max_new_tokens else None


def _sample(row: _Row, reason: str, version: int) -> Sample:
    routes = torch.cat(row.routes) if row.routes else None
    return Sample(row.prompt.uid, row.index, row.prompt.token_ids, row.response, row.log_probs, reason, version, routes)
