"""Core attention over packed sequences.

Megatron-Core's own DotProductAttention knows neither packed sequences nor head sizes that differ between
keys and values; TransformerEngine's does but runs on CUDA only.
"""

from __future__ import annotations

import math

from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from engines.attention import packed_attention


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
        assert config.context_parallel_size == 1, "PackedCoreAttention does not split sequences over ranks"
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
        """query [T, H, D], key [T, G, D], value [T, G, E] -> [T, H * E]."""
        assert packed_seq_params is not None and attention_bias is None, "expected packed sequences without bias"
        return packed_attention(query, key, value, packed_seq_params.cu_seqlens_q, self.softmax_scale).flatten(1)
