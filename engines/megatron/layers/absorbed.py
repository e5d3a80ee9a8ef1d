"""Latent attention that attends in the latent space (DeepSeek-V2, arXiv 2405.04434, section 2.1.2).

A head's score q . (W_k c) equals (W_k^T q) . c, and its output sum_s p_s (W_v c_s) equals W_v (sum_s p_s c_s):
with the key and value projections moved to the query and the output, all heads share one key and one value, the
latent itself. The two halves of kv_b_proj are parameters of their own, under the names Ascend's MindSpeed uses.

Shape legend as in latent.py; N = dimensions of a head without position.
"""

from __future__ import annotations

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor

from engines.megatron.layers.latent import LatentAttention
from engines.megatron.layers.rotary import Rotary, rotate


class AbsorbedLatentAttention(LatentAttention):
    """`linear_k_up_proj` [H * N, C] and `linear_v_up_proj` [H * V, C] replace `linear_kv_up_proj`.

    Both hold a weight that is read here and are never called: forward hooks, adapters and quantised linears on
    them would do nothing.
    """

    def __init__(self, *args: object, **kwargs: object):
        super().__init__(*args, **kwargs)
        del self.linear_kv_up_proj
        self.linear_k_up_proj = self._up_projection(self.config.qk_head_dim)
        self.linear_v_up_proj = self._up_projection(self.config.v_head_dim)

    def _up_projection(self, head_dim: int) -> ColumnParallelLinear:
        return ColumnParallelLinear(
            self.config.kv_lora_rank,
            self.config.num_attention_heads * head_dim,
            config=self.config,
            init_method=self.config.init_method,
            gather_output=False,
            bias=False,
            skip_bias_add=False,
            is_expert=False,
            tp_group=self.tp_group,
        )

    def _query_key_value(
        self, query_latent_tR: Tensor, kv_latent_tC: Tensor, key_rope_T1P: Tensor, rotary: Rotary
    ) -> tuple[Tensor, Tensor, Tensor]:
        """[T, H, C + P], [T, 1, C + P], [T, 1, C]."""
        plain_THN, rope_THP = self._query(query_latent_tR, rotary)
        plain_THC = torch.einsum("thn,hnc->thc", plain_THN, self._per_head(self.linear_k_up_proj))
        latent_T1C = self._all_tokens(kv_latent_tC).unsqueeze(1)
        key = torch.cat([latent_T1C, rotate(key_rope_T1P, rotary, interleaved=True)], dim=-1)
        return torch.cat([plain_THC, rope_THP], dim=-1), key, latent_T1C

    def _values(self, out_THC: Tensor) -> Tensor:
        return torch.einsum("thc,hvc->thv", out_THC, self._per_head(self.linear_v_up_proj))

    def _per_head(self, linear: ColumnParallelLinear) -> Tensor:
        return linear.weight.unflatten(0, (self.num_attention_heads_per_partition, -1))

    def _all_tokens(self, x_tC: Tensor) -> Tensor:
        """The latent of every token; its gradient is the sum over the ranks that hold heads."""
        if self.config.sequence_parallel:
            return gather_from_sequence_parallel_region(x_tC, tensor_parallel_output_grad=True, group=self.tp_group)
        return copy_to_tensor_model_parallel_region(x_tC, group=self.tp_group)
