"""Stream tensors into a Hugging Face folder, one shard open at a time."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import torch
from torch import Tensor

from bridge.safetensors_io import DTYPES, INDEX, SINGLE, HfCheckpoint
from bridge.source import open_source

# Room kept at the front of a shard for its header, which is known only when the shard is complete. The format
# allows spaces behind the JSON. A full header closes the shard (about 450 tensors).
HEADER_BYTES = 64 << 10
CODES = {dtype: code for code, dtype in DTYPES.items()}
COMPANIONS = {".json", ".jinja", ".txt", ".model", ".tiktoken", ".py"}  # config, tokenizer, template, custom code
NO_COMPANIONS = (".index.json", "manifest.json")  # they speak of weight files


class HfWriter:
    """`add` tensors in any order, then `finish`. Nothing has its final name before `finish` has renamed it.

    With `source_dir` the config, generation config, tokenizer, chat template and custom code files are copied from
    there, with `overrides` on top of the config. Tensors are written in the dtype that `dtypes` gives; without it,
    in the one they have in `source_dir` (bfloat16 where it holds fp8). As a context manager it finishes on success
    and removes its temporary files on an error.
    """

    def __init__(
        self,
        directory: Path | str,
        source_dir: Path | str | None = None,
        dtypes: Mapping[str, torch.dtype] | None = None,
        overrides: Mapping[str, Any] | None = None,
        max_shard_bytes: int = 5 << 30,
    ) -> None:
        self.directory = Path(directory)
        self.overrides = dict(overrides or {})
        self._source_dir = None if source_dir is None else Path(source_dir)
        if self._source_dir is not None and self._source_dir.resolve() == self.directory.resolve():
            raise ValueError(f"got {directory} as target and source; expected two folders; write to another folder")
        if dtypes is None:
            dtypes = {} if self._source_dir is None else plain_dtypes(open_source(self._source_dir))
        self._dtypes = dtypes
        self.directory.mkdir(parents=True, exist_ok=True)
        self._max_shard_bytes = max_shard_bytes
        self._shards: list[list[str]] = []
        self._bytes = 0
        self._names: set[str] = set()
        self._file: BinaryIO | None = None
        self._header: dict[str, dict] = {}
        self._header_size = self._offset = 0

    def add(self, name: str, tensor: Tensor) -> None:
        """Append a tensor; the bytes are written before this returns."""
        if name in self._names:
            raise ValueError(
                f"got {name} twice; expected each tensor once; this is a fault of the stream that feeds it"
            )
        self._names.add(name)
        dtype = self._dtypes.get(name, tensor.dtype)
        data = tensor.detach().to("cpu", dtype).contiguous()
        size = data.numel() * data.element_size()
        entry = {"dtype": CODES[dtype], "shape": list(data.shape), "data_offsets": [self._offset, self._offset + size]}
        entry_size = len(json.dumps({name: entry})) + 40  # offsets start again in a new shard, but may grow by digits
        full = self._offset > 0 and self._offset + size > self._max_shard_bytes
        crowded = self._header_size + entry_size > HEADER_BYTES
        misaligned = self._offset % dtype.itemsize  # readable in theory, but not by everyone
        if self._file is None or full or crowded or misaligned:
            self._close_shard()
            self._open_shard()
            entry["data_offsets"] = [0, size]
        self._header[name] = entry
        self._header_size += entry_size
        # Contiguous with one element, a tensor may still claim any stride, which a view of its bytes refuses.
        self._file.write(data.as_strided((data.numel(),), (1,)).view(torch.uint8).numpy())
        self._offset += size

    def finish(self) -> None:
        """Complete the folder: close the last shard, copy the companions, write the index, rename."""
        self._close_shard()
        if self._source_dir is not None:
            copy_companions(self._source_dir, self.directory)
            edit_config(self.directory, self.overrides)
        count = len(self._shards)
        finals = [SINGLE] if count == 1 else [f"model-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)]
        if count > 1:
            weight_map = {name: final for final, names in zip(finals, self._shards, strict=True) for name in names}
            index = {"metadata": {"total_size": self._bytes}, "weight_map": dict(sorted(weight_map.items()))}
            (self.directory / f".{INDEX}").write_text(json.dumps(index, indent=2) + "\n")
        self._remove_old(keep=set(finals))
        for number, final in enumerate(finals):
            self._part(number).replace(self.directory / final)
        if count > 1:
            (self.directory / f".{INDEX}").replace(self.directory / INDEX)

    def abort(self) -> None:
        """Remove everything written so far."""
        if self._file is not None:
            self._file.close()
            self._file = None
        for number in range(len(self._shards) + 1):
            self._part(number).unlink(missing_ok=True)

    def __enter__(self) -> HfWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.finish()
        else:
            self.abort()

    def _part(self, number: int) -> Path:
        return self.directory / f".part-{number:05d}.safetensors"

    def _open_shard(self) -> None:
        self._file = self._part(len(self._shards)).open("wb")
        self._file.seek(8 + HEADER_BYTES)
        self._header, self._header_size, self._offset = {"__metadata__": {"format": "pt"}}, 64, 0

    def _close_shard(self) -> None:
        if self._file is None:
            return
        header = json.dumps(self._header, separators=(",", ":")).encode()
        assert len(header) <= HEADER_BYTES, f"header of {len(header)} bytes in the room of {HEADER_BYTES}"
        self._file.seek(0)
        self._file.write(HEADER_BYTES.to_bytes(8, "little") + header.ljust(HEADER_BYTES))
        self._file.close()
        self._file = None
        del self._header["__metadata__"]
        self._shards.append(list(self._header))
        self._bytes += self._offset

    def _remove_old(self, keep: set[str]) -> None:
        """Weights of an earlier model in the same folder would be loaded in place of, or beside, the new ones."""
        for old in [self.directory / INDEX, *self.directory.glob("model*.safetensors")]:
            if old.name not in keep:
                old.unlink(missing_ok=True)


def plain_dtypes(source: HfCheckpoint) -> dict[str, torch.dtype]:
    """Tensor -> dtype to write it in; what is no plain float in the source is written as it comes."""
    plain = (torch.float32, torch.bfloat16, torch.float16)
    return {name: source.dtype(name) for name in source.names() if source.dtype(name) in plain}


def copy_companions(source: Path, target: Path) -> None:
    """Everything a model folder needs besides weights."""
    for path in sorted(source.iterdir()):
        if path.is_file() and path.suffix in COMPANIONS and not path.name.endswith(NO_COMPANIONS):
            shutil.copyfile(path, target / path.name)
    templates = source / "additional_chat_templates"
    if templates.is_dir():
        shutil.copytree(templates, target / templates.name, dirs_exist_ok=True)


def edit_config(directory: Path, overrides: Mapping[str, Any]) -> None:
    """config.json loses its quantization_config, because weights are written unquantised, and gets `overrides`."""
    path = directory / "config.json"
    config = json.loads(path.read_text())
    edited = {name: value for name, value in config.items() if name != "quantization_config"} | dict(overrides)
    if edited != config:
        path.write_text(json.dumps(edited, indent=2) + "\n")
