"""Cut a transformers model over ranks with FSDP2, and the arithmetic of the cut.

FSDP2 cuts every parameter along dim 0 as torch.chunk does: pieces of ceil(rows / n) rows, the last ones
shorter or empty.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from engines.hf_model import dtype_of
from engines.spec import FsdpSpec


def build_mesh(device: str, fsdp_size: int) -> DeviceMesh:
    """All ranks as (replicate, shard) with `fsdp_size` ranks per shard group; -1 is one group of all."""
    world = dist.get_world_size()
    size = world if fsdp_size == -1 else fsdp_size
    if size < 1 or world % size:
        raise ValueError(
            f"got fsdp_size={fsdp_size} on {world} ranks; expected -1 or a divisor of {world}; "
            "change fsdp_config.fsdp_size"
        )
    return init_device_mesh(device, (world // size, size), mesh_dim_names=("replicate", "shard"))


def shard(model: PreTrainedModel, mesh: DeviceMesh, spec: FsdpSpec) -> None:
    """Turn every parameter into a DTensor: one FSDP unit per decoder layer, one for the rest."""
    options = dict(
        mesh=mesh if mesh["replicate"].size() > 1 else mesh["shard"],
        reshard_after_forward=frees_after_forward(mesh, spec),
        mp_policy=MixedPrecisionPolicy(
            param_dtype=dtype_of(spec.param_dtype, "mixed_precision.param_dtype"),
            reduce_dtype=dtype_of(spec.reduce_dtype, "mixed_precision.reduce_dtype"),
        ),
        # On CPU the weights are in host memory anyway.
        offload_policy=CPUOffloadPolicy() if spec.offload_policy and mesh.device_type != "cpu" else OffloadPolicy(),
    )
    for layer in decoder_layers(model):
        fully_shard(layer, **options)
    fully_shard(model, **options)
    if mesh.size() == 1:
        return  # nothing is averaged, and a divide factor of 1 would cost a division of every gradient
    for unit in units(model):
        # The loss callable returns shares of the global value: gradients are summed over ranks, not averaged.
        unit.set_gradient_divide_factor(1.0)
        # gloo knows no pre-multiplied sum; with a factor of 1 plain sums are the same thing everywhere.
        unit.set_force_sum_reduction_for_comms(True)


def frees_after_forward(mesh: DeviceMesh, spec: FsdpSpec) -> bool:
    """Whether gathered weights are dropped between forward and backward. A shard group of one rank has
    nothing to gather: dropping would only repeat the cast to the compute dtype."""
    return spec.reshard_after_forward and mesh["shard"].size() > 1


def decoder_layers(model: PreTrainedModel) -> list[torch.nn.Module]:
    """The repeated blocks: modules that transformers itself would checkpoint, outermost only."""
    return [layer for layer in model.get_decoder().layers if isinstance(layer, GradientCheckpointingLayer)]


def units(model: PreTrainedModel) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def reshard(model: PreTrainedModel) -> None:
    """Free gathered weights: a forward pass without backward leaves at least the root's behind."""
    for unit in units(model):
        unit.reshard()


def local(tensor: Tensor) -> Tensor:
    """This rank's rows, sharing memory; a plain tensor (a buffer) is whole on every rank."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def chunk_rows(rows: int, ranks: int) -> int:
    """Rows of a full (not last) piece."""
    return -(-rows // ranks)


def owned_rows(rows: int, rank: int, ranks: int) -> tuple[int, int]:
    """[first, last) rows of `rank`; empty when first == last. 5 rows on 4 ranks: (0,2) (2,4) (4,5) (5,5)."""
    size = chunk_rows(rows, ranks)
    return min(rank * size, rows), min((rank + 1) * size, rows)
