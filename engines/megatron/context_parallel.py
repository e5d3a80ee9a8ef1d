"""Sequences split over the ranks of a context-parallel group.

Shape legend: T tokens of a micro-batch, P >= T the same with padding, C = P / size those of one rank.

Every sequence is padded to a multiple of 2 * size tokens and cut into 2 * size equal pieces, of which rank r
holds number r and number 2 * size - 1 - r, one with few and one with many earlier tokens, so that causal
attention costs every rank the same. Queries stay where they are, keys and values are gathered (Llama 3, arXiv
2407.21783, section 3.3.2). Megatron's rotary embeddings of packed sequences expect these very pieces.

Padding stands at the end of its sequence, where causal attention lets no real token see it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor


@dataclass(frozen=True)
class Piece:
    """Tokens `start:stop` of padded sequence number `sequence`."""

    sequence: int
    start: int
    stop: int


@dataclass(frozen=True)
class Cut:
    """Where the T tokens of a micro-batch went, and how per-token values follow them and come back.

    places_T  index of each token among the P padded ones
    mine_C    which of the P this rank holds, in its own order
    held_T    index of each token among the C of rank 0, the C of rank 1, ...
    lengths   padded tokens per sequence
    """

    places_T: Tensor
    mine_C: Tensor
    held_T: Tensor
    lengths: tuple[int, ...]

    def local(self, values_T: Tensor, fill: float = 0) -> Tensor:
        """[T, ...] -> [C, ...] of this rank; padding becomes `fill`."""
        values_P = values_T.new_full((sum(self.lengths), *values_T.shape[1:]), fill)
        values_P[self.places_T] = values_T
        return values_P[self.mine_C]

    def whole(self, values_C: Tensor) -> Tensor:
        """[C, ...] of all ranks -> [T, ...] on all ranks, without padding.

        What follows must be the same computation on every rank: in the backward pass each rank keeps the
        gradient of its own tokens and adds nothing.
        """
        if _size() > 1:
            values_C = gather_from_sequence_parallel_region(values_C, tensor_parallel_output_grad=False, group=_group())
        return values_C.index_select(0, self.held_T)


def cut(lengths: Sequence[int], multiple: int, device: torch.device) -> Cut:
    """Pad sequences of the given lengths and cut them, each rank's token count a multiple of `multiple`.

    What sequence parallelism then still misses is appended to the last sequence.
    """
    size = _size()
    unit = 2 * size if size > 1 else 1
    padded = [math.ceil(length / unit) * unit for length in lengths]
    padded[-1] += -sum(padded) % math.lcm(unit, size * multiple)
    padded = tuple(padded)
    starts = [0, *accumulate(padded)]
    places_T = torch.cat([torch.arange(n) + start for n, start in zip(lengths, starts, strict=False)])
    held_T = _order(padded, size, places_T.device)[places_T]
    return Cut(places_T.to(device), _held(padded, size)[_rank()].to(device), held_T.to(device), padded)


def pieces(lengths: Sequence[int], rank: int, size: int) -> list[Piece]:
    """What a rank holds of sequences of the given padded lengths, in its own order."""
    if size == 1:
        return [Piece(sequence, 0, length) for sequence, length in enumerate(lengths)]
    return [
        Piece(sequence, number * length // (2 * size), (number + 1) * length // (2 * size))
        for sequence, length in enumerate(lengths)
        for number in (rank, 2 * size - 1 - rank)
    ]


def own_pieces(cu_seqlens: Tensor) -> list[Piece]:
    """What this rank holds of the padded sequences with these offsets [B+1], which stay on the host."""
    return pieces((cu_seqlens[1:] - cu_seqlens[:-1]).tolist(), _rank(), _size())


def gather_sequences(*local: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, ...]:
    """The tokens of all ranks: every [C, ...] becomes [P, ...], in the order of the sequences.

    cu_seqlens  [B+1] offsets of the padded sequences, 0..P
    The tensors share one dtype and travel together. Backward adds the gradients of all ranks and gives each
    the sum for its own tokens.
    """
    size = _size()
    if size == 1:
        return local
    assert len({x.dtype for x in local}) == 1, f"got {[x.dtype for x in local]}, expected one dtype"
    flat_CN = torch.cat([x.flatten(1) for x in local], dim=1)
    gathered_PN = gather_from_sequence_parallel_region(flat_CN, group=_group())
    lengths = tuple((cu_seqlens[1:] - cu_seqlens[:-1]).tolist())
    whole_PN = gathered_PN.index_select(0, _order(lengths, size, gathered_PN.device))
    parts = whole_PN.split([x[0].numel() for x in local], dim=1)
    return tuple(part.unflatten(1, x.shape[1:]) for part, x in zip(parts, local, strict=True))


@lru_cache(maxsize=16)
def _held(lengths: tuple[int, ...], size: int) -> Tensor:
    """[size, C] which of the P padded tokens each rank holds."""
    starts = [0, *accumulate(lengths)]
    return torch.stack(
        [
            torch.cat([torch.arange(p.start, p.stop) + starts[p.sequence] for p in pieces(lengths, rank, size)])
            for rank in range(size)
        ]
    )


@lru_cache(maxsize=16)
def _order(lengths: tuple[int, ...], size: int, device: torch.device) -> Tensor:
    """[P] where each padded token stands among those of rank 0, rank 1, ...: all layers ask for the same."""
    return _held(lengths, size).flatten().argsort().to(device)


def _rank() -> int:
    return parallel_state.get_context_parallel_rank()


def _size() -> int:
    return parallel_state.get_context_parallel_world_size()


def _group() -> torch.distributed.ProcessGroup:
    return parallel_state.get_context_parallel_group()
