"""Keys and values of the rows that decode now, one preallocated tensor per layer, rows packed to the front.

Shape legend: R rows, S positions, H query heads, G key/value heads, n = H / G, D head size of q and k,
E head size of v, T packed prompt tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from engines.hf_model import PackedAttend


class PrefillAttend:
    """Packed causal attention that keeps every layer's keys and values."""

    def __init__(self, cu_seqlens: Tensor) -> None:
        self._attend = PackedAttend(cu_seqlens)
        self.layers: list[tuple[Tensor, Tensor]] = []

    def __call__(self, layer: int, q_1HTD: Tensor, k_1GTD: Tensor, v_1GTE: Tensor, scale: float) -> Tensor:
        assert layer == len(self.layers), f"layer {layer} attends after layer {len(self.layers) - 1}"
        self.layers.append((k_1GTD[0].transpose(0, 1), v_1GTE[0].transpose(0, 1)))
        return self._attend(layer, q_1HTD, k_1GTD, v_1GTE, scale)


class KvCache:
    """Rows 0..R-1 are alive. Positions grow by half when they run out; unread ones are finite, never NaN."""

    def __init__(self, max_rows: int, positions: int) -> None:
        self.max_rows = max_rows
        self.positions = positions
        self._layers: list[tuple[Tensor, Tensor]] = []
        self._at_R: Tensor | None = None
        self._mask_R11S: Tensor | None = None

    def fill(self, first: int, count: int, layers: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Put one prompt's keys [T, G, D] and values [T, G, E] into `count` rows from `first` on."""
        length = layers[0][0].shape[0]
        self._reserve(length)
        if not self._layers:
            self._layers = [
                (
                    k.new_zeros(self.max_rows, self.positions, *k.shape[1:]),
                    v.new_zeros(self.max_rows, self.positions, *v.shape[1:]),
                )
                for k, v in layers
            ]
        for mine, given in zip(self._layers, layers, strict=True):
            for store_RSGD, new_TGD in zip(mine, given, strict=True):
                store_RSGD[first : first + count, :length] = new_TGD

    def move(self, sources: list[int], targets: list[int]) -> None:
        """Copy rows; sources and targets are disjoint."""
        for layer in self._layers:
            for store_RSGD in layer:
                store_RSGD[targets] = store_RSGD[sources]

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

    def __call__(self, layer: int, q_RH1D: Tensor, k_RG1D: Tensor, v_RG1E: Tensor, scale: float) -> Tensor:
        """Store this token and attend to all of its row: [R, 1, H, E].

        The n query heads of one key/value head are handed over as n queries: no key is repeated.
        """
        keys_RSGD, values_RSGE = self._layers[layer]
        rows, heads = q_RH1D.shape[:2]
        groups, length = k_RG1D.shape[1], self._mask_R11S.shape[-1]
        index_R = torch.arange(rows, device=q_RH1D.device)
        keys_RSGD[index_R, self._at_R] = k_RG1D[:, :, 0]
        values_RSGE[index_R, self._at_R] = v_RG1E[:, :, 0]
        out_RGnE = scaled_dot_product_attention(
            q_RH1D.reshape(rows, groups, heads // groups, -1),
            keys_RSGD[:rows, :length].transpose(1, 2),
            values_RSGE[:rows, :length].transpose(1, 2),
            attn_mask=self._mask_R11S,
            scale=scale,
        )
        return out_RGnE.reshape(rows, 1, heads, -1)

    def _reserve(self, length: int) -> None:
        if length <= self.positions:
            return
        extra = max(length, self.positions * 3 // 2) - self.positions
        self.positions += extra
        self._layers = [
            tuple(torch.cat([x, x.new_zeros(x.shape[0], extra, *x.shape[2:])], dim=1) for x in layer)
            for layer in self._layers
        ]
