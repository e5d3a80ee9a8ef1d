"""What our attention layers must know and Megatron's TransformerConfig has no field for.

The config builder hangs one AttentionOptions on the config as `config.attention_options`; layers read it there.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class IndexerOptions:
    """The indexer of DeepSeek Sparse Attention (DeepSeek-V3.2, arXiv 2512.02556).

    heads, head_dim   its own heads, independent of the attention's
    topk              keys kept per query
    rope_interleaved  whether rotary pairs are neighbours (0,1),(2,3).. (GLM-5) or halves (DeepSeek-V3.2); they
                      are the first `qk_pos_emb_head_dim` of the head's dimensions in both
    full_layers       per global layer: True owns an indexer, False uses the choice of the last layer that does
                      (GLM-5.2, arXiv 2603.12201)
    k_norm_eps        epsilon of the LayerNorm on the indexer's keys; the rollout engine must use the same
    loss_coeff        weight of the indexer's own KL loss; 0 freezes the indexer
    """

    heads: int
    head_dim: int
    topk: int
    rope_interleaved: bool
    full_layers: tuple[bool, ...]
    k_norm_eps: float = 1e-6
    loss_coeff: float = 0.0


@dataclass(frozen=True, slots=True)  # no __dict__: Megatron-Bridge copies a config attribute by attribute
class AttentionOptions:
    """`absorb` keeps the key and value halves of kv_b_proj as two weights and attends in the latent space;
    `indexer` None means dense attention."""

    absorb: bool = False
    indexer: IndexerOptions | None = None
