"""How a trainable indexer learns: it imitates the attention it serves (DeepSeek-V3.2, arXiv 2512.02556, eq. 4).

For query t over the keys S_t it attends to, L_t = KL(p_t || softmax(index scores)), where p_t is the attention
summed over all heads and divided by their number. Nothing but the indexer receives a gradient from it: its inputs
and the target are detached. Layers that share a choice do not take part.

The engine says what a token counts (`set_token_weights`), so the loss does not depend on how a mini-batch is cut.

Shape legend: T packed tokens of this context-parallel rank, P >= T those of all, n queries of one chunk, S keys of
their sequence, K keys attended to, H local heads, G key heads (H or 1), I indexer heads.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from engines.megatron.context_parallel import Piece
from engines.megatron.layers.dsa.choice import Choice, IndexVectors, chosen_mask, chunks, index_scores

_WEIGHTS, _VALUE = "indexer_token_weights", "indexer_loss"


def set_token_weights(sequences: PackedSeqParams, weights_T: Tensor) -> None:
    """What each token of this rank contributes to the mini-batch's mean: 1 / tokens of all ranks and micro-batches,
    0 for padding and fillers. Needed before the forward pass of a training step with `loss_coeff` > 0."""
    vars(sequences)[_WEIGHTS] = weights_T


def value(sequences: PackedSeqParams) -> Tensor | None:
    """This rank's share of the loss, summed over the layers that ran so far, without `loss_coeff`."""
    return vars(sequences).get(_VALUE)


def attach(out: Tensor, loss_T: Tensor, coeff: float, sequences: PackedSeqParams) -> Tensor:
    """`out` unchanged; its backward pass also runs that of coeff * sum(weights * loss)."""
    weights_T = vars(sequences).get(_WEIGHTS)
    assert weights_T is not None, "indexer loss without token weights: call set_token_weights before the forward pass"
    loss = (loss_T * weights_T).sum()
    vars(sequences)[_VALUE] = vars(sequences).get(_VALUE, 0.0) + loss.detach()
    return _Attach.apply(out, coeff * loss)


class _Attach(torch.autograd.Function):
    @staticmethod
    def forward(ctx, out: Tensor, loss: Tensor) -> Tensor:
        ctx.save_for_backward(loss)
        return out.view_as(out)

    @staticmethod
    def backward(ctx, grad_out: Tensor) -> tuple[Tensor, Tensor]:
        (loss,) = ctx.saved_tensors
        return grad_out, torch.ones_like(loss)


def indexer_loss(
    index: IndexVectors,
    query_THD: Tensor,
    key_PGD: Tensor,
    cu_seqlens: Tensor,
    pieces: list[Piece],
    choice: Choice,
    scale: float,
    tp_group: dist.ProcessGroup,
) -> Tensor:
    """L_t of every query, float32 [T], the same on all tensor-parallel ranks. `key_PGD` holds whole sequences."""
    lengths, sizes = (cu_seqlens[1:] - cu_seqlens[:-1]).tolist(), [piece.stop - piece.start for piece in pieces]
    heads = query_THD.shape[1]
    queries, weights, attending = (x.split(sizes) for x in (index.query_TID, index.weight_TI, query_THD.detach()))
    index_keys, keys = index.key_PD.split(lengths), key_PGD.detach().split(lengths)
    losses = []
    for number, (piece, chosen) in enumerate(zip(pieces, choice, strict=True)):
        length = lengths[piece.sequence]
        if chosen is None:
            chosen = torch.arange(length, device=query_THD.device).expand(sizes[number], -1)
        for rows in chunks(sizes[number], max(heads, index.query_TID.shape[1]) * length):
            start, picked = piece.start + rows.start, chosen[rows].long()
            key_SGD, index_key_SD = keys[piece.sequence], index_keys[piece.sequence]
            target_nS = _attention(attending[number][rows], key_SGD, chosen_mask(picked, start, length), scale)
            if tp_group.size() > 1:
                dist.all_reduce(target_nS, group=tp_group)
            target_nK = target_nS.gather(1, picked)
            # Recomputed in the backward pass: the products of all indexer heads are not kept.
            losses.append(
                checkpoint(
                    _divergence,
                    *(queries[number][rows], index_key_SD, weights[number][rows], picked, target_nK, start),
                    use_reentrant=False,
                )
            )
    return torch.cat(losses)


@torch.no_grad()
def _attention(query_nHD: Tensor, key_SGD: Tensor, mask_nS: Tensor, scale: float) -> Tensor:
    """Attention probabilities summed over local heads, float32 [n, S]."""
    key_HDS = key_SGD.float().permute(1, 2, 0)
    logits_HnS = torch.matmul(query_nHD.float().transpose(0, 1), key_HDS) * scale
    return logits_HnS.masked_fill(~mask_nS, float("-inf")).softmax(dim=-1).sum(dim=0)


def _divergence(
    query_nID: Tensor, key_SD: Tensor, weight_nI: Tensor, picked_nK: Tensor, target_nK: Tensor, start: int
) -> Tensor:
    """KL(target / sum(target) || softmax(scores)) over the picked keys that are not later, [n]."""
    position_n = torch.arange(start, start + picked_nK.shape[0], device=picked_nK.device)
    seen_nK = picked_nK <= position_n.unsqueeze(1)
    scores_nK = index_scores(query_nID, key_SD, weight_nI).gather(1, picked_nK)
    # A finite floor and not -inf: a row's later keys are multiplied by probability 0 below.
    log_q_nK = scores_nK.masked_fill(~seen_nK, torch.finfo(torch.float32).min).log_softmax(dim=-1)
    p_nK = (target_nK * seen_nK) / (target_nK * seen_nK).sum(dim=-1, keepdim=True)
    return (torch.special.xlogy(p_nK, p_nK) - p_nK * log_q_nK).sum(dim=-1)
