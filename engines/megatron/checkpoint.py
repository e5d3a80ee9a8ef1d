"""One file per rank: parameters, optimizer shard, random states, and the layout they belong to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor, nn

from engines import rng


def save(
    directory: Path,
    layout: dict[str, Any],
    chunks: list[nn.Module],
    optimizer: MegatronOptimizer | None,
    device: str,
) -> None:
    """Write `megatron_rank<N>.pt` into an existing directory."""
    content = {
        "layout": layout,
        "model": _model_tensors(chunks),
        "optimizer": None if optimizer is None else [_optimizer_state(inner) for inner in _torch_optimizers(optimizer)],
        "rng": rng.state(device),
        "tracker": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }
    torch.save(content, _file(directory))


def restore(
    directory: Path,
    layout: dict[str, Any],
    chunks: list[nn.Module],
    optimizer: MegatronOptimizer | None,
    device: str,
) -> None:
    """Copy a saved state into the live tensors.

    Raises ValueError when the file is missing or was written by another layout.
    """
    path = _file(directory)
    if not path.is_file():
        raise ValueError(f"got no {path}; expected one file per rank; restore with the number of ranks that saved")
    content = torch.load(path, map_location="cpu", weights_only=True)
    if content["layout"] != layout:
        raise ValueError(
            f"got a checkpoint of layout {content['layout']}; expected this engine's {layout}; "
            "restore with the saving layout, or start from the exported Hugging Face weights"
        )
    with torch.no_grad():
        live = _model_tensors(chunks)
        assert live.keys() == content["model"].keys(), f"tensor names differ: {live.keys() ^ content['model'].keys()}"
        for name, value in live.items():
            value.copy_(content["model"][name])
        if optimizer is not None:
            for inner, state in zip(_torch_optimizers(optimizer), content["optimizer"], strict=True):
                _load_optimizer_state(inner, state)
    rng.set_state(content["rng"], device)
    tensor_parallel.get_cuda_rng_tracker().set_states(content["tracker"])


def _file(directory: Path) -> Path:
    return Path(directory) / f"megatron_rank{dist.get_rank():05d}.pt"


def _model_tensors(chunks: list[nn.Module]) -> dict[str, Tensor]:
    """Parameters and buffers by chunk and name."""
    return {
        f"{i}.{name}": value.detach()
        for i, chunk in enumerate(chunks)
        for name, value in [*chunk.named_parameters(), *chunk.named_buffers()]
    }


def _torch_optimizers(optimizer: MegatronOptimizer) -> list[torch.optim.Optimizer]:
    """The torch optimizers inside a chained Megatron optimizer; their parameters are the main shards."""
    return [inner.optimizer for inner in optimizer.chained_optimizers if inner.optimizer is not None]


def _optimizer_state(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Per group: its options, and (main values, Adam state) of each parameter in order.

    Clones, because a shard is a view: saving it would write the whole buffer behind it.
    """
    return [
        {
            "options": {key: value for key, value in group.items() if key != "params"},
            "values": [p.detach().clone() for p in group["params"]],
            "states": [dict(optimizer.state.get(p, {})) for p in group["params"]],
        }
        for group in optimizer.param_groups
    ]


def _load_optimizer_state(optimizer: torch.optim.Optimizer, saved: list[dict[str, Any]]) -> None:
    for group, stored in zip(optimizer.param_groups, saved, strict=True):
        group.update(stored["options"])
        for p, value, state in zip(group["params"], stored["values"], stored["states"], strict=True):
            p.copy_(value)
            optimizer.state[p] = {
                # Adam's step counter stays where its implementation keeps it: fused on the device, else on the host.
                key: x.to(p.device) if isinstance(x, Tensor) and (x.dim() or group.get("fused")) else x
                for key, x in state.items()
            }
