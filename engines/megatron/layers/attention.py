"""Core attention over packed sequences, whole or split over context-parallel ranks.

Shape legend: C tokens of this rank, P >= C those of all context-parallel ranks, H query heads, G key/value
heads, D head size of q and k, E head size of v; b pieces of one length, L their tokens, S the keys they see.

Megatron-Core's own DotProductAttention knows neither packed sequences nor head sizes that differ between
keys and values; TransformerEngine's does but runs on CUDA only.
"""

from __future__ import annotations

import math
from collections import defaultdict

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from engines.attention import packed_attention
from engines.megatron.context_parallel import Piece, gather_sequences, own_pieces


class PackedCoreAttention(nn.Module):
    """Causal attention within each packed sequence.

    `softmax_scale` None means 1/sqrt(head size). The remaining arguments are what layer specs pass.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: object = None,
        attention_type: str = "self",
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        cp_comm_type: str | None = None,
        pg_collection: object = None,
    ):
        super().__init__()
        self.split = config.context_parallel_size > 1
        assert attention_type == "self", f"PackedCoreAttention is causal self-attention, got {attention_type}"
        self.softmax_scale = softmax_scale or 1.0 / math.sqrt(k_channels or config.kv_channels)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: object = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """query [C, H, D], key [C, G, D], value [C, G, E] -> [C, H * E]; the offsets are those of all P tokens."""
        assert packed_seq_params is not None and attention_bias is None, "expected packed sequences without bias"
        cu_seqlens = packed_seq_params.cu_seqlens_q
        if not self.split:
            return packed_attention(query, key, value, cu_seqlens, self.softmax_scale).flatten(1)
        key, value = gather_sequences(key, value, cu_seqlens=cu_seqlens)
        return piece_attention(query, key, value, cu_seqlens, own_pieces(cu_seqlens), self.softmax_scale).flatten(1)


def piece_attention(
    q_CHD: Tensor, k_PGD: Tensor, v_PGE: Tensor, cu_seqlens: Tensor, pieces: list[Piece], scale: float
) -> Tensor:
    """softmax(scale * q k^T) v for the queries of some pieces of sequences, causal. Returns [C, H, E]; differentiable.

    pieces  what the C queries are, in their order; the keys and values are those of whole sequences
    Pieces of equal length and position share one call. On the host the lower-right mask costs L x S booleans, on
    CUDA the kernels know it.
    """
    queries = q_CHD.split([piece.stop - piece.start for piece in pieces])
    lengths = (cu_seqlens[1:] - cu_seqlens[:-1]).tolist()
    keys, values = k_PGD.split(lengths), v_PGE.split(lengths)
    alike: dict[tuple[int, int], list[int]] = defaultdict(list)
    for number, piece in enumerate(pieces):
        alike[piece.start, piece.stop].append(number)
    outputs: list[Tensor] = [q_CHD] * len(pieces)
    for (start, stop), numbers in alike.items():
        seen = [pieces[number].sequence for number in numbers]
        out_bHLE = scaled_dot_product_attention(
            torch.stack([queries[number] for number in numbers]).transpose(1, 2),
            torch.stack([keys[sequence][:stop] for sequence in seen]).transpose(1, 2),
            torch.stack([values[sequence][:stop] for sequence in seen]).transpose(1, 2),
            attn_mask=causal_lower_right(stop - start, stop),
            scale=scale,
            enable_gqa=q_CHD.shape[1] != k_PGD.shape[1],
        )
        for number, out_LHE in zip(numbers, out_bHLE.transpose(1, 2), strict=True):
            outputs[number] = out_LHE
    return torch.cat(outputs)
