"""Teach Megatron-Bridge the split of `kv_b_proj` that absorbed latent attention needs.

The rows of `kv_b_proj` are, head by head, N key rows without position and then V value rows. Absorbed attention
keeps them apart: `linear_k_up_proj` holds the key rows of all heads, `linear_v_up_proj` the value rows. A
tensor-parallel rank owns whole heads, so each half is cut like any column-parallel weight, after the split.
Imports megatron.bridge: import this module through `megatron_bridge.import_megatron_bridge`.

Shape legend: H heads, N and V rows of a head for keys and values, C rank of the latent.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from megatron.bridge.models.conversion.mapping_registry import MegatronMappingRegistry
from megatron.bridge.models.conversion.model_bridge import MegatronModelBridge
from megatron.bridge.models.conversion.param_mapping import ColumnParallelMapping
from megatron.bridge.models.deepseek import DeepSeekV3Bridge
from megatron.bridge.models.glm_moe_dsa import GLM5Bridge
from megatron.core.models.gpt import GPTModel
from torch import Tensor, nn

LIVE = "{layer}.self_attention.linear_{half}_up_proj.weight"
HF = "model.layers.{layer}.self_attn.kv_b_proj.weight"
MTP_LAYERS = ("transformer_layer", "mtp_model_layer")  # what the layer inside an MTP block is called


class KvHalf(ColumnParallelMapping):
    """One half of kv_b_proj; the two halves of a layer share `exported` and the second to come out joins them."""

    def __init__(
        self, megatron_param: str, hf_param: str, half: str, sizes: tuple[int, int], exported: dict[str, Tensor]
    ) -> None:
        super().__init__(megatron_param, hf_param)
        self.half, self.sizes, self.exported = half, sizes, exported

    def resolve(self, captures: tuple[str, ...]) -> KvHalf:
        return KvHalf(*self._resolve_names(captures), self.half, self.sizes, self.exported)

    def hf_to_megatron(self, hf_weights: Tensor, megatron_module: nn.Module) -> Tensor:
        """[H * (N + V), C] -> this rank's rows of the half."""
        return super().hf_to_megatron(split_kv(hf_weights, self.sizes)[self.half], megatron_module)

    def megatron_to_hf(self, megatron_weights: Tensor | None, megatron_module: nn.Module | None) -> dict[str, Tensor]:
        """Nothing for the first half, {name: [H * (N + V), C]} once both are there."""
        for name, tensor in super().megatron_to_hf(megatron_weights, megatron_module).items():
            other = self.exported.pop(name, None)
            if other is None:
                self.exported[name] = tensor
                return {}
            key, value = (tensor, other) if self.half == "k" else (other, tensor)
            return {name: join_kv(key, value, self.sizes)}
        return {}


def split_kv(kv_b: Tensor, sizes: tuple[int, int]) -> dict[str, Tensor]:
    """[H * (N + V), C] -> {"k": [H * N, C], "v": [H * V, C]}."""
    key, value = kv_b.unflatten(0, (-1, sum(sizes))).split(sizes, dim=1)
    return {"k": key.flatten(0, 1), "v": value.flatten(0, 1)}


def join_kv(key: Tensor, value: Tensor, sizes: tuple[int, int]) -> Tensor:
    """The inverse of `split_kv`."""
    return torch.cat([key.unflatten(0, (-1, sizes[0])), value.unflatten(0, (-1, sizes[1]))], dim=1).flatten(0, 1)


def kv_split_mappings(config: Any) -> list[KvHalf]:
    """Both halves for the decoder layers and for the layers inside MTP blocks."""
    sizes = (config.qk_nope_head_dim, config.v_head_dim)
    exported: dict[str, Tensor] = {}
    places = [("decoder.layers.*", "*")] + [
        (f"mtp.layers.{depth}.{inner}", str(config.num_hidden_layers + depth))
        for depth in range(config.num_nextn_predict_layers or 0)
        for inner in MTP_LAYERS
    ]
    return [
        KvHalf(LIVE.format(layer=live, half=half), HF.format(layer=layer), half, sizes, exported)
        for live, layer in places
        for half in ("k", "v")
    ]


def register_kv_split() -> None:
    """From now on AutoBridge converts absorbed models of these families too; plain ones as before."""
    for parent in (GLM5Bridge, DeepSeekV3Bridge):
        for source in (parent.SOURCE_NAME, getattr(transformers, parent.SOURCE_NAME)):  # it looks up either
            MegatronModelBridge.register_bridge(source=source, target=GPTModel)(_with_kv_split(parent))


def _with_kv_split(parent: type[MegatronModelBridge]) -> type[MegatronModelBridge]:
    class WithKvSplit(parent):
        def mapping_registry(self) -> MegatronMappingRegistry:
            return MegatronMappingRegistry(*super().mapping_registry(), *kv_split_mappings(self.hf_config))

    return WithKvSplit
