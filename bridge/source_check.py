"""Does a checkpoint hold exactly what the plan needs? Decided from its headers, before a weight byte is read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from bridge.models import Extras
from bridge.ops import Shape
from bridge.plan import Plan
from bridge.problems import nearest, raise_all

PLAIN = (torch.float32, torch.bfloat16, torch.float16)
COMPARE_ROWS = 4096  # rows of a repeated tensor compared at a time


class Readable(Protocol):
    """Tensors that can be read by name and slice; `bytes_read` counts what that took from disk."""

    directory: Path
    bytes_read: int

    def names(self) -> list[str]: ...
    def shape(self, name: str) -> Shape: ...
    def dtype(self, name: str) -> torch.dtype: ...
    def place(self, name: str) -> tuple[str, int]: ...
    def read(self, name: str, slices: tuple[slice, ...] | None = None) -> Tensor: ...


def check_names(
    plan: Plan, stored: Mapping[str, tuple[Shape, torch.dtype] | None], extras: Extras, where: str
) -> dict[str, int]:
    """Number of tensors left out, by reason. ValueError listing every name that is missing or unknown, and, where
    shape and dtype are known, every one of another shape or no float."""
    wanted = plan.hf_shapes
    missing = [name for name in wanted if name not in stored]
    left_out: dict[str, int] = {}
    unknown, problems = [], []
    for name, entry in stored.items():
        if name in wanted:
            shape, dtype = entry or (wanted[name], PLAIN[0])
            if shape != wanted[name]:
                problems.append(f"{name}: shape {list(shape)}, expected {list(wanted[name])}")
            if dtype not in PLAIN:
                problems.append(f"{name}: dtype {dtype}, expected float32, bfloat16 or float16")
        elif name not in extras.copies:
            reason = next((reason for reason, pattern in extras.ignored.items() if pattern.fullmatch(name)), None)
            if reason is None:
                unknown.append(name)
            else:
                left_out[reason] = left_out.get(reason, 0) + 1
    problems = [f"{name}: missing{nearest(name, unknown)}" for name in missing] + problems
    problems += [f"{name}: unknown to this family{nearest(name, missing)}" for name in unknown]
    raise_all(
        problems,
        f"checkpoint {where} and plan disagree",
        "exactly the tensors config.json describes",
        "check that config.json and the weight files belong together",
    )
    return left_out


def check_source(plan: Plan, source: Readable, extras: Extras, where: str) -> dict[str, int]:
    """As `check_names`, then compares repeated tensors."""
    stored = {name: (source.shape(name), source.dtype(name)) for name in source.names()}
    left_out = check_names(plan, stored, extras, where)
    for copy, original in extras.copies.items():
        if copy in stored:
            check_equal(source, copy, original, where)
    return left_out


def check_equal(source: Readable, copy: str, original: str, where: str) -> None:
    """A tied head and the tensors that extra prediction layers repeat have one live counterpart."""
    twin, table = source.read(copy), source.read(original)
    same = twin.shape == table.shape and all(
        torch.equal(twin[row : row + COMPARE_ROWS], table[row : row + COMPARE_ROWS])
        for row in range(0, len(table), COMPARE_ROWS)
    )
    if not same:
        raise ValueError(
            f"got {copy} different from {original} in {where}; expected equal tensors, because config.json ties them; "
            "set tie_word_embeddings to false if the head is its own, or train without the extra prediction layers"
        )
