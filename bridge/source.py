"""Checkpoints whose files hold tensors in another form than the one the bridge converts.

Two forms are undone while reading; everything else passes through as a view of the file.

fp8 blocks    `name` [R, C] float8_e4m3fn with `name_scale_inv` [ceil(R/b0), ceil(C/b1)]: blocks of b0 x b1
              values (`weight_block_size`) share a scale, w[i, j] = q[i, j] * scale[i // b0, j // b1]
              (https://github.com/deepseek-ai/DeepSeek-V3/blob/main/README_WEIGHTS.md). Appears as bfloat16 `name`.
fused experts `experts.gate_up_proj` [E, 2F, H], gate rows first, and `experts.down_proj` [E, H, F]: how
              transformers holds experts in memory. Appear as `experts.{e}.{gate,up,down}_proj.weight`.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor

from bridge.problems import raise_all
from bridge.safetensors_io import HfCheckpoint, Stored

SCALE = "_scale_inv"
GATE_UP, DOWN = ".mlp.experts.gate_up_proj", ".mlp.experts.down_proj"
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
SCALE_DTYPES = (torch.float32, torch.bfloat16)


def open_source(directory: Path | str) -> Source:
    """A folder's tensors, unquantised and one by one per expert.

    ValueError, before any weight is read, if the quantisation is of another kind or a scale, a tensor or a
    shape is wrong.
    """
    return Source(directory, read_block_size(Path(directory)))


class Source(HfCheckpoint):
    """A checkpoint under the names, shapes and dtypes of the unquantised model in its per-expert form.

    block_size  (b0, b1) of the fp8 blocks; None where config.json promises no fp8 tensors

    `bytes_read` counts the bytes in the files: one per fp8 value of a slice, plus the scales of its blocks.
    """

    def __init__(self, directory: Path | str, block_size: tuple[int, int] | None) -> None:
        super().__init__(directory)
        self._block_size = block_size
        self._stored = split_experts(self._stored, str(directory))
        self._scales = match_scales(self._stored, block_size, str(directory))
        for name in self._scales:
            del self._stored[name + SCALE]

    def dtype(self, name: str) -> torch.dtype:
        return torch.bfloat16 if name in self._scales else super().dtype(name)

    def read(self, name: str, slices: tuple[slice, ...] | None = None) -> Tensor:
        """The tensor, or `tensor[slices]`: a view of the mapped file, or a new bfloat16 tensor if it is fp8."""
        if name not in self._scales:
            return super().read(name, slices)
        return self._dequantise(name, *self._ranges(name, slices))

    def _ranges(self, name: str, slices: tuple[slice, ...] | None) -> tuple[range, range]:
        """The rows and columns that `slices` select."""
        asked = (*(slices or ()), slice(None), slice(None))
        rows, columns = (range(size)[cut] for size, cut in zip(self.shape(name), asked, strict=False))
        assert rows.step == columns.step == 1, f"{name}: slices {slices} skip elements"
        return rows, columns

    def _dequantise(self, name: str, rows: range, columns: range) -> Tensor:
        """bfloat16 [rows, columns]. Blocks are those of the whole tensor: a slice may start and end inside one.
        Multiplied in float32, one row of blocks at a time."""
        height, width = self._block_size
        first_row, first_column = rows.start // height, columns.start // width
        blocks = (slice(first_row, -(-rows.stop // height)), slice(first_column, -(-columns.stop // width)))
        skipped = columns.start - first_column * width
        scales = self._view(self._scales[name], blocks).float().repeat_interleave(width, dim=1)
        scales = scales[:, skipped : skipped + len(columns)]
        quantised = self._view(self._stored[name], (slice(rows.start, rows.stop), slice(columns.start, columns.stop)))
        plain = torch.empty(quantised.shape, dtype=torch.bfloat16, device="cpu")
        for block, scale in enumerate(scales, start=first_row):
            start = max(block * height - rows.start, 0)
            stop = min((block + 1) * height - rows.start, len(rows))
            plain[start:stop] = quantised[start:stop].float().mul_(scale)
        return plain


def read_block_size(directory: Path) -> tuple[int, int] | None:
    """`weight_block_size` of config.json; None without one. ValueError if the quantisation is not fp8."""
    path = directory / "config.json"
    config = json.loads(path.read_text()) if path.is_file() else {}
    quantisation = config.get("quantization_config")
    if quantisation is None:
        return None
    method = quantisation.get("quant_method")
    if method != "fp8":
        raise ValueError(
            f"got {directory} quantised with quant_method {method!r}; expected fp8 blocks or no quantisation; "
            "use the bfloat16 release of this model, or dequantise it first"
        )
    size = quantisation.get("weight_block_size")
    return None if size is None else (size[0], size[1])


def split_experts(stored: dict[str, Stored], where: str) -> dict[str, Stored]:
    """Replace fused expert tensors by the stretches of the file that hold one matrix of one expert."""
    problems: list[str] = []
    split: dict[str, Stored] = {}
    for name, tensor in stored.items():
        if not name.endswith((GATE_UP, DOWN)):
            split[name] = tensor
            continue
        layer = name.removesuffix(GATE_UP).removesuffix(DOWN)
        gate_up, down = stored.get(layer + GATE_UP), stored.get(layer + DOWN)
        if gate_up is None or down is None:
            problems.append(f"{name}: without its {'down' if down is None else 'gate_up'}_proj")
        elif not _fit(gate_up.shape, down.shape):
            problems.append(f"{name}: gate_up_proj {list(gate_up.shape)} beside down_proj {list(down.shape)}")
        else:
            parts = ("gate_proj", "up_proj") if name.endswith(GATE_UP) else ("down_proj",)
            matrices = _expert_matrices(f"{layer}.mlp.experts", parts, tensor)
            problems += [f"{matrix}: also in {name}" for matrix in matrices if matrix in stored]
            split |= matrices
    raise_all(
        problems,
        f"experts of {where} are not usable",
        "per layer either one matrix per expert, or gate_up_proj [E, 2F, H] with down_proj [E, H, F]",
        "save the model again with save_pretrained",
    )
    return split


def _fit(gate_up: tuple[int, ...], down: tuple[int, ...]) -> bool:
    """[E, 2F, H] and [E, H, F]; fails for a transposed pair."""
    return len(gate_up) == 3 and len(down) == 3 and gate_up == (down[0], 2 * down[2], down[1])


def _expert_matrices(prefix: str, parts: tuple[str, ...], fused: Stored) -> dict[str, Stored]:
    """[E, len(parts) * rows, columns] as E * len(parts) consecutive matrices [rows, columns]."""
    experts, rows, columns = fused.shape
    rows //= len(parts)
    size = rows * columns * fused.dtype.itemsize
    names = [f"{prefix}.{expert}.{part}.weight" for expert in range(experts) for part in parts]
    return {
        name: Stored(fused.file, fused.dtype, (rows, columns), fused.start + number * size, size)
        for number, name in enumerate(names)
    }


def match_scales(stored: dict[str, Stored], block_size: tuple[int, int] | None, where: str) -> dict[str, Stored]:
    """fp8 tensor -> its scales. ValueError listing every tensor and scale that does not fit the other."""
    quantised = [name for name, tensor in stored.items() if tensor.dtype in FP8]
    scales = [name for name in stored if name.endswith(SCALE)]
    if not quantised and not scales:
        return {}
    if block_size is None:
        raise ValueError(
            f"got {(quantised + scales)[0]} in {where}, whose config.json has no quantization_config with a "
            "weight_block_size; expected one beside fp8 tensors and scales; "
            "restore the config.json the weights were published with"
        )
    problems = [problem for name in quantised if (problem := _misfit(name, stored, block_size))]
    for name in scales:
        tensor = stored.get(name.removesuffix(SCALE))
        if tensor is None or tensor.dtype not in FP8:
            problems.append(f"{name}: a scale {'without' if tensor is None else 'for an unquantised'} tensor")
    raise_all(
        problems,
        f"fp8 tensors of {where} are not usable",
        f"each float8_e4m3fn tensor [R, C] with a scale [ceil(R/{block_size[0]}), ceil(C/{block_size[1]})]",
        "download the folder again, or use the bfloat16 release of this model",
    )
    return {name: stored[name + SCALE] for name in quantised}


def _misfit(name: str, stored: dict[str, Stored], block_size: tuple[int, int]) -> str | None:
    """What is wrong with an fp8 tensor and its scale."""
    tensor, scale = stored[name], stored.get(name + SCALE)
    if tensor.dtype is not torch.float8_e4m3fn or len(tensor.shape) != 2:
        return f"{name}: {tensor.dtype} {list(tensor.shape)}"
    if scale is None:
        return f"{name}: without {name}{SCALE}"
    wanted = tuple(-(-size // block) for size, block in zip(tensor.shape, block_size, strict=True))
    if scale.shape != wanted or scale.dtype not in SCALE_DTYPES:
        return f"{name}{SCALE}: {scale.dtype} {list(scale.shape)}, expected float32 {list(wanted)}"
    return None
