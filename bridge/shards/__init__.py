"""Megatron-Core weights on disk: one safetensors file for each rank of a model copy, and a manifest."""

from __future__ import annotations

from bridge.shards.manifest import Manifest
from bridge.shards.read import ShardSource
from bridge.shards.write import write_shards

__all__ = ["Manifest", "ShardSource", "write_shards"]
