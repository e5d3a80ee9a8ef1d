"""Weights in and out: sliced reads of this rank's rows, bucketed gathers of full tensors.

Shape legend: n ranks of the shard group, C rows of one rank's piece (padded), R rows of the full tensor.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from bridge import Readable
from bridge.gather import all_gather
from engines.fsdp.shard import chunk_rows, local, owned_rows
from engines.hf_model import DiskTensor, check_names, disk_layout, tied_names

# One all-gather; large enough that the collective runs at full bandwidth.
BUCKET_BYTES = 256 * 2**20


@torch.no_grad()
def load_shards(model: PreTrainedModel, checkpoint: Readable, rank: int, ranks: int) -> None:
    """Write every live tensor once from an open Hugging Face directory, reading only this rank's rows.

    Names and shapes are checked before the first byte of a weight is read. ValueError lists all offenders.
    """
    layout = disk_layout(model)
    check_names(model, layout, checkpoint.names(), str(checkpoint.directory))
    _check_shapes(layout, checkpoint)
    _check_tied(model, checkpoint)
    state = model.state_dict()
    for tensor in layout:
        live = state[tensor.live]
        first, last = owned_rows(live.shape[0], rank, ranks) if isinstance(live, DTensor) else (0, live.shape[0])
        if tensor.index:  # one expert of a fused tensor: a whole row of dim 0
            expert, *cut = tensor.index
            if first <= expert < last:
                local(live)[(expert - first, *cut)].copy_(checkpoint.read(tensor.name))
        elif first < last:
            local(live).copy_(checkpoint.read(tensor.name, (slice(first, last),)))


def _check_shapes(layout: list[DiskTensor], checkpoint: Readable) -> None:
    wrong = {
        tensor.name: f"{tuple(checkpoint.shape(tensor.name))}, expected {tensor.shape}"
        for tensor in layout
        if tuple(checkpoint.shape(tensor.name)) != tensor.shape
    }
    if wrong:
        raise ValueError(f"got weight shapes {wrong}; use the config.json the weights were saved with")


def _check_tied(model: PreTrainedModel, checkpoint: Readable) -> None:
    names = set(checkpoint.names())
    for tied, source in tied_names(model).items():
        if tied in names and not torch.equal(checkpoint.read(tied), checkpoint.read(source)):
            raise ValueError(
                f"got {tied} different from {source} although config.json ties them; expected equal tensors; "
                "set override_config.tie_word_embeddings=false or remove the head from the file"
            )


@torch.no_grad()
def full_tensors(
    model: PreTrainedModel, dtype: torch.dtype, group: dist.ProcessGroup, emit: bool
) -> Iterator[tuple[str, Tensor]]:
    """(disk name, full tensor) in layout order, parameters cast to `dtype`; collective over `group`.

    One all-gather per bucket. Ranks without `emit` take part and yield nothing. A tensor is valid until the
    next one is asked for.
    """
    by_live: dict[str, list[DiskTensor]] = defaultdict(list)
    for tensor in disk_layout(model):
        by_live[tensor.live].append(tensor)
    state = model.state_dict()
    for bucket in _buckets({name: state[name] for name in by_live}, dtype.itemsize):
        for name, full in _gather(bucket, dtype, group, emit):
            for tensor in by_live[name]:
                yield tensor.name, full[tensor.index]


def _buckets(state: dict[str, Tensor], itemsize: int) -> Iterator[dict[str, Tensor]]:
    """Consecutive tensors of at most BUCKET_BYTES together; a larger one travels alone."""
    bucket: dict[str, Tensor] = {}
    size = 0
    for name, tensor in state.items():
        if bucket and size + tensor.numel() * itemsize > BUCKET_BYTES:
            yield bucket
            bucket, size = {}, 0
        bucket[name] = tensor
        size += tensor.numel() * itemsize
    yield bucket


def _gather(
    bucket: dict[str, Tensor], dtype: torch.dtype, group: dist.ProcessGroup, emit: bool
) -> Iterator[tuple[str, Tensor]]:
    ranks = dist.get_world_size(group)
    sharded = {name: tensor for name, tensor in bucket.items() if isinstance(tensor, DTensor)}
    sizes = {name: chunk_rows(t.shape[0], ranks) * t.shape[1:].numel() for name, t in sharded.items()}
    # Rows of padding stay undefined: they are cut off again below.
    send = torch.empty(sum(sizes.values()), dtype=dtype, device=local(next(iter(bucket.values()))).device)
    for piece, tensor in zip(send.split(list(sizes.values())), sharded.values(), strict=True):
        own = tensor.to_local()
        piece[: own.numel()].copy_(own.flatten())
    gathered_nL = send.unsqueeze(0)
    if ranks > 1:
        gathered_nL = send.new_empty(ranks, send.numel())
        all_gather(gathered_nL.flatten(), send, group=group)
    if not emit:
        return
    pieces = dict(zip(sizes, gathered_nL.split(list(sizes.values()), dim=1), strict=True))
    for name, tensor in bucket.items():
        if name in pieces:
            yield name, pieces[name].reshape(-1, *tensor.shape[1:])[: tensor.shape[0]]
        else:  # a buffer is whole on every rank and keeps its own dtype
            yield name, tensor
