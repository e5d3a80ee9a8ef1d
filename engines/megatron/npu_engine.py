"""The Megatron engine on Ascend: MindSpeed's layers under the same contract. Untested on NPU.

Import it through `engines.megatron.mindspeed.build_engine` only, after MindSpeed has adapted Megatron.
"""

from __future__ import annotations

from dataclasses import replace

from megatron.core.models.gpt.experimental_attention_variant_module_specs import (
    get_transformer_block_with_experimental_attention_variant_spec,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoESubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from bridge import RopeRows
from engines.batch import TrainBatch
from engines.megatron import build, mindspeed
from engines.megatron.engine import MegatronEngine
from engines.megatron.forward import PackedInput
from engines.megatron.layers.dsa.indexer import KeyNorm
from engines.megatron.layers.spec import use_own_router
from engines.megatron.mindspeed_flags import ABSORB, FUSED_DSA, config_fields, is_latent, is_sparse, mindspeed_flags
from engines.spec import TrainEngineSpec


class MindSpeedEngine(MegatronEngine):
    """One rank of a Megatron-Core model with MindSpeed's layers."""

    def __init__(self, spec: TrainEngineSpec) -> None:
        hf = mindspeed.read_config_json(spec.model)
        fields = config_fields(hf, spec.backend, spec.device)
        super().__init__(replace(spec, backend=replace(spec.backend, override_transformer_config=fields)))

    def _build_models(self) -> list[nn.Module]:
        # MindSpeed's linears say how they are split only while they draw initial values.
        self.config.perform_initialization = True
        models = build.build_chunks(self.config, self.hf, self.backend, ascend_layers)
        mindspeed.unmark_replicated(models)
        if is_latent(self.hf):
            flags = mindspeed_flags(self.hf, self.backend, self.spec.device)
            mindspeed.require_absorbed(
                (name for m in models for name, _ in m.named_parameters()), bool(flags.get(ABSORB))
            )
        if is_sparse(self.hf):
            self._settle_indexers(models)
        return models

    def _settle_indexers(self, models: list[nn.Module]) -> None:
        """The key norm in float32 with the run's own epsilon, and no gradient unless the indexer has a loss.

        MindSpeed norms keys in the model's dtype with the layers' epsilon, rollout engines do not. A loss of
        coefficient 0 still yields gradients, zeros, and weight decay would shrink the indexer with them.
        """
        options = self.config.attention_options.indexer
        for model in models:
            for module in model.modules():
                if hasattr(module, "linear_weights_proj"):
                    module.k_norm = KeyNorm(self.config, options.head_dim, options.k_norm_eps)
                    module.requires_grad_(options.loss_coeff > 0)

    def _indexer_rows(self) -> RopeRows | None:
        """MindSpeed turns neighbouring rows: the last of a head in its packed, fused path, the first in the other."""
        if not is_sparse(self.hf):
            return None
        fused = mindspeed_flags(self.hf, self.spec.backend, self.spec.device)[FUSED_DSA[0]]
        return RopeRows(first=not fused, interleaved=True)

    def _pack(self, batch: TrainBatch, multiple: int) -> PackedInput:
        """MindSpeed's fused operators read the offsets on the device."""
        inputs = super()._pack(batch, multiple)
        offsets = inputs.sequences.cu_seqlens_q.to(self.device)
        return replace(inputs, sequences=replace(inputs.sequences, cu_seqlens_q=offsets, cu_seqlens_kv=offsets))


def ascend_layers(config: TransformerConfig, vp_stage: int | None) -> TransformerBlockSubmodules:
    """The layers of a stage from MindSpeed's classes, which answer to Transformer Engine's names; our router."""
    if config.experimental_attention_variant is not None:
        spec = get_transformer_block_with_experimental_attention_variant_spec(config, vp_stage=vp_stage)
    else:
        spec = get_gpt_decoder_block_spec(
            config, use_transformer_engine=True, normalization=config.normalization, vp_stage=vp_stage
        )
    for layer in spec.layer_specs:
        use_own_router(layer)
        _use_megatron_linears(layer)
    return spec


def _use_megatron_linears(layer: ModuleSpec) -> None:
    """Experts computed one by one are made of Megatron's own linears, in place.

    Reason: MindSpeed's row-parallel linear sums over the tensor-parallel ranks also in an expert that they do not
    share (EP 1, ETP 1, sequence parallelism). Place: te/pytorch/module/linear.py, TERowParallelLinear.forward.
    Goes when it asks for its own group. Grouped experts have another class.
    """
    parts = layer.submodules.mlp.submodules
    if isinstance(parts, MoESubmodules) and parts.experts.module is SequentialMLP:
        parts.experts.submodules = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
