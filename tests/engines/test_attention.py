"""Packed attention against one dense softmax per sequence."""

import pytest
import torch

from engines.attention import _similar, packed_attention, sparse_packed_attention
from engines.batch import cumulative

LENGTHS = [5, 33, 1, 70, 34, 2, 33]


def _reference(q_THD, k_TGD, v_TGE, lengths, scale):
    out, start = [], 0
    repeat = q_THD.shape[1] // k_TGD.shape[1]
    for length in lengths:
        q, k, v = (x[start : start + length].transpose(0, 1) for x in (q_THD, k_TGD, v_TGE))
        k, v = k.repeat_interleave(repeat, 0), v.repeat_interleave(repeat, 0)
        scores = (scale * q @ k.transpose(1, 2)).masked_fill(torch.ones(length, length).triu(1).bool(), float("-inf"))
        out.append((scores.softmax(-1) @ v).transpose(0, 1))
        start += length
    return torch.cat(out)


@pytest.mark.parametrize("lengths", [LENGTHS, [40], [7, 7, 7], [3, 50]])
@pytest.mark.parametrize("heads, groups, value_size", [(4, 4, 24), (6, 2, 24), (4, 2, 28)])
def test_values_and_gradients_equal_dense_attention_per_sequence(lengths, heads, groups, value_size):
    torch.manual_seed(0)
    total = sum(lengths)
    inputs = [
        torch.randn(total, n, d, dtype=torch.float64) for n, d in ((heads, 24), (groups, 24), (groups, value_size))
    ]
    ours, theirs = ([x.clone().requires_grad_() for x in inputs] for _ in range(2))
    grad = torch.randn(total, heads, value_size, dtype=torch.float64)
    out = packed_attention(*ours, cumulative(lengths), 0.3)
    expected = _reference(*theirs, lengths, 0.3)
    out.backward(grad)
    expected.backward(grad)
    torch.testing.assert_close(out, expected, atol=1e-12, rtol=0)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad, atol=1e-12, rtol=0)


def test_sequences_do_not_see_each_other():
    torch.manual_seed(0)
    q, k, v = (torch.randn(30, 2, 8) for _ in range(3))
    before = packed_attention(q, k, v, cumulative([10, 20]), 1.0)
    k[:10] += 1.0
    after = packed_attention(q, k, v, cumulative([10, 20]), 1.0)
    assert torch.equal(before[10:], after[10:]) and not torch.equal(before[:10], after[:10])


def test_padding_stays_bounded():
    lengths = tuple(int(x) for x in torch.randint(1, 2000, (200,), generator=torch.Generator().manual_seed(0)))
    groups = _similar(lengths)
    assert sorted(i for members in groups for i in members) == list(range(200))
    for members in groups:
        longest = max(lengths[i] for i in members)
        assert all(longest - lengths[i] <= max(16, longest / 4) for i in members)


@pytest.mark.parametrize("kept", [1, 4, 33, 70])
def test_sparse_attention_sees_the_named_keys_and_nothing_else(kept):
    """Named keys may lie in the future or stand twice; with as many names as tokens it is plain attention."""
    torch.manual_seed(0)
    total, cu_seqlens = sum(LENGTHS), cumulative(LENGTHS)
    q, k, v = (torch.randn(total, 4, d, dtype=torch.float64, requires_grad=True) for d in (20, 20, 28))
    keys_TK = torch.zeros(total, kept, dtype=torch.int32)
    seen = []
    for start, length in zip(cu_seqlens.tolist(), LENGTHS, strict=False):
        own_SS = torch.zeros(length, length, dtype=torch.bool)
        for t in range(length):
            names = torch.randperm(length)[:kept] if length > kept else torch.arange(length)
            names[0] = t if length > kept else 0
            keys_TK[start + t, : len(names)] = names
            own_SS[t, names] = True
        seen.append(own_SS.tril())
    out = sparse_packed_attention(q, k, v, cu_seqlens, 0.2, keys_TK)
    scores_HTT = (0.2 * torch.einsum("thd,shd->hts", q, k)).masked_fill(~torch.block_diag(*seen).bool(), float("-inf"))
    expected = torch.einsum("hts,she->the", scores_HTT.softmax(-1), v)
    torch.testing.assert_close(out, expected)
    weights = torch.randn_like(out)
    for ours, theirs in zip(
        *(torch.autograd.grad((o * weights).sum(), (q, k, v)) for o in (out, expected)), strict=True
    ):
        torch.testing.assert_close(ours, theirs)
