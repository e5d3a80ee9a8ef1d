"""The transformers rollout engine: runs wherever torch does, one replica per process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal

import torch
from torch import Tensor

from engines.base import Prompt, RolloutEngine, Sample, SamplingParams
from engines.batch import TrainBatch
from engines.device import get_device
from engines.hf_model import (
    build_on_meta,
    disk_layout,
    dtype_of,
    is_ignorable,
    materialize,
    packed_log_probs,
    report_names,
    tied_names,
)
from engines.rollout.decode import Decoder
from engines.rollout.sampling import check_sampling
from engines.routes import RouteShape
from engines.spec import RolloutEngineSpec

# Tokens of one scoring pass; a longer sequence goes alone.
_SCORE_TOKENS = 8192


class HfRolloutEngine(RolloutEngine):
    """Weights are undefined until the first load_weights()."""

    def __init__(self, spec: RolloutEngineSpec) -> None:
        if spec.engine_kwargs:
            raise ValueError(
                f"got engine_kwargs.hf={spec.engine_kwargs}; expected none: this engine has no such options; "
                "remove them"
            )
        self.spec = spec
        module = get_device(spec.device).module
        self.device = torch.device("cpu" if module is None else f"{spec.device}:{module.current_device()}")
        self.model = build_on_meta(spec.model, dtype_of(spec.dtype, "rollout.dtype")).eval().requires_grad_(False)
        materialize(self.model, self.device)
        if spec.return_routes:
            RouteShape.of(self.model.config.to_dict())  # a dense model has none: better said now than after loading
        self.max_length = spec.max_model_len or self.model.config.max_position_embeddings
        self._asleep = False

    def generate(self, prompts: list[Prompt], sampling: SamplingParams) -> Iterator[Sample]:
        """Checks at once, generates as the result is iterated."""
        self._check_ready()
        check_sampling(sampling)
        wrong = {p.uid: len(p.token_ids) for p in prompts if not 0 < len(p.token_ids) < self.max_length}
        if wrong:
            raise ValueError(
                f"got prompt lengths {wrong} (by uid); expected 1..{self.max_length - 1} tokens; "
                "raise rollout.max_model_len or filter long prompts (data.filter_overlong_prompts)"
            )
        decoder = Decoder(
            self.model, self.device, sampling, self.spec.max_num_seqs, self.max_length, self.spec.return_routes
        )
        return self._guarded(decoder.run(prompts, self.version))

    def _guarded(self, samples: Iterator[Sample]) -> Iterator[Sample]:
        """A response must not be continued under other weights than those it began with."""
        version = self.version
        for finished in samples:
            if self.version != version or self._asleep:
                raise RuntimeError("weights were changed or put to sleep while samples were still being generated")
            yield finished

    def load_weights(self, stream: Iterable[tuple[str, Tensor]], version: int) -> None:
        """The stream is read to its end also when a name is wrong: its producers may be collective."""
        self.version = -1
        missing = {tensor.name: tensor for tensor in disk_layout(self.model)}
        known, ties = set(missing), tied_names(self.model)
        live = self.model.state_dict()
        heads: dict[str, Tensor] = {}
        doubled, unknown, unusable = [], [], {}
        for name, tensor in stream:
            if name in missing:
                target = missing.pop(name)
                if tuple(tensor.shape) == target.shape:
                    live[target.live][target.index].copy_(tensor)
                else:
                    unusable[name] = f"{tuple(tensor.shape)}, expected {target.shape}"
            elif name in known or name in heads:
                doubled.append(name)
            elif name in ties:  # valid until the next item only
                heads[name] = tensor.to(live[name], copy=True)
            elif not is_ignorable(self.model, name):
                unknown.append(name)
        report_names(sorted(missing), sorted(doubled), sorted(unknown), f"the stream of version {version}")
        for name, head in heads.items():
            if not torch.equal(head, live[ties[name]]):
                unusable[name] = f"not equal to {ties[name]}, to which config.json ties it"
        if unusable:
            raise ValueError(
                f"got unusable tensors {unusable} in the stream of version {version}; "
                "use the same config.json and override_config on both sides"
            )
        self.version = version

    @torch.no_grad()
    def score(self, sequences: list[list[int]], temperature: float) -> list[list[float]]:
        self._check_ready()
        scores: list[list[float]] = []
        for group in _groups(sequences):
            batch = TrainBatch.pack(group)
            log_probs_T = packed_log_probs(self.model, batch, self.device, temperature).log_probs
            scores += [row.tolist() for row in batch.rows(log_probs_T.cpu())]
        return scores

    def _check_ready(self) -> None:
        if self.version < 0 or self._asleep:
            state = (
                "is asleep: call wake()" if self._asleep else "holds no complete set of weights: call load_weights()"
            )
            raise RuntimeError(f"this rollout engine {state} first")

    def sleep(self) -> None:
        """Caches live only while generate() runs; what the allocator still holds goes back to the device."""
        self._asleep = True
        get_device(self.spec.device).empty_cache()

    def wake(self, part: Literal["all", "weights", "cache"] = "all") -> None:
        self._asleep = self._asleep and part == "weights"

    def close(self) -> None:
        self.model, self.version = None, -1
        get_device(self.spec.device).empty_cache()


def _groups(sequences: list[list[int]]) -> Iterator[list[list[int]]]:
    """Consecutive sequences of at most _SCORE_TOKENS tokens together."""
    group: list[list[int]] = []
    for sequence in sequences:
        if group and sum(map(len, group)) + len(sequence) > _SCORE_TOKENS:
            yield group
            group = []
        group.append(sequence)
    if group:
        yield group
