"""How the rows of one Megatron-Core tensor come from Hugging Face tensors: one class per layout."""

from __future__ import annotations

from bridge.ops.base import Block, Op, PadVocab, Rename, Shape
from bridge.ops.experts import PerExpert
from bridge.ops.fused import QKV, GateUp
from bridge.ops.mla import HeadRows, IndexerRows, RopeRows

__all__ = [
    "QKV",
    "Block",
    "GateUp",
    "HeadRows",
    "IndexerRows",
    "Op",
    "PadVocab",
    "PerExpert",
    "Rename",
    "RopeRows",
    "Shape",
]
