"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434) on packed sequences.

Megatron-Core builds the modules, so parameters have its names and shards. The forward pass is ours: Megatron's
hands an indexer different inputs in different versions, and under tensor parallelism it keeps, of the gradient
of the rotary key that all heads share, only the part of one rank's heads. Works with megatron-core 0.16.1 and
0.19.2.

Shape legend: T packed tokens of this context-parallel rank, t its share of them under sequence parallelism (else
t = T), X hidden size, H local heads, R query latent, C key/value latent, P rotary dimensions, D dimensions of a
query or key head, V dimensions of a value head.
"""

from __future__ import annotations

from functools import partial

import torch
from megatron.core import tensor_parallel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.multi_latent_attention import MLASelfAttention, MLASelfAttentionSubmodules
from torch import Tensor, nn

from engines.megatron.context_parallel import own_pieces
from engines.megatron.layers.rotary import Rotary, positions, rotate


class LatentAttention(MLASelfAttention):
    """Keys and values are rebuilt per head from a latent of C numbers a token."""

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **unused: object,
    ) -> tuple[Tensor, None]:
        """[t, 1, X] -> ([t, 1, X], None). What Megatron's layers pass besides (masks, rotary embeddings) is
        contained in the packed sequences."""
        assert packed_seq_params is not None, "latent attention expects packed sequences"
        hidden_tX = hidden_states.squeeze(1)
        query_latent_tR = self._query_latent(hidden_tX)
        kv_latent_tC, key_rope_T1P = self._key_value_latent(hidden_tX)
        rotary = self._rotary(packed_seq_params, hidden_tX.device)
        query, key, value = self._query_key_value(query_latent_tR, kv_latent_tC, key_rope_T1P, rotary)

        attend, index = partial(self.core_attention, attention_mask=None, packed_seq_params=packed_seq_params), None
        if self.config.attention_options.indexer is not None:
            choice, index = self.core_attention.choose(hidden_tX, query_latent_tR, rotary, packed_seq_params)
            attend = partial(attend, choice=choice)
        if self.checkpoint_core_attention and self.training:
            out = tensor_parallel.checkpoint(attend, False, query, key, value)
        else:
            out = attend(query, key, value)
        if index is not None:
            out = self.core_attention.learn(out, query, key, index, choice, packed_seq_params)
        out_THV = self._values(out.view(out.shape[0], self.num_attention_heads_per_partition, -1))
        return self.linear_proj(out_THV.flatten(1).unsqueeze(1))

    def _resolve_qk_norm_config(self, submodules: MLASelfAttentionSubmodules) -> dict[str, object]:
        """What megatron-core 0.19 builds: the parts the spec names. Its own answer refuses a standalone norm of the
        latent in models without a query latent. 0.16 does not ask."""
        return vars(submodules)

    def _query_latent(self, hidden_tX: Tensor) -> Tensor:
        """Normalised query latent [t, R]; the hidden states themselves in models without one."""
        if self.config.q_lora_rank is None:
            return hidden_tX
        latent_TR = self._full_width(self.linear_q_down_proj, hidden_tX)
        return self.q_layernorm(self._own_tokens(latent_TR))

    def _key_value_latent(self, hidden_tX: Tensor) -> tuple[Tensor, Tensor]:
        """Normalised latent [t, C] and the key part with position, not yet rotated, [T, 1, P]."""
        both = self._full_width(self.linear_kv_down_proj, hidden_tX)
        latent_TC, key_rope_TP = both.split([self.config.kv_lora_rank, self.config.qk_pos_emb_head_dim], dim=-1)
        # One key for all heads: its gradient is the sum over the ranks that hold them.
        key_rope_TP = copy_to_tensor_model_parallel_region(key_rope_TP, group=self.tp_group)
        return self.kv_layernorm(self._own_tokens(latent_TC)), key_rope_TP.unsqueeze(1)

    def _full_width(self, linear: nn.Module, hidden_tX: Tensor) -> Tensor:
        """All tokens, all output columns of a column-parallel linear."""
        return gather_from_tensor_model_parallel_region(linear(hidden_tX)[0], group=self.tp_group)

    def _own_tokens(self, x_TR: Tensor) -> Tensor:
        """Under sequence parallelism this rank's share of the tokens: what norms and up-projections expect."""
        return scatter_to_sequence_parallel_region(x_TR, group=self.tp_group) if self.config.sequence_parallel else x_TR

    def _query_key_value(
        self, query_latent_tR: Tensor, kv_latent_tC: Tensor, key_rope_T1P: Tensor, rotary: Rotary
    ) -> tuple[Tensor, Tensor, Tensor]:
        """[T, H, D], [T, H, D], [T, H, V]."""
        config, heads = self.config, self.num_attention_heads_per_partition
        both_THX = self.linear_kv_up_proj(kv_latent_tC)[0].unflatten(-1, (heads, -1))
        key_plain, value = both_THX.split([config.qk_head_dim, config.v_head_dim], dim=-1)
        key_rope = rotate(key_rope_T1P, rotary, interleaved=True).expand(-1, heads, -1)
        query = torch.cat(self._query(query_latent_tR, rotary), dim=-1)
        return query, torch.cat([key_plain, key_rope], dim=-1), value

    def _query(self, query_latent_tR: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor]:
        """The parts of each head's query without and with position, the latter rotated."""
        linear = self.linear_q_proj if self.config.q_lora_rank is None else self.linear_q_up_proj
        query_THD = linear(query_latent_tR)[0].unflatten(-1, (self.num_attention_heads_per_partition, -1))
        plain, rope = query_THD.split([self.config.qk_head_dim, self.config.qk_pos_emb_head_dim], dim=-1)
        return plain, rotate(rope, rotary, interleaved=True)

    def _values(self, out_THV: Tensor) -> Tensor:
        """Attention outputs as the output projection expects them, [T, H, V]."""
        return out_THV

    def _rotary(self, sequences: PackedSeqParams, device: torch.device) -> Rotary:
        """Cosines and sines of every token; YaRN scales both by its magnitude factor."""
        longest = max(sequences.max_seqlen_q, sequences.max_seqlen_kv)
        table, magnitude = self.rotary_pos_emb(longest, packed_seq=True), 1.0
        if self.config.rope_type == "yarn":
            table, magnitude = table
        angles_SP2 = table[:, 0, 0, : self.config.qk_pos_emb_head_dim // 2].to(device)
        angles_TP2 = angles_SP2[positions(own_pieces(sequences.cu_seqlens_q), device)]
        return angles_TP2.cos() * magnitude, angles_TP2.sin() * magnitude
