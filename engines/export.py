"""Write an engine's current weights as a Hugging Face model folder."""

from __future__ import annotations

from pathlib import Path

from bridge import HfWriter
from engines.base import TrainEngine


def export_hf(engine: TrainEngine, directory: Path, source: Path) -> None:
    """Collective. The source rank streams `engine.hf_weights()` into safetensors with an index and copies
    config, tokenizer and chat template from `source`; the folder loads with `from_pretrained`."""
    if not engine.is_weight_source:
        for _ in engine.hf_weights():
            raise AssertionError("a rank that is no weight source yielded a tensor")
        return
    directory.mkdir(parents=True, exist_ok=True)
    writer = HfWriter(directory, source_dir=source)
    for name, tensor in engine.hf_weights():
        writer.add(name, tensor)
    writer.finish()
