"""Write the shards of every rank, one tensor in memory at a time; an interrupted run goes on where it stopped."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bridge.hf_writer import CODES, copy_companions
from bridge.layout import Layout
from bridge.load import Writer
from bridge.models import mtp_copies
from bridge.offline import OfflineModel, Tensor
from bridge.problems import raise_all
from bridge.shards.manifest import AXES, Manifest, file_name
from bridge.source_check import Readable, check_source

PROGRESS = ".convert.json"  # what the finished files of an interrupted run belong to


@dataclass(frozen=True)
class Result:
    """The manifest; tensors left out, by reason; the largest rounding (name, difference); bytes of the one buffer."""

    manifest: Manifest
    left_out: dict[str, int]
    rounding: tuple[str, float] | None
    buffer_bytes: int


def write_shards(model: OfflineModel, source: Readable, directory: Path) -> Result:
    """Convert a checkpoint into one file per rank, the manifest last.

    The source is checked whole before anything is written. No file has its final name before it is complete. A
    second call with the same arguments keeps the finished files.
    """
    left_out = check_source(model.plan, source, model.extras, str(source.directory))
    directory.mkdir(parents=True, exist_ok=True)
    if any(directory.iterdir()) and not (directory / PROGRESS).exists():
        raise ValueError(
            f"got {directory}, which is not empty and no conversion that stopped half-way; expected a new folder; "
            "choose another --out"
        )
    finished = _resume(directory, f"{model.plan.digest()} {_fingerprint(source.directory)}")
    writer = Writer(source)
    ranks = []
    for rank in model.ranks():
        name = file_name(rank)
        if name not in finished:
            finished[name] = _write_file(directory / name, model, rank, writer)
            _note(directory, finished)
        ranks.append({**{axis: vars(rank)[f"{axis}_rank"] for axis in AXES}, "file": name, **finished[name]})
    copy_companions(source.directory, directory)
    manifest = Manifest.of(model, _other_dtypes(model, source), _repeated(model, source), ranks)
    manifest.write(directory)
    (directory / PROGRESS).unlink()
    largest = max(_bytes_of(tensor) for stage in range(model.sizes.pp) for tensor in model.tensors(stage))
    return Result(manifest, left_out, writer.rounding, largest)


def _write_file(path: Path, model: OfflineModel, rank: Layout, writer: Writer) -> dict[str, Any]:
    """One rank's file; returns its sha256 and size. Wide values come first, so that every tensor is aligned."""
    tensors = sorted(model.tensors(rank.pp_rank), key=lambda tensor: -tensor.placed.live.dtype.itemsize)
    part, digest = path.with_name(f".{path.name}.part"), hashlib.sha256()
    largest = max(_bytes_of(tensor) for tensor in tensors)
    memory = torch.empty(largest, dtype=torch.uint8)
    with part.open("wb") as file:
        for piece in _contents(tensors, rank, writer, memory):
            file.write(piece)
            digest.update(piece)
        size = file.tell()
    raise_all(
        [f"{name}: holds NaN" for name in writer.spoilt],
        f"weights for {path.name} are not numbers",
        "finite weights in the source",
        "use another checkpoint",
    )
    part.replace(path)
    return {"sha256": digest.hexdigest(), "bytes": size}


def _contents(
    tensors: list[Tensor], rank: Layout, writer: Writer, memory: torch.Tensor
) -> Iterator[bytes | memoryview]:
    """The bytes of a safetensors file, piece by piece."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        live, start, end = tensor.placed.live, end, end + _bytes_of(tensor)
        header[tensor.key] = {"dtype": CODES[live.dtype], "shape": list(live.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text = text.ljust(-(-len(text) // 8) * 8)  # data starts at a multiple of 8 bytes
    yield len(text).to_bytes(8, "little") + text
    for tensor in tensors:
        live = tensor.placed.live
        raw = memory[: _bytes_of(tensor)]
        writer.write(
            tensor.placed, tensor.sources, raw.view(live.dtype).view(live.shape), rank.part(tensor.placed.op.axis)
        )
        yield memoryview(raw.numpy())


def _bytes_of(tensor: Tensor) -> int:
    live = tensor.placed.live
    return torch.Size(live.shape).numel() * live.dtype.itemsize


def _other_dtypes(model: OfflineModel, source: Readable) -> dict[str, torch.dtype]:
    """Hugging Face tensors whose stored dtype is not that of their shards."""
    return {
        name: source.dtype(name)
        for unit in model.plan.exported
        for name in unit.hf
        if source.dtype(name) != unit.placed[0].live.dtype
    }


def _repeated(model: OfflineModel, source: Readable) -> list[str]:
    """Copies inside extra prediction layers. A tied head is not one: the embedding says it all."""
    copies = mtp_copies(model.config) if model.form.mtp else {}
    return sorted(copies.keys() & set(source.names()))


def _fingerprint(source_dir: Path) -> str:
    """Changes when a file of the source does."""
    files = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in sorted(source_dir.iterdir())]
    return hashlib.sha256(repr(files).encode()).hexdigest()


def _resume(directory: Path, identity: str) -> dict[str, dict[str, Any]]:
    """Files that an interrupted run of the same conversion finished. ValueError if it was another conversion."""
    path = directory / PROGRESS
    if not path.exists():
        path.write_text(json.dumps({"identity": identity, "files": {}}))
        return {}
    progress = json.loads(path.read_text())
    if progress["identity"] != identity:
        raise ValueError(
            f"got {directory} with an unfinished conversion of another layout or source; expected the same arguments "
            "to go on; choose another --out or delete the folder"
        )
    return {
        name: entry
        for name, entry in progress["files"].items()
        if (directory / name).is_file() and (directory / name).stat().st_size == entry["bytes"]
    }


def _note(directory: Path, finished: dict[str, dict[str, Any]]) -> None:
    path = directory / PROGRESS
    part = directory / f"{PROGRESS}.part"
    part.write_text(json.dumps(json.loads(path.read_text()) | {"files": finished}))
    part.replace(path)
