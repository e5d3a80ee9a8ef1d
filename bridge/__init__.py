"""What a weight is called and how it is laid out: Hugging Face <-> Megatron-Core."""

from __future__ import annotations

from bridge.hf_export import write_folder
from bridge.hf_writer import HfWriter
from bridge.layout import Groups, Layout
from bridge.load import LoadReport
from bridge.models import check_supported, has_value_head, value_fields
from bridge.ops import RopeRows
from bridge.safetensors_io import HfCheckpoint
from bridge.source import open_source
from bridge.source_check import Readable
from bridge.stream import Bridge

__all__ = [
    "Bridge",
    "Groups",
    "HfCheckpoint",
    "HfWriter",
    "Layout",
    "LoadReport",
    "Readable",
    "RopeRows",
    "check_supported",
    "has_value_head",
    "open_source",
    "value_fields",
    "write_folder",
]
