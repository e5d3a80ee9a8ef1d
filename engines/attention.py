"""Causal attention over packed sequences, in portable torch.

Shape legend: T packed tokens, b sequences of one padded group, S longest of them,
H query heads, G key/value heads (H % G == 0), D head size of q and k, E head size of v.

Sequences of similar length share one padded `scaled_dot_product_attention` call. They are left-aligned:
padding comes after the real tokens, so under a causal mask no real token ever sees it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

# A sequence may join a group when its padding stays below a quarter of the longest member or below this
# many tokens: for short sequences the cost of one more call outweighs that of the padding.
_CHEAP_PADDING = 16
# On the host the bfloat16 backward kernel is slower than float32 up to about this length (torch 2.13, AVX512 and
# AMX: 30 ms against 14 ms for 16 sequences of 64); float32 is also the more exact.
_HOST_FLOAT32_LENGTH = 128


@dataclass(frozen=True)
class _Group:
    """`rows_bS` reads the padded batch from the packed tokens; `real` lists its real entries (None: all)."""

    rows_bS: Tensor
    real: Tensor | None


def packed_attention(q_THD: Tensor, k_TGD: Tensor, v_TGE: Tensor, cu_seqlens: Tensor, scale: float) -> Tensor:
    """softmax(scale * q k^T) v within each sequence, causal. Returns [T, H, E]; differentiable.

    cu_seqlens  [B+1] offsets as in TrainBatch. Keep it on the host: its values steer python code.
    """
    lengths = (cu_seqlens[1:] - cu_seqlens[:-1]).tolist()
    assert sum(lengths) == q_THD.shape[0], f"cu_seqlens covers {sum(lengths)} tokens, q has {q_THD.shape[0]}"
    groups, order_T = _plan(tuple(lengths), q_THD.device)
    if order_T is None:
        return _attend(q_THD, k_TGD, v_TGE, groups[0], scale)
    return torch.cat([_attend(q_THD, k_TGD, v_TGE, group, scale) for group in groups]).index_select(0, order_T)


def sparse_packed_attention(
    q_THD: Tensor, k_THD: Tensor, v_THE: Tensor, cu_seqlens: Tensor, scale: float, keys_TK: Tensor
) -> Tensor:
    """`packed_attention` in which token t sees only those of its earlier tokens that `keys_TK[t]` names.

    keys_TK  positions inside t's own sequence, also later ones and doubles; a sequence of at most K tokens names all
    """
    lengths = (cu_seqlens[1:] - cu_seqlens[:-1]).tolist()
    if max(lengths) <= keys_TK.shape[1]:  # nothing is left out
        return packed_attention(q_THD, k_THD, v_THE, cu_seqlens, scale)
    outputs = []
    for q_SHD, k_SHD, v_SHE, keys_SK in zip(*(x.split(lengths) for x in (q_THD, k_THD, v_THE, keys_TK)), strict=True):
        seen_SS = torch.zeros(len(q_SHD), len(q_SHD), dtype=torch.bool, device=q_SHD.device)
        seen_SS.scatter_(1, keys_SK.long(), True).tril_()
        out_HSE = scaled_dot_product_attention(
            *(x.transpose(0, 1) for x in (q_SHD, k_SHD, v_SHE)), attn_mask=seen_SS, scale=scale
        )
        outputs.append(out_HSE.transpose(0, 1))
    return torch.cat(outputs)


def _attend(q_THD: Tensor, k_TGD: Tensor, v_TGE: Tensor, group: _Group, scale: float) -> Tensor:
    """Outputs of one group's real tokens, [tokens of the group, H, E]."""
    dtype = q_THD.dtype
    if q_THD.device.type == "cpu" and dtype == torch.bfloat16 and group.rows_bS.shape[1] <= _HOST_FLOAT32_LENGTH:
        q_THD, k_TGD, v_TGE = q_THD.float(), k_TGD.float(), v_TGE.float()
    q_bHSD, k_bGSD, v_bGSE = (_padded(x, group.rows_bS) for x in (q_THD, k_TGD, v_TGE))
    out_bHSE = scaled_dot_product_attention(
        q_bHSD, k_bGSD, v_bGSE, is_causal=True, scale=scale, enable_gqa=q_bHSD.shape[1] != k_bGSD.shape[1]
    )
    out_THE = out_bHSE.transpose(1, 2).flatten(0, 1).to(dtype)
    return out_THE if group.real is None else out_THE.index_select(0, group.real)


def _padded(x_THD: Tensor, rows_bS: Tensor) -> Tensor:
    """[T, H, D] -> [b, H, S, D]."""
    b, S = rows_bS.shape
    if b * S == x_THD.shape[0] and b == 1:  # one sequence: nothing to gather
        return x_THD.transpose(0, 1).unsqueeze(0)
    return x_THD.index_select(0, rows_bS.flatten()).unflatten(0, (b, S)).transpose(1, 2)


@lru_cache(maxsize=64)
def _plan(lengths: tuple[int, ...], device: torch.device) -> tuple[list[_Group], Tensor | None]:
    """Groups of similar length, and where each packed token is in their concatenated outputs (None: in order).

    Cached: every layer of a model asks for the same batch.
    """
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    groups, written = [], []
    for members in _similar(lengths):
        longest = max(lengths[i] for i in members)
        # Padding repeats the last real token; what is computed there is never read.
        rows = [[starts[i] + min(s, lengths[i] - 1) for s in range(longest)] for i in members]
        real = [n * longest + s for n, i in enumerate(members) for s in range(lengths[i])]
        full = len(real) == longest * len(members)
        groups.append(_Group(torch.tensor(rows, device=device), None if full else torch.tensor(real, device=device)))
        written += [starts[i] + s for i in members for s in range(lengths[i])]
    if written == list(range(len(written))):
        order_T = None if len(groups) == 1 else torch.arange(len(written), device=device)
    else:
        order_T = torch.empty(len(written), dtype=torch.int64)
        order_T[torch.tensor(written)] = torch.arange(len(written))
        order_T = order_T.to(device)
    return groups, order_T


def _similar(lengths: tuple[int, ...]) -> list[list[int]]:
    """Sequence numbers by group: longest first, each group open until padding would become expensive."""
    groups: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if lengths[i] == 0:
            continue
        longest = lengths[groups[-1][0]] if groups else 0
        padding = longest - lengths[i]
        if groups and (padding <= _CHEAP_PADDING or 4 * padding <= longest):
            groups[-1].append(i)
        else:
            groups.append([i])
    return [sorted(members) for members in groups]
