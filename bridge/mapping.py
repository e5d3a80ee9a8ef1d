"""From rules to a plan: which live tensor holds which Hugging Face tensors, proven total both ways.

A `Rule` is a template. `make_plan` matches the live names of all pipeline stages against the rules and returns
`Unit`s: the smallest sets of live and Hugging Face tensors that convert without looking elsewhere. Nothing is
skipped: a live tensor without a rule, a Hugging Face element written by nobody or twice, a shape that
fits no split are all listed in one error.
"""

from __future__ import annotations

import difflib
import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch

from bridge.ops import Block, Op, Shape

FIRST, LAST = -1, 1 << 30  # places of the embedding and of final norm and head, before and after all layers
IGNORED = re.compile(r".*\.rotary_emb\.inv_freq$")  # recomputed from the config by every implementation
TIED_HEAD = "lm_head.weight"
SHOWN = 40  # offenders printed in one error


@dataclass(frozen=True)
class Rule:
    """`mcore` is a global live name with `{i}` for the layer, `hf` its sources with their full shapes.
    `last`: behind all layers in the stream. `copy`: written on import, never exported."""

    mcore: str
    hf: Mapping[str, Shape]
    op: Op
    last: bool = False
    copy: bool = False

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        return re.compile(re.escape(self.mcore).replace(r"\{i\}", r"(\d+)"))

    def match(self, name: str) -> int | None:
        """Layer number (FIRST or LAST outside the layers) if the rule claims `name`."""
        found = self._pattern.fullmatch(name)
        if found is None:
            return None
        return int(found[1]) if found.groups() else (LAST if self.last else FIRST)

    def sources(self, layer: int) -> dict[str, Shape]:
        return {name.replace("{i}", str(layer)): shape for name, shape in self.hf.items()}


class Live(NamedTuple):
    """A live tensor as its rank describes it: global name, local shape, dtype, and what its
    `tensor_model_parallel` attribute says (None: it has none)."""

    name: str
    shape: Shape
    dtype: torch.dtype
    marked_split: bool | None = None


@dataclass(frozen=True)
class Placed:
    """A live tensor with its rule: cut into `parts` over the tensor-parallel ranks (1: a copy on each)."""

    live: Live
    op: Op
    parts: int
    hf_shapes: tuple[Shape, ...]

    def blocks(self, part: int) -> list[Block]:
        return self.op.split_for(self.live.shape, list(self.hf_shapes), self.parts, part if self.parts > 1 else 0)


@dataclass(frozen=True)
class Unit:
    """Live tensors of one pipeline stage (`owner`) and the Hugging Face tensors they make up."""

    order: tuple[int, int]
    owner: int
    copy: bool
    hf: dict[str, Shape]
    placed: list[Placed] = field(default_factory=list)


@dataclass(frozen=True)
class Plan:
    """Units in stream order: by layer, then in the order of the family's rules."""

    units: list[Unit]

    @property
    def exported(self) -> list[Unit]:
        return [unit for unit in self.units if not unit.copy]

    @property
    def hf_shapes(self) -> dict[str, Shape]:
        return {name: shape for unit in self.exported for name, shape in unit.hf.items()}

    def digest(self) -> str:
        return hashlib.sha256(repr(self.units).encode()).hexdigest()


def make_plan(rules: list[Rule], stages: list[list[Live]], layers: int, tp: int) -> Plan:
    """The plan of a model copy whose pipeline stage s holds `stages[s]`. ValueError with every offender."""
    units, problems = _match(rules, stages, tp)
    if not problems:  # coverage of a half-matched plan would only repeat the same names
        problems = [text for unit in units for text in _uncovered(unit)]
        found = [name for unit in units if not unit.copy for name in unit.hf]
        expected = expected_names(rules, layers)
        problems += [f"{name}: no live tensor holds it" for name in expected if name not in set(found)]
        problems += [f"{name}: layers end at {layers - 1}" for name in found if name not in expected]
    raise_all(
        problems,
        "live model and rules disagree",
        "every live tensor claimed by exactly one rule and every Hugging Face element by exactly one live tensor",
        "build the model with the options its config.json asks for, or add the missing rule to bridge/models",
    )
    return Plan(sorted(units, key=lambda unit: unit.order))


def _match(rules: list[Rule], stages: list[list[Live]], tp: int) -> tuple[list[Unit], list[str]]:
    units: dict[tuple, Unit] = {}
    homes: dict[str, int] = {}
    problems: list[str] = []
    for stage, live in ((stage, live) for stage, tensors in enumerate(stages) for live in tensors):
        claims = [
            (order, rule, layer) for order, rule in enumerate(rules) if (layer := rule.match(live.name)) is not None
        ]
        if len(claims) != 1:
            problems.append(_bad_claims(live, claims, rules))
            continue
        order, rule, layer = claims[0]
        again = live.name in homes
        if again and (layer != FIRST or homes[live.name] == stage):
            problems.append(f"{live.name}: held by stage {homes[live.name]} and stage {stage}; check layer_offsets")
            continue
        homes.setdefault(live.name, stage)
        copy = rule.copy or again  # a later stage may hold a second embedding for its own use
        sources = rule.sources(layer)
        key = (stage if copy else None, *sources)
        unit = units.setdefault(key, Unit((layer, order), stage, copy, sources))
        parts = rule.op.parts_of(live.shape, list(sources.values()), tp)
        problems += _bad_shape(live, rule, sources, parts, tp)
        if unit.owner != stage:
            problems.append(f"{live.name}: on stage {stage}, its partner {unit.placed[0].live.name} on {unit.owner}")
        unit.placed.append(Placed(live, rule.op, parts or 1, tuple(sources.values())))
    return list(units.values()), problems


