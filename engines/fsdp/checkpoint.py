"""Save and restore one rank's shard: weights, optimizer state, random generators, and the layout they fit."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from engines import rng
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
            "rng": rng.state(device),
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
    rng.set_state(saved["rng"], device)
