"""Rotary position embedding of packed tokens, for latent attention and its indexer.

Shape legend: T packed tokens of this rank, H heads, D rotated dimensions of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from engines.megatron.context_parallel import Piece

Rotary = tuple[Tensor, Tensor]  # cosines and sines, float32 [T, D / 2] each


def rotate(x_THD: Tensor, rotary: Rotary, interleaved: bool) -> Tensor:
    """Turn the pairs (0,1), (2,3).. (`interleaved`) or (i, i + D/2) by their angles.

    The result holds the first members of all pairs, then the second ones, in both cases: scores are dot
    products, so the order is free as long as queries and keys share it.
    """
    cos, sin = (table[:, None].to(x_THD.dtype) for table in rotary)
    a, b = (x_THD[..., 0::2], x_THD[..., 1::2]) if interleaved else x_THD.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def positions(pieces: Sequence[Piece], device: torch.device) -> Tensor:
    """[T] int64, the place of every token in its own sequence."""
    return _positions(tuple((piece.start, piece.stop) for piece in pieces), device)


@lru_cache(maxsize=64)
def _positions(ranges: tuple[tuple[int, int], ...], device: torch.device) -> Tensor:
    """Cached: every layer of a model asks for the same batch."""
    return torch.cat([torch.arange(start, stop, device=device) for start, stop in ranges])
