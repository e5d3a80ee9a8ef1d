"""Write an engine's current weights as a Hugging Face model folder."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any, Literal

from bridge import open_source, value_fields, write_folder
from engines.base import TrainEngine

log = logging.getLogger(__name__)


def export_hf(
    engine: TrainEngine, directory: Path, source: Path, overrides: dict[str, Any], head: Literal["lm", "value"] = "lm"
) -> None:
    """Collective. The source rank streams `engine.hf_weights()` into safetensors with an index and copies
    config, tokenizer and chat template from `source`; the folder loads with `from_pretrained`.

    `overrides` (the run's override_config) become part of config.json: they are what the weights were trained
    with. Weights have the compute dtype's precision, in the dtype of the source file. Layers of the source that
    were not trained (multi-token prediction) are carried over. A value model (`head`) is written as a token
    classifier with one label, without such layers, which predict words.
    """
    if not engine.is_weight_source:
        for _ in engine.hf_weights():
            raise AssertionError("a rank that is no weight source yielded a tensor")
        return
    config = json.loads((source / "config.json").read_text())
    if head == "value":
        overrides = {**overrides, **value_fields(config)}
    done = write_folder(engine.hf_weights(), directory, open_source(source), config, overrides, keep_mtp=head == "lm")
    if done:
        log.info("%s: %s", directory, done)
