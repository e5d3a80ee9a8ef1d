"""Process groups: Megatron's parallel state, initialised once per process."""

from __future__ import annotations

import math

import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from bridge import Groups, Layout
from engines.spec import MegatronSpec, TrainEngineSpec

_SIZES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
)
_initialised: dict[str, int | None] = {}
_engines = 0  # alive in this process


def sizes(backend: MegatronSpec) -> dict[str, int | None]:
    """Parallel sizes by name, as Megatron and checkpoints know them."""
    return {name: getattr(backend, name) for name in _SIZES}


def expert_tensor_parallel_size(backend: MegatronSpec) -> int:
    """Ranks that cut one expert; 1 unless set (Megatron itself would take the tensor-parallel size)."""
    return backend.expert_tensor_parallel_size or 1


def initialise(spec: TrainEngineSpec) -> None:
    """Create the groups of `spec.backend` and seed the model-parallel random streams.

    A second engine in this process (the reference model) shares them: its sizes must be the same, else
    ValueError. Also ValueError when the world cannot be divided.
    """
    global _engines
    wanted = sizes(spec.backend)
    if parallel_state.model_parallel_is_initialized():
        if wanted != _initialised:
            raise ValueError(
                f"got a second Megatron engine with {wanted}; expected the sizes of the first one in this process, "
                f"{_initialised}; give actor and reference model the same parallel sizes"
            )
        _engines += 1
        return
    _check_world(spec.backend)
    parallel_state.initialize_model_parallel(
        **{**wanted, "expert_tensor_parallel_size": expert_tensor_parallel_size(spec.backend)},
        distributed_timeout_minutes=math.ceil(spec.timeout_s / 60),
    )
    tensor_parallel.model_parallel_cuda_manual_seed(spec.seed)
    _initialised.update(wanted)
    _engines += 1


def release() -> None:
    """One engine less; after the last one the sizes may change."""
    global _engines
    _engines -= 1
    if _engines == 0:
        parallel_state.destroy_model_parallel()


def layout(backend: MegatronSpec) -> Layout:
    """Where this rank stands, in the weight bridge's words."""
    return Layout(
        tp=backend.tensor_model_parallel_size,
        pp=backend.pipeline_model_parallel_size,
        vpp=backend.virtual_pipeline_model_parallel_size or 1,
        ep=backend.expert_model_parallel_size,
        etp=expert_tensor_parallel_size(backend),
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        pp_rank=parallel_state.get_pipeline_model_parallel_rank(),
        ep_rank=parallel_state.get_expert_model_parallel_rank(),
        etp_rank=parallel_state.get_expert_tensor_parallel_rank(),
    )


def groups(layout: Layout) -> Groups:
    """The process groups that go with it. Ranks of the expert group count expert-TP fastest, then EP."""
    return Groups(
        tp=parallel_state.get_tensor_model_parallel_group() if layout.tp > 1 else None,
        pp=parallel_state.get_pipeline_model_parallel_group() if layout.pp > 1 else None,
        expert=parallel_state.get_expert_tensor_and_model_parallel_group() if layout.axes["expert"] > 1 else None,
    )


def holds_first_copy(layout: Layout) -> bool:
    """Whether this rank belongs to the first copy of the model. With EP its experts may lie on several data-parallel
    ranks, so a copy is as many ranks of each stage as both kinds of cuts fill evenly."""
    return dist.get_rank() % (dist.get_world_size() // layout.pp) < layout.stage_ranks


def is_output_rank() -> bool:
    """Last pipeline stage, first tensor- and context-parallel rank: the holder of a DP share's results."""
    return (
        parallel_state.is_pipeline_last_stage(ignore_virtual=True)
        and parallel_state.get_tensor_model_parallel_rank() == 0
        and parallel_state.get_context_parallel_rank() == 0
    )


def _check_world(backend: MegatronSpec) -> None:
    world = dist.get_world_size()
    tp, pp = backend.tensor_model_parallel_size, backend.pipeline_model_parallel_size
    cp = backend.context_parallel_size
    if world % (tp * pp * cp):
        raise ValueError(
            f"got {world} ranks for TP {tp} x PP {pp} x CP {cp} = {tp * pp * cp}; expected a multiple of it "
            f"(data parallel size = ranks / product); change the sizes or the number of ranks"
        )
    ep, etp = backend.expert_model_parallel_size, expert_tensor_parallel_size(backend)
    if world % (etp * ep * pp):
        raise ValueError(
            f"got {world} ranks for expert TP {etp} x EP {ep} x PP {pp} = {etp * ep * pp}; expected a multiple of it "
            "(experts spread over the ranks of TP, CP and DP); change expert_model_parallel_size"
        )
