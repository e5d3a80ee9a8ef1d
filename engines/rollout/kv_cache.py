"""Keys and values of the rows that decode now, one preallocated tensor per layer, rows packed to the front.

Latent attention (DeepSeek) is cached like any other, as the keys and values of its heads: this engine trades memory
for not expanding every latent again at every token. A layer of sparse attention with an indexer of its own also
caches its index keys.

Shape legend: R rows, S positions, H query heads, G key/value heads, n = H / G, D head size of q and k,
E head size of v, I index head size, K keys that a sparse layer chose, T packed prompt tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from engines.hf_model import PackedAttend
from engines.sparse_index import Indexer, IndexInputs, choose_packed

# k [T, G, D], v [T, G, E], and the index keys [T, I] of a layer that has an indexer.
Layer = tuple[Tensor, ...]


class PrefillAttend:
    """Packed causal attention that keeps every layer's keys and values."""

    def __init__(self, cu_seqlens: Tensor) -> None:
        self._attend = PackedAttend(cu_seqlens)
        self._index_keys: list[Tensor] = []  # of the layer that attends next, sequence by sequence
        self.layers: list[Layer] = []

    def __call__(
        self, layer: int, q_1HTD: Tensor, k_1GTD: Tensor, v_1GTE: Tensor, scale: float, keys_1TK: Tensor | None
    ) -> Tensor:
        assert layer == len(self.layers), f"layer {layer} attends after layer {len(self.layers) - 1}"
        index = (torch.cat(self._index_keys),) if self._index_keys else ()
        self._index_keys = []
        self.layers.append((k_1GTD[0].transpose(0, 1), v_1GTE[0].transpose(0, 1), *index))
        return self._attend(layer, q_1HTD, k_1GTD, v_1GTE, scale, keys_1TK)

    def choose(self, indexer: Indexer, inputs: IndexInputs) -> Tensor:
        return choose_packed(indexer, inputs, self._attend.cu_seqlens, self._keep)

    def _keep(self, keys_1SI: Tensor) -> Tensor:
        self._index_keys.append(keys_1SI[0])
        return keys_1SI


class KvCache:
    """Rows 0..R-1 are alive. Positions grow by half when they run out; unread ones are finite, never NaN."""

    def __init__(self, max_rows: int, positions: int) -> None:
        self.max_rows = max_rows
        self.positions = positions
        self._layers: list[Layer] = []
        self._at_R: Tensor | None = None
        self._mask_R11S: Tensor | None = None

    def fill(self, first: int, count: int, layers: Sequence[Layer]) -> None:
        """Put what PrefillAttend kept of one prompt into `count` rows from `first` on."""
        length = layers[0][0].shape[0]
        self._reserve(length)
        if not self._layers:
            self._layers = [
                tuple(x.new_zeros(self.max_rows, self.positions, *x.shape[1:]) for x in layer) for layer in layers
            ]
        for mine, given in zip(self._layers, layers, strict=True):
            for store_RS, new_T in zip(mine, given, strict=True):
                store_RS[first : first + count, :length] = new_T

    def move(self, sources: list[int], targets: list[int]) -> None:
        """Copy rows; sources and targets are disjoint."""
        for layer in self._layers:
            for store_RS in layer:
                store_RS[targets] = store_RS[sources]

    def at(self, positions: list[int]) -> KvCache:
        """Get ready for one token per row: row r's token stands at `positions[r]`."""
        length = max(positions) + 1
        self._reserve(length)
        device, dtype = self._layers[0][0].device, self._layers[0][0].dtype
        self._at_R = torch.tensor(positions, device=device)
        hidden_RS = torch.arange(length, device=device) > self._at_R.unsqueeze(-1)
        self._mask_R11S = torch.zeros(hidden_RS.shape, dtype=dtype, device=device).masked_fill_(
            hidden_RS, float("-inf")
        )[:, None, None]
        return self

    def __call__(
        self, layer: int, q_RH1D: Tensor, k_RG1D: Tensor, v_RG1E: Tensor, scale: float, keys_R1K: Tensor | None
    ) -> Tensor:
        """Store this token and attend to all of its row, or to the chosen keys: [R, 1, H, E].

        The n query heads of one key/value head are handed over as n queries: no key is repeated.
        """
        keys_RSGD, values_RSGE = self._layers[layer][:2]
        rows, heads = q_RH1D.shape[:2]
        groups, length = k_RG1D.shape[1], self._mask_R11S.shape[-1]
        index_R = torch.arange(rows, device=q_RH1D.device)
        keys_RSGD[index_R, self._at_R] = k_RG1D[:, :, 0]
        values_RSGE[index_R, self._at_R] = v_RG1E[:, :, 0]
        mask_R11S = self._mask_R11S
        if keys_R1K is not None:
            dropped_R1S = torch.ones_like(mask_R11S[:, 0], dtype=torch.bool).scatter_(-1, keys_R1K.long(), False)
            mask_R11S = mask_R11S.masked_fill(dropped_R1S.unsqueeze(1), float("-inf"))
        out_RGnE = scaled_dot_product_attention(
            q_RH1D.reshape(rows, groups, heads // groups, -1),
            keys_RSGD[:rows, :length].transpose(1, 2),
            values_RSGE[:rows, :length].transpose(1, 2),
            attn_mask=mask_R11S,
            scale=scale,
        )
        return out_RGnE.reshape(rows, 1, heads, -1)

    def choose(self, indexer: Indexer, inputs: IndexInputs) -> Tensor:
        """Store this token's index key and choose among all of its row: [R, 1, K]."""
        index_keys_RSI = self._layers[indexer.layer][2]
        rows, length = len(self._at_R), self._mask_R11S.shape[-1]

        def store(keys_R1I: Tensor) -> Tensor:
            index_keys_RSI[torch.arange(rows, device=keys_R1I.device), self._at_R] = keys_R1I[:, 0]
            return index_keys_RSI[:rows, :length]

        return indexer.choose(inputs, self._mask_R11S[:, 0].float(), store)

    def _reserve(self, length: int) -> None:
        if length <= self.positions:
            return
        extra = max(length, self.positions * 3 // 2) - self.positions
        self.positions += extra
        self._layers = [
            tuple(torch.cat([x, x.new_zeros(x.shape[0], extra, *x.shape[2:])], dim=1) for x in layer)
            for layer in self._layers
        ]
