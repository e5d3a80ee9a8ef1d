"""Reading slices of, and streaming into, a Hugging Face folder of safetensors files.

File format: 8 bytes little-endian header length, a JSON header {name: {dtype, shape, data_offsets}},
then the tensors' bytes without holes (https://github.com/huggingface/safetensors#format).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True)
class Stored:
    """Where a tensor lies: file name, dtype, shape, first byte in the file, number of bytes."""

    file: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    size: int


class HfCheckpoint:
    """The tensors of a folder, read by mapping its files. All headers, sizes and the index are checked
    up front: ValueError naming the file. `bytes_read` counts the bytes of every slice handed out."""

    def __init__(self, directory: Path | str) -> None:
        self.directory = Path(directory)
        self.bytes_read = 0
        self._maps: dict[str, Tensor] = {}
        self._stored: dict[str, Stored] = {}
        for file, listed in sorted(self._files().items()):
            found = read_header(self.directory / file)
            if listed is not None and listed != set(found):
                raise ValueError(
                    f"got {file} with tensors {sorted(set(found) - listed)} that {INDEX} does not list there, and "
                    f"without {sorted(listed - set(found))} that it does; expected both to agree; download again"
                )
            self._stored.update(found)

    def names(self) -> list[str]:
        """In file order."""
        return list(self._stored)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._stored[name].shape

    def dtype(self, name: str) -> torch.dtype:
        return self._stored[name].dtype

    def place(self, name: str) -> tuple[str, int]:
        """(file, first byte): reading in this order walks each file once."""
        return self._stored[name].file, self._stored[name].start

    def read(self, name: str, slices: tuple[slice, ...] | None = None) -> Tensor:
        """The tensor, or `tensor[slices]`, as a view of the mapped file: only the pages touched are read."""
        return self._view(self._stored[name], slices)

    def _view(self, stored: Stored, slices: tuple[slice, ...] | None) -> Tensor:
        """A stretch of a mapped file as a tensor; its bytes are counted."""
        if stored.file not in self._maps:
            self._maps[stored.file] = map_file(self.directory / stored.file)
        view = view_of(self._maps[stored.file], stored)
        view = view if slices is None else view[slices]
        self.bytes_read += view.numel() * view.element_size()
        return view

    def _files(self) -> dict[str, set[str] | None]:
        """File -> names the index puts there (None without an index)."""
        index = self.directory / INDEX
        if index.is_file():
            try:
                weight_map: Mapping[str, str] = json.loads(index.read_text())["weight_map"]
            except (json.JSONDecodeError, KeyError) as error:
                raise ValueError(f"got {index} without a readable weight_map; expected JSON; download again") from error
            files: dict[str, set[str] | None] = {file: set() for file in weight_map.values()}
            for name, file in weight_map.items():
                files[file].add(name)
            return files
        if (self.directory / SINGLE).is_file():
            return {SINGLE: None}
        raise ValueError(
            f"got {self.directory} without {SINGLE} and {INDEX}; expected a Hugging Face folder in safetensors format; "
            "check the path, or convert older formats with save_pretrained(safe_serialization=True)"
        )


class SafetensorsFile:
    """The tensors of one file, read by mapping it."""

    def __init__(self, path: Path) -> None:
        self._stored, self._map = read_header(path), map_file(path)

    def read(self, name: str) -> Tensor:
        return view_of(self._map, self._stored[name])


def map_file(path: Path) -> Tensor:
    """The bytes of a file; only the pages touched are read."""
    return torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8)


def view_of(mapping: Tensor, stored: Stored) -> Tensor:
    data = mapping[stored.start : stored.start + stored.size]
    if stored.start % stored.dtype.itemsize:  # legal in the format, impossible as a typed view
        data = data.clone()
    return data.view(stored.dtype).view(stored.shape)


def read_header(path: Path) -> dict[str, Stored]:
    """Names and places of a safetensors file; ValueError if header, shapes, offsets and file size disagree."""
    if not path.is_file():
        raise ValueError(f"got no file {path}; expected it because {INDEX} lists it; download the missing file")
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= min(size - 8, MAX_HEADER_BYTES):
            raise _corrupt(path, f"a header of {length} bytes in a file of {size}")
        try:
            header = json.loads(file.read(length))
            header.pop("__metadata__", None)
            entries = sorted(header.items(), key=lambda item: item[1]["data_offsets"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise _corrupt(path, f"an unreadable header ({error})") from error
    base, end, found = 8 + length, 0, {}
    for name, entry in entries:
        if entry["dtype"] not in DTYPES:
            raise ValueError(
                f"got dtype {entry['dtype']} of {name} in {path}; expected one of {sorted(DTYPES)}; convert it"
            )
        dtype, shape, (start, stop) = DTYPES[entry["dtype"]], tuple(entry["shape"]), entry["data_offsets"]
        if start != end or stop - start != math.prod(shape) * dtype.itemsize:
            raise _corrupt(
                path, f"{name} {list(shape)} {dtype} at bytes {start}..{stop}, after a tensor that ends at {end}"
            )
        found[name] = Stored(path.name, dtype, shape, base + start, stop - start)
        end = stop
    if base + end != size:
        raise _corrupt(path, f"{size} bytes, its header describes {base + end}")
    return found


def _corrupt(path: Path, what: str) -> ValueError:
    return ValueError(
        f"got {path} with {what}; expected a complete safetensors file; it is truncated or damaged: copy it again"
    )
