"""Which keys each query may see: the highest index scores within its own sequence.

Shape legend: T packed tokens of this context-parallel rank, P >= T those of all; n queries, which are tokens
`start:start + n` of their sequence; S its keys; I indexer heads, D their size, K keys kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

# Per piece of a sequence (context_parallel.Piece), int32 [n, K]: the positions of the keys of each query. None
# keeps every key. Where a query has fewer than K keys, entries behind it mean nothing: the causal mask drops them.
Choice = list[Tensor | None]


@dataclass(frozen=True)
class IndexVectors:
    """What scores are made of: queries [T, I, D], keys [P, D] of whole sequences, float32 head weights [T, I]."""

    query_TID: Tensor
    key_PD: Tensor
    weight_TI: Tensor


# Numbers in the largest intermediate, heads x queries x keys: 256 MiB in float32. Long sequences are handled some
# queries at a time, so this memory does not grow with the square of the length.
CHUNK_NUMBERS = 2**26


def chunks(queries: int, numbers_per_query: int) -> Iterator[slice]:
    """Consecutive slices of queries whose intermediate stays within CHUNK_NUMBERS."""
    size = max(1, CHUNK_NUMBERS // numbers_per_query)
    for begin in range(0, queries, size):
        yield slice(begin, min(begin + size, queries))


def index_scores(query_nID: Tensor, key_SD: Tensor, weight_nI: Tensor) -> Tensor:
    """sum_i w[n, i] relu(q[n, i] . k[s] / sqrt(D)), float32 [n, S]."""
    products_nIS = torch.matmul(query_nID.float(), key_SD.float().T) * query_nID.shape[-1] ** -0.5
    return torch.matmul(weight_nI.unsqueeze(1), products_nIS.relu()).squeeze(1)


def top_keys(query_nID: Tensor, key_SD: Tensor, weight_nI: Tensor, start: int, topk: int) -> Tensor | None:
    """The choice of one piece, from the keys of its whole sequence."""
    length = key_SD.shape[0]
    if length <= topk:
        return None
    parts = []
    for rows in chunks(query_nID.shape[0], query_nID.shape[1] * length):
        scores_nS = index_scores(query_nID[rows], key_SD, weight_nI[rows])
        # The mask comes before the top-k: a later key must not take a place.
        later = ~visible(start + rows.start, start + rows.stop, length, scores_nS.device)
        parts.append(scores_nS.masked_fill(later, float("-inf")).topk(topk, dim=-1).indices.int())
    return torch.cat(parts)


def visible(start: int, stop: int, keys: int, device: torch.device) -> Tensor:
    """[n, keys] True where the key is not later than the query, for the queries start..stop - 1."""
    query_n = torch.arange(start, stop, device=device)
    return torch.arange(keys, device=device) <= query_n.unsqueeze(1)


def chosen_mask(choice_nK: Tensor, start: int, length: int) -> Tensor:
    """[n, S] True where a query attends to a key: chosen and not later. S = `length` of the sequence."""
    stop = start + choice_nK.shape[0]
    picked = torch.zeros(stop - start, length, dtype=torch.bool, device=choice_nK.device)
    return picked.scatter_(1, choice_nK.long(), True) & visible(start, stop, length, picked.device)
