"""A stream of Hugging Face tensors becomes a folder that loads: also what the stream does not hold."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import Tensor

from bridge.hf_writer import HfWriter, plain_dtypes
from bridge.models import Config, mtp_copies, mtp_pattern
from bridge.source_check import Readable


def write_folder(
    stream: Iterable[tuple[str, Tensor]],
    directory: Path,
    source: Readable,
    config: Config,
    overrides: dict[str, Any] | None = None,
    keep_mtp: bool = True,
) -> str | None:
    """Write `stream` with the companions and dtypes of `source`, which the weights come from; `config` is its
    config.json.

    Extra prediction (MTP) layers that the stream does not hold are copied from the source unchanged; what they
    repeat of the model follows the model. Without `keep_mtp`, or where the source has none either, config.json
    says that there are none. Returns what was done about them, as a sentence for the log.
    """
    extra, present = mtp_pattern(config), set(source.names())
    repeats: dict[str, list[str]] = {}
    for copy, original in mtp_copies(config).items():
        if keep_mtp and copy in present:
            repeats.setdefault(original, []).append(copy)
    written: set[str] = set()
    with HfWriter(directory, source.directory, plain_dtypes(source), overrides) as writer:
        for name, tensor in stream:
            for each in (name, *repeats.get(name, ())):
                writer.add(each, tensor)
                written.add(each)
        if extra is None:
            return None
        left = [name for name in source.names() if extra.fullmatch(name) and name not in written]
        if keep_mtp and left:
            for name in left:
                writer.add(name, source.read(name))
            return f"copied {len(left)} tensors of extra prediction (MTP) layers unchanged: they were not trained"
        if not any(extra.fullmatch(name) for name in written):
            writer.overrides["num_nextn_predict_layers"] = 0
            return "wrote no extra prediction (MTP) layers, and num_nextn_predict_layers=0 into config.json"
        return None
