"""Write an engine's current weights as a Hugging Face model folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bridge import HfWriter
from engines.base import TrainEngine


def export_hf(engine: TrainEngine, directory: Path, source: Path, overrides: dict[str, Any]) -> None:
    """Collective. The source rank streams `engine.hf_weights()` into safetensors with an index and copies
    config, tokenizer and chat template from `source`; the folder loads with `from_pretrained`.

    `overrides` (the run's override_config) become part of config.json: they are what the weights were trained
    with. Weights have the compute dtype's precision, in the dtype of the source file.
    """
    if not engine.is_weight_source:
        for _ in engine.hf_weights():
            raise AssertionError("a rank that is no weight source yielded a tensor")
        return
    directory.mkdir(parents=True, exist_ok=True)
    writer = HfWriter(directory, source_dir=source)
    for name, tensor in engine.hf_weights():
        writer.add(name, tensor)
    writer.finish()
    if overrides:
        path = directory / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | overrides, indent=2) + "\n")