def expected_names(rules: list[Rule], layers: int) -> dict[str, Shape]:
    """Every Hugging Face tensor of the family at this depth."""
    return {
        name: shape
        for rule in rules
        for layer in (range(layers) if "{i}" in rule.mcore else [0])
        for name, shape in rule.sources(layer).items()
    }


def check_source(
    plan: Plan, shapes: Mapping[str, Shape], dtypes: Mapping[str, torch.dtype], tied: bool, where: str
) -> None:
    """ValueError listing every key of a checkpoint that is missing, unknown, of another shape or no float."""
    wanted = plan.hf_shapes
    missing = [name for name in wanted if name not in shapes]
    unknown = [name for name in shapes if name not in wanted and not IGNORED.match(name)]
    problems = [f"{name}: missing{nearest(name, unknown)}" for name in missing]
    for name, shape in shapes.items():
        if name in wanted:
            if shape != wanted[name]:
                problems.append(f"{name}: shape {list(shape)}, expected {list(wanted[name])}")
            if dtypes[name] not in (torch.float32, torch.bfloat16, torch.float16):
                problems.append(f"{name}: dtype {dtypes[name]}, expected float32, bfloat16 or float16")
    problems += [
        f"{name}: unknown to this family{nearest(name, missing)}"
        for name in unknown
        if not (tied and name == TIED_HEAD)
    ]
    raise_all(
        problems,
        f"checkpoint {where} and plan disagree",
        "exactly the tensors config.json describes",
        "check that config.json and the weight files belong together",
    )


def nearest(name: str, known: Iterable[str]) -> str:
    pool = list(known)[:SHOWN]  # the search is quadratic
    close = difflib.get_close_matches(name, pool, n=2, cutoff=0.8)
    return f" (nearest: {', '.join(close)})" if close else ""


def raise_all(problems: list[str], what: str, expected: str, remedy: str) -> None:
    if not problems:
        return
    more = [f"... and {len(problems) - SHOWN} more"] if len(problems) > SHOWN else []
    listing = "\n  ".join(problems[:SHOWN] + more)
    raise ValueError(f"{what}, got {len(problems)} problem(s):\n  {listing}\nexpected {expected}; {remedy}")


def _bad_claims(live: Live, claims: list[tuple[int, Rule, int]], rules: list[Rule]) -> str:
    if claims:
        return f"{live.name}: claimed by {len(claims)} rules: {', '.join(rule.mcore for _, rule, _ in claims)}"
    hint = nearest(re.sub("[0-9]+", "{i}", live.name), [rule.mcore for rule in rules])
    return f"{live.name} {list(live.shape)}: no rule{hint}"


def _bad_shape(live: Live, rule: Rule, sources: dict[str, Shape], parts: int | None, tp: int) -> list[str]:
    if parts is None:
        full = list(rule.op.full_shape(list(sources.values())))
        cut = f"cut by {tp} on dimension {rule.op.dim}" if rule.op.dim is not None else "uncut"
        return [f"{live.name}: live shape {list(live.shape)}, expected {full} {cut} ({type(rule.op).__name__})"]
    if parts > 1 and live.marked_split is False:
        return [
            f"{live.name}: cut into {parts} by its shape, but its attribute tensor_model_parallel says it is a copy"
        ]
    return []


def _uncovered(unit: Unit) -> list[str]:
    """Prove that the blocks of all ranks tile every source exactly once, and every live tensor too."""
    names, marks = list(unit.hf), {}
    for placed in unit.placed:
        for part in range(placed.parts):
            blocks = placed.blocks(part)
            for block in blocks:
                size = unit.hf[names[block.source]][block.dim]
                count = marks.setdefault((block.source, block.dim), torch.zeros(size, dtype=torch.int32, device="cpu"))
                count[block.hf_start : block.hf_start + block.length] += 1
            filled, rows = sum(block.length for block in blocks), placed.live.shape[placed.op.dim or 0]
            assert filled == rows or placed.op.pads, f"{placed.live.name}: {filled} of {rows} rows have a source"
    held = " and ".join(placed.live.name for placed in unit.placed)
    problems = []
    for source, name in enumerate(names):
        counts = [count for (index, _), count in marks.items() if index == source]
        if not counts or any(int(count.min()) == 0 for count in counts):
            problems.append(f"{name}: partly held by no live tensor (only {held})")
        elif len(counts) > 1 or int(counts[0].max()) > 1:
            problems.append(f"{name}: held twice, by {held}")
    return problems
