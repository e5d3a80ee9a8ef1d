"""Attention over the chosen keys.

Cost: a sequence longer than `topk` is attended with a mask, some queries at a time. Time grows as in dense causal
attention, and what the backward pass keeps of the masks is half a byte per query and key of a sequence: recompute
activations for long ones. Kernels that skip the other keys exist on Ascend (MindSpeed) only.

Shape legend: T packed tokens of this context-parallel rank, P >= T those of all, n tokens of one piece of a
sequence, S of the whole sequence, H query heads, G key heads (H or 1), D size of query and key heads, E size of
value heads, t tokens of this rank under sequence parallelism.
"""

from __future__ import annotations

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import MLATransformerConfig
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from engines.megatron.context_parallel import Piece, gather_sequences, own_pieces
from engines.megatron.layers.attention import PackedCoreAttention, piece_attention
from engines.megatron.layers.dsa import sharing
from engines.megatron.layers.dsa.choice import Choice, IndexVectors, chosen_mask, chunks
from engines.megatron.layers.dsa.indexer import Indexer
from engines.megatron.layers.dsa.loss import attach, indexer_loss
from engines.megatron.layers.rotary import Rotary


class SparseCoreAttention(PackedCoreAttention):
    """Core attention with an `indexer`; a layer that shares another's choice has none."""

    def __init__(
        self, config: MLATransformerConfig, layer_number: int, pg_collection: ProcessGroupCollection, **kwargs: object
    ):
        super().__init__(config, layer_number, **kwargs)
        self.layer = layer_number - 1  # global, from 0
        self.options = config.attention_options.indexer
        self.sequence_parallel = config.sequence_parallel
        self.tp_group = pg_collection.tp
        if sharing.is_full(self.options, self.layer):
            self.indexer = Indexer(config)

    def choose(
        self, hidden_tX: Tensor, query_latent_tR: Tensor, rotary: Rotary, sequences: PackedSeqParams
    ) -> tuple[Choice, IndexVectors | None]:
        """The keys of every query of the micro-batch, from this layer's indexer or the one it shares; and what
        the indexer's loss needs, if there is to be one."""
        cu_seqlens = sequences.cu_seqlens_q
        if not sharing.is_full(self.options, self.layer):
            return sharing.find(sequences, self.options, self.layer), None
        learn = self.options.loss_coeff > 0 and self.training and torch.is_grad_enabled()
        longest = int((cu_seqlens[1:] - cu_seqlens[:-1]).max())
        if longest <= self.options.topk and not learn:
            index, choice = None, [None] * len(own_pieces(cu_seqlens))
        else:
            inputs = (self._all_tokens(x.detach()) for x in (hidden_tX, query_latent_tR))
            with torch.set_grad_enabled(learn):
                index = self.indexer.project(*inputs, rotary, cu_seqlens)
            choice = self.indexer(index, cu_seqlens)
        sharing.leave(sequences, self.options, self.layer, choice)
        return choice, index if learn else None

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        packed_seq_params: PackedSeqParams,
        choice: Choice,
    ) -> Tensor:
        """query [T, H, D], key [T, G, D], value [T, G, E] -> [T, H * E]."""
        if all(keys is None for keys in choice):
            return super().forward(query, key, value, None, packed_seq_params=packed_seq_params)
        cu_seqlens = packed_seq_params.cu_seqlens_q
        key, value = gather_sequences(key, value, cu_seqlens=cu_seqlens)
        out = sparse_attention(query, key, value, cu_seqlens, own_pieces(cu_seqlens), choice, self.softmax_scale)
        return out.flatten(1)

    def learn(
        self, out: Tensor, query: Tensor, key: Tensor, index: IndexVectors, choice: Choice, sequences: PackedSeqParams
    ) -> Tensor:
        """`out`, with the indexer's loss attached to its backward pass."""
        cu_seqlens = sequences.cu_seqlens_q
        (key,) = gather_sequences(key.detach(), cu_seqlens=cu_seqlens)
        pieces = own_pieces(cu_seqlens)
        loss_T = indexer_loss(index, query, key, cu_seqlens, pieces, choice, self.softmax_scale, self.tp_group)
        return attach(out, loss_T, self.options.loss_coeff, sequences)

    def _all_tokens(self, x_tX: Tensor) -> Tensor:
        return gather_from_sequence_parallel_region(x_tX) if self.sequence_parallel else x_tX


def sparse_attention(
    q_THD: Tensor,
    k_PGD: Tensor,
    v_PGE: Tensor,
    cu_seqlens: Tensor,
    pieces: list[Piece],
    choice: Choice,
    scale: float,
) -> Tensor:
    """softmax(scale * q k^T) v over the chosen keys of each query. Returns [T, H, E]; differentiable.

    pieces  what the T queries are, in their order; the keys and values are those of whole sequences
    """
    lengths = (cu_seqlens[1:] - cu_seqlens[:-1]).tolist()
    keys, values = k_PGD.split(lengths), v_PGE.split(lengths)
    queries = q_THD.split([piece.stop - piece.start for piece in pieces])
    outputs: dict[int, Tensor] = {}
    for number, (piece, chosen) in enumerate(zip(pieces, choice, strict=True)):
        if chosen is not None:
            sequence = keys[piece.sequence], values[piece.sequence]
            outputs[number] = _masked_attention(queries[number], *sequence, piece.start, chosen, scale)
    dense = [number for number in range(len(pieces)) if number not in outputs]
    if dense:
        rows, some = torch.cat([queries[number] for number in dense]), [pieces[number] for number in dense]
        out = piece_attention(rows, k_PGD, v_PGE, cu_seqlens, some, scale)
        outputs.update(zip(dense, out.split([piece.stop - piece.start for piece in some]), strict=True))
    return torch.cat([outputs[number] for number in range(len(pieces))])


def _masked_attention(
    q_nHD: Tensor, k_SGD: Tensor, v_SGE: Tensor, start: int, choice_nK: Tensor, scale: float
) -> Tensor:
    """One piece, [n, H, E]. Chunks of queries leave out the keys behind their last query."""
    count, heads, _ = q_nHD.shape
    length = k_SGD.shape[0]
    # Expanded and not grouped: only the reference kernel takes groups and a mask together.
    k_HSD, v_HSE = (x.transpose(0, 1).expand(heads, -1, -1) for x in (k_SGD, v_SGE))
    out = []
    for rows in chunks(count, heads * length):
        stop = start + rows.stop
        mask_nS = chosen_mask(choice_nK[rows], start + rows.start, length)[:, :stop]
        query_HnD = q_nHD[rows].transpose(0, 1)
        out_1HnE = scaled_dot_product_attention(
            query_HnD[None], k_HSD[None, :, :stop], v_HSE[None, :, :stop], mask_nS, scale=scale
        )
        out.append(out_1HnE[0].transpose(0, 1))
    return torch.cat(out)
