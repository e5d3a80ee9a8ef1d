"""A folder of shards, read as the Hugging Face checkpoint it stands for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

import torch

from bridge.export import assemble
from bridge.models import mtp_copies
from bridge.offline import OfflineModel
from bridge.ops import Shape
from bridge.plan import Placed, Unit
from bridge.safetensors_io import SafetensorsFile
from bridge.shards.manifest import Manifest, file_name


class ShardSource:
    """Hugging Face tensors by name, assembled from the files of all ranks (mapped, not loaded), in the dtype
    they had before they became shards. One unit, such as a fused matrix, is in memory at a time."""

    def __init__(self, directory: Path, checksums: bool = True) -> None:
        self.directory = directory
        self.bytes_read = 0
        manifest = Manifest.read(directory)
        manifest.check_files(directory, checksums)
        self.config = json.loads((directory / "config.json").read_text())
        self.model: OfflineModel = manifest.model(self.config)
        self._dtypes = {name: getattr(torch, dtype) for name, dtype in manifest.source_dtypes.items()}
        copies = mtp_copies(self.config)
        self._originals = {copy: copies[copy] for copy in manifest.copies}
        self._units = {name: unit for unit in self.model.plan.exported for name in unit.hf}
        self._held: tuple[Unit | None, dict[str, torch.Tensor]] = (None, {})

    def names(self) -> list[str]:
        return [*self._units, *self._originals]

    def shape(self, name: str) -> Shape:
        name = self._originals.get(name, name)
        return self._units[name].hf[name]

    def dtype(self, name: str) -> torch.dtype:
        name = self._originals.get(name, name)
        return self._dtypes.get(name, self._units[name].placed[0].live.dtype)

    def place(self, name: str) -> tuple[str, int]:
        """In stream order."""
        return "", self._order[self._originals.get(name, name)]

    def read(self, name: str, slices: tuple[slice, ...] | None = None) -> torch.Tensor:
        """The tensor, or `tensor[slices]`."""
        name = self._originals.get(name, name)
        unit = self._units[name]
        if self._held[0] is not unit:
            self._held = None, {}  # lets the last unit go before there is another
            self._held = unit, dict(self._assemble(unit))
        whole = self._held[1][name].to(self.dtype(name))
        return whole if slices is None else whole[slices]

    @cached_property
    def _order(self) -> dict[str, int]:
        return {name: number for number, name in enumerate(self._units)}

    @cached_property
    def _files(self) -> dict[tuple[int, int], SafetensorsFile]:
        """(stage, position in it) -> file."""
        return {
            (rank.pp_rank, rank.position): SafetensorsFile(self.directory / file_name(rank))
            for rank in self.model.ranks()
        }

    @cached_property
    def _keys(self) -> list[dict[str, str]]:
        """stage -> global live name -> key in its files."""
        return [
            {tensor.placed.live.name: tensor.key for tensor in self.model.tensors(stage)}
            for stage in range(self.model.sizes.pp)
        ]

    def _assemble(self, unit: Unit) -> Iterator[tuple[str, torch.Tensor]]:
        parts = [[self._shard(unit, placed, part) for part in range(placed.parts)] for placed in unit.placed]
        yield from assemble(unit, parts, _Fresh())

    def _shard(self, unit: Unit, placed: Placed, part: int) -> torch.Tensor:
        """One part, from the first rank that has it: the ranks of a stage count parts fastest."""
        found = self._files[unit.owner, part].read(self._keys[unit.owner][placed.live.name])
        self.bytes_read += found.numel() * found.element_size()
        return found


class _Fresh:
    """New memory for every tensor: the tensors of a unit are kept together."""

    def empty(self, shape: Shape, like: torch.Tensor) -> torch.Tensor:
        return torch.empty(shape, dtype=like.dtype)
