"""manifest.json: the layout of a folder of shards, and what each rank's file must be."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from bridge.layout import Layout
from bridge.offline import OfflineModel
from bridge.ops import RopeRows
from bridge.pipeline import stage_layers
from bridge.predict import Form

NAME = "manifest.json"
BLOCK = 8 << 20  # bytes hashed at a time
AXES = ("tp", "pp", "ep", "etp")


def file_name(rank: Layout) -> str:
    return f"tp{rank.tp_rank:02d}-pp{rank.pp_rank:02d}-ep{rank.ep_rank:03d}-etp{rank.etp_rank:02d}.safetensors"


@dataclass(frozen=True)
class Manifest:
    """layout   sizes of tp, pp, vpp, ep, etp, and `layers`: those of each stage or chunk
    form         the spelling of the model (bridge/predict.py)
    dtype        of all tensors but those the family holds in float32
    source_dtypes  of Hugging Face tensors that were stored in another dtype, to be restored on the way back
    copies       tensors that the source repeated, to be repeated on the way back
    ranks        {tp, pp, ep, etp, file, sha256, bytes} of every rank
    """

    layout: dict[str, Any]
    form: dict[str, Any]
    dtype: str
    source_dtypes: dict[str, str]
    copies: list[str]
    ranks: list[dict[str, Any]]

    @classmethod
    def of(
        cls,
        model: OfflineModel,
        source_dtypes: dict[str, torch.dtype],
        copies: list[str],
        ranks: list[dict[str, Any]],
    ) -> Manifest:
        sizes = {axis: vars(model.sizes)[axis] for axis in ("tp", "pp", "vpp", "ep", "etp")}
        chunks = [len(model.layers[s][v]) for v in range(model.sizes.vpp) for s in range(model.sizes.pp)]
        rows = model.form.indexer_rows
        form = asdict(model.form) | {"indexer_rows": None if rows is None else str(rows)}
        names = {name: str(dtype).removeprefix("torch.") for name, dtype in source_dtypes.items()}
        return cls({**sizes, "layers": chunks}, form, str(model.dtype).removeprefix("torch."), names, copies, ranks)

    def model(self, config: dict[str, Any]) -> OfflineModel:
        """The plan these shards were written by."""
        sizes = {axis: size for axis, size in self.layout.items() if axis != "layers"}
        rows = self.form["indexer_rows"]
        form = Form(**{**self.form, "indexer_rows": None if rows is None else RopeRows.named(rows)})
        layers = stage_layers(config["num_hidden_layers"], sizes["pp"], sizes["vpp"], self.layout["layers"])
        return OfflineModel.make(config, form, Layout(**sizes), layers, getattr(torch, self.dtype))

    def write(self, directory: Path) -> None:
        part = directory / f".{NAME}"
        part.write_text(json.dumps(asdict(self), indent=2) + "\n")
        part.replace(directory / NAME)

    @classmethod
    def read(cls, directory: Path) -> Manifest:
        path = directory / NAME
        if not path.is_file():
            raise ValueError(
                f"got {directory} without {NAME}; expected a folder written by `python3 -m bridge convert`; "
                "check the path, or finish the conversion that was interrupted"
            )
        try:
            return cls(**json.loads(path.read_text()))
        except (json.JSONDecodeError, TypeError) as error:
            raise ValueError(f"got an unreadable {path} ({error}); expected a manifest; convert again") from error

    def check_files(self, directory: Path, checksums: bool) -> None:
        """ValueError naming every file that is missing, has another size or, with `checksums`, other content."""
        problems = []
        for entry in self.ranks:
            path = directory / entry["file"]
            if not path.is_file():
                problems.append(f"{path.name}: missing")
            elif path.stat().st_size != entry["bytes"]:
                problems.append(f"{path.name}: {path.stat().st_size} bytes, expected {entry['bytes']}")
            elif checksums and sha256_of(path) != entry["sha256"]:
                problems.append(f"{path.name}: content changed (sha256)")
        if problems:
            raise ValueError(
                f"got damaged shards in {directory}: {'; '.join(problems)}; expected the files of {NAME}; "
                "copy them again or convert again"
            )


def sha256_of(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            digest.update(block)
    return digest.hexdigest()
