"""The indexer: small multi-query attention scores that decide which keys the large one looks at.

As in DeepSeek-V3.2 (arXiv 2512.02556) and GLM-5, without the Hadamard rotation and the 8-bit products of their
inference code: the rotation is orthogonal and cancels in the scores. Every tensor-parallel rank holds the whole
indexer and computes the same choice for all tokens.

Shape legend: T packed tokens of this context-parallel rank, P >= T those of all, X hidden size, R query latent,
I indexer heads, D their size.
"""

from __future__ import annotations

import torch
from megatron.core.transformer.transformer_config import MLATransformerConfig
from torch import Tensor, nn
from torch.nn import functional

from engines.megatron.context_parallel import gather_sequences, own_pieces
from engines.megatron.layers.dsa.choice import Choice, IndexVectors, top_keys
from engines.megatron.layers.rotary import Rotary, rotate


class ReplicatedLinear(nn.Module):
    """A matrix that every tensor-parallel rank holds whole. Ranks see the same inputs, so its gradient is
    complete on each of them and must not be summed."""

    def __init__(self, config: MLATransformerConfig, in_features: int, out_features: int):
        super().__init__()
        self.weight = _parameter(config, torch.empty(out_features, in_features))
        if config.perform_initialization:
            config.init_method(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight)


class KeyNorm(nn.Module):
    """LayerNorm with bias, in float32 whatever the model's dtype: rollout engines do the same."""

    def __init__(self, config: MLATransformerConfig, size: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = _parameter(config, torch.ones(size))
        self.bias = _parameter(config, torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        out = functional.layer_norm(x.float(), self.weight.shape, self.weight.float(), self.bias.float(), self.eps)
        return out.to(x.dtype)


class Indexer(nn.Module):
    """Frozen unless `loss_coeff` > 0: the policy loss reaches it through no path, a choice has no gradient."""

    def __init__(self, config: MLATransformerConfig):
        super().__init__()
        options = config.attention_options.indexer
        self.options = options
        self.rope_dim = config.qk_pos_emb_head_dim
        self.linear_wq_b = ReplicatedLinear(config, config.q_lora_rank, options.heads * options.head_dim)
        self.linear_wk = ReplicatedLinear(config, config.hidden_size, options.head_dim)
        self.k_norm = KeyNorm(config, options.head_dim, options.k_norm_eps)
        self.linear_weights_proj = ReplicatedLinear(config, config.hidden_size, options.heads)
        self.requires_grad_(options.loss_coeff > 0)

    def forward(self, index: IndexVectors, cu_seqlens: Tensor) -> Choice:
        """The keys of every query, per piece that this rank holds of the sequences `cu_seqlens` [B+1]."""
        pieces, lengths = own_pieces(cu_seqlens), (cu_seqlens[1:] - cu_seqlens[:-1]).tolist()
        sizes, keys = [piece.stop - piece.start for piece in pieces], index.key_PD.split(lengths)
        with torch.no_grad():
            return [
                top_keys(query, keys[piece.sequence], weight, piece.start, self.options.topk)
                for piece, query, weight in zip(
                    pieces, index.query_TID.split(sizes), index.weight_TI.split(sizes), strict=True
                )
            ]

    def project(self, hidden_TX: Tensor, query_latent_TR: Tensor, rotary: Rotary, cu_seqlens: Tensor) -> IndexVectors:
        """From the layer's normalised input and its normalised query latent, both detached."""
        query_TID = self.linear_wq_b(query_latent_TR).unflatten(-1, (self.options.heads, self.options.head_dim))
        key_T1D = self.k_norm(self.linear_wk(hidden_TX)).unsqueeze(1)
        weight_TI = self.linear_weights_proj(hidden_TX).float() * self.options.heads**-0.5
        key_TD = self._with_position(key_T1D, rotary).squeeze(1)
        (key_PD,) = gather_sequences(key_TD, cu_seqlens=cu_seqlens)
        return IndexVectors(self._with_position(query_TID, rotary), key_PD, weight_TI)

    def _with_position(self, x_TID: Tensor, rotary: Rotary) -> Tensor:
        """The first `rope_dim` dimensions turn, the rest passes."""
        turned = rotate(x_TID[..., : self.rope_dim], rotary, self.options.rope_interleaved)
        return torch.cat([turned, x_TID[..., self.rope_dim :]], dim=-1)


def _parameter(config: MLATransformerConfig, value: Tensor) -> nn.Parameter:
    device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
    return nn.Parameter(value.to(device=device, dtype=config.params_dtype))
