"""The packed batch: what a training engine sees.

Shape legend, used across `engines/` and `trainer/`:
    T  tokens of all sequences, packed back to back (no padding)
    B  sequences (samples)        S  tokens of one sequence
    V  vocabulary                 H  attention heads       D  head size

Alignment rule: *every* per-token tensor has length T and entry t speaks about token t.
`log_probs[t] = log p(token t | earlier tokens of its own sequence)`. The first token of a sequence
has no prediction: its log-prob and entropy are 0 and its mask is 0. Engines compute the value of
token t from the logits row t-1; nobody outside an engine ever shifts anything.

Example, two sequences [7, 8, 9] and [5, 6], the last token of each sampled by the policy:
    input_ids_T     7 8 9 5 6
    cu_seqlens      0 3 5
    position_ids_T  0 1 2 0 1
    loss_mask_T     0 0 1 0 1
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class TrainBatch:
    """B packed sequences with named per-token (`tokens`) and per-sample (`samples`) tensors.

    input_ids   [T] int64
    cu_seqlens  [B+1] int64, starts at 0, ends at T; sequence b is `cu_seqlens[b]:cu_seqlens[b+1]`
    tokens      name -> [T] tensor, e.g. loss_mask (float 0/1), old_log_probs, advantages (float32);
                or [T, ...], e.g. routes [T, layers, K] int16
    samples     name -> [B] tensor, e.g. loss_weights, index (the caller's row numbers)
    """

    input_ids: Tensor
    cu_seqlens: Tensor
    tokens: dict[str, Tensor] = field(default_factory=dict)
    samples: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        total, count = self.input_ids.shape[0], self.cu_seqlens.shape[0] - 1
        assert int(self.cu_seqlens[0]) == 0 and int(self.cu_seqlens[-1]) == total, (
            f"cu_seqlens runs {int(self.cu_seqlens[0])}..{int(self.cu_seqlens[-1])}, expected 0..{total}"
        )
        for name, value in self.tokens.items():
            assert value.shape[0] == total, f"tokens[{name!r}] has {value.shape[0]} entries, expected T={total}"
        for name, value in self.samples.items():
            assert value.shape[0] == count, f"samples[{name!r}] has {value.shape[0]} entries, expected B={count}"

    def __len__(self) -> int:
        return self.cu_seqlens.shape[0] - 1

    @property
    def num_tokens(self) -> int:
        return self.input_ids.shape[0]

    @property
    def lengths(self) -> list[int]:
        """Tokens per sequence, B python ints."""
        return (self.cu_seqlens[1:] - self.cu_seqlens[:-1]).tolist()

    @property
    def position_ids(self) -> Tensor:
        """[T] int64, restarting at 0 in every sequence."""
        starts = torch.repeat_interleave(self.cu_seqlens[:-1], self.cu_seqlens[1:] - self.cu_seqlens[:-1])
        return torch.arange(self.num_tokens, device=self.input_ids.device) - starts

    @classmethod
    def pack(cls, sequences: Sequence[Sequence[int]], **tokens: Sequence[Sequence[float]]) -> TrainBatch:
        """Build from per-sample python rows; each keyword is one row of floats per sequence."""
        assert len(sequences) > 0, "cannot pack zero sequences"
        return cls(
            input_ids=torch.tensor([token for row in sequences for token in row], dtype=torch.int64),
            cu_seqlens=cumulative([len(row) for row in sequences]),
            tokens={
                name: torch.tensor([value for row in rows for value in row], dtype=torch.float32)
                for name, rows in tokens.items()
            },
        )

    def select(self, rows: Sequence[int]) -> TrainBatch:
        """The given sequences in the given order, as a new packed batch."""
        index_B = torch.as_tensor(list(rows), dtype=torch.int64)
        bounds = self.cu_seqlens.tolist()
        pick_T = torch.cat([torch.arange(bounds[b], bounds[b + 1]) for b in rows])
        return TrainBatch(
            input_ids=self.input_ids[pick_T],
            cu_seqlens=cumulative([bounds[b + 1] - bounds[b] for b in rows]),
            tokens={name: value[pick_T] for name, value in self.tokens.items()},
            samples={name: value[index_B] for name, value in self.samples.items()},
        )

    def rows(self, values_T: Tensor) -> list[Tensor]:
        """Cut a packed [T] tensor into B per-sample tensors (views)."""
        return list(torch.split(values_T, self.lengths))

    def to(self, device: torch.device | str) -> TrainBatch:
        return TrainBatch(
            self.input_ids.to(device),
            self.cu_seqlens.to(device),
            {name: value.to(device) for name, value in self.tokens.items()},
            {name: value.to(device) for name, value in self.samples.items()},
        )

    def masked(self) -> TrainBatch:
        """A copy that contributes nothing to any loss: used to fill an empty micro-batch slot."""
        tokens = dict(self.tokens)
        tokens["loss_mask"] = torch.zeros(self.num_tokens, device=self.input_ids.device)
        return TrainBatch(self.input_ids, self.cu_seqlens, tokens, self.samples)


def cumulative(lengths: Sequence[int]) -> Tensor:
    """[B+1] int64 offsets of packed sequences: [3, 2] -> [0, 3, 5]."""
    return torch.cat([torch.zeros(1, dtype=torch.int64), torch.tensor(lengths, dtype=torch.int64).cumsum(0)])


@dataclass(frozen=True)
class Denominators:
    """Global counts of one mini-batch: all DP ranks, all micro-batches .

    Each micro-batch's loss is `sum / denominator`; the engine undoes whatever its own reductions
    divide by, so the gradient is the one of the global value however the batch was cut.
    """

    tokens: float
    sequences: float


@dataclass
class PolicyOutput:
    """What the forward pass hands to a loss. `log_probs` [T] float32 carries gradient;
    `entropy` [T] float32 is None unless asked for (with gradient when `entropy_grad`).
    `routes` [T, layers, K] int16 are those of a scoring pass that was told to record them, `sum_pi_squared` [T]
    float32 those of one that was asked for it."""

    log_probs: Tensor
    entropy: Tensor | None = None
    routes: Tensor | None = None
    sum_pi_squared: Tensor | None = None


@dataclass
class ValueOutput:
    """What the forward pass of a value model hands to a loss. `values` [T] float32 carries gradient; entry t is the
    value of the state before token t was emitted, by the alignment rule from row t-1, and 0 at first tokens."""

    values: Tensor
