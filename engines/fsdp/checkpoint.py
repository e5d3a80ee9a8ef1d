"""Save and restore one rank's shard: weights, optimizer state, random generators, and the layout they fit."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from engines.device import get_device
from engines.fsdp.optimizer import ShardedAdamW
from engines.fsdp.shard import local


def shard_file(directory: Path, rank: int, world: int) -> Path:
    return directory / f"fsdp_rank{rank:05d}_of_{world:05d}.pt"


def save_shard(path: Path, model: nn.Module, optimizer: ShardedAdamW | None, layout: dict, device: str) -> None:
    torch.save(
        {
            "layout": layout,
            "model": {name: local(value) for name, value in model.state_dict().items()},
            "optimizer": optimizer.adamw.state_dict() if optimizer else None,
            "rng": _rng_state(device),
        },
        path,
    )


@torch.no_grad()
def restore_shard(path: Path, model: nn.Module, optimizer: ShardedAdamW | None, layout: dict, device: str) -> None:
    """Inverse of save_shard. ValueError when the file is missing or was written under another layout."""
    if not path.is_file():
        found = sorted(p.name for p in path.parent.glob("fsdp_rank*")) or "none"
        raise ValueError(
            f"got a checkpoint without {path.name} (shards found: {found}); expected one shard per rank; "
            "resume with the number of ranks that saved it"
        )
    saved = torch.load(path, map_location="cpu", weights_only=True)
    if saved["layout"] != layout:
        raise ValueError(
            f"got a checkpoint of layout {saved['layout']}; expected {layout}; "
            "resume with the settings and the number of ranks that saved it"
        )
    state = model.state_dict()
    for name, value in saved["model"].items():
        local(state[name]).copy_(value)
    if optimizer is not None:
        optimizer.adamw.load_state_dict(saved["optimizer"])
    _set_rng_state(saved["rng"], device)


def _rng_state(device: str) -> dict[str, Any]:
    """Python, numpy, torch and device generators as plain numbers and tensors (loadable without pickle)."""
    version, internal, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state()
    module = get_device(device).module
    return {
        "python": (version, internal, gauss),
        "numpy": (kind, torch.from_numpy(keys.astype(np.int64)), int(position), int(has_gauss), float(cached)),
        "torch": torch.get_rng_state(),
        "device": None if module is None else module.get_rng_state(),
    }


def _set_rng_state(state: dict[str, Any], device: str) -> None:
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    module = get_device(device).module
    if module is not None:
        module.set_rng_state(state["device"])
