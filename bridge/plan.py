"""From rules to a plan: which live tensor holds which Hugging Face tensors, proven total both ways.

`make_plan` matches the live names of all pipeline stages against the rules and returns `Unit`s: the smallest
sets of live and Hugging Face tensors that convert without looking elsewhere. Nothing is skipped: a live tensor
without a rule, a Hugging Face element written by nobody or twice, a shape that fits no split are all listed
in one error.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field
from functools import lru_cache

import torch

from bridge.ops import Block, Op, Shape
from bridge.problems import nearest, raise_all
from bridge.rules import FIRST, Live, Place, Rule


@dataclass(frozen=True)
class Placed:
    """A live tensor with its rule: cut into `parts` over the ranks of its op's axis (1: a copy on each)."""

    live: Live
    op: Op
    parts: int
    hf_shapes: tuple[Shape, ...]

    def blocks(self, part: int) -> list[Block]:
        return _blocks(self.op, self.live.shape, self.hf_shapes, self.parts, part if self.parts > 1 else 0)


@lru_cache(maxsize=1 << 14)  # layers and experts are alike
def _blocks(op: Op, live: Shape, hf: tuple[Shape, ...], parts: int, part: int) -> list[Block]:
    return op.split_for(live, list(hf), parts, part)


@dataclass(frozen=True)
class Unit:
    """Live tensors of one pipeline stage (`owner`) and the Hugging Face tensors they make up."""

    order: tuple[int, int, int]
    owner: int
    copy: bool
    hf: dict[str, Shape]
    placed: list[Placed] = field(default_factory=list)


@dataclass(frozen=True)
class Plan:
    """Units in stream order: by layer, then in the order of the family's rules, then by expert."""

    units: list[Unit]

    @property
    def exported(self) -> list[Unit]:
        return [unit for unit in self.units if not unit.copy]

    @property
    def hf_shapes(self) -> dict[str, Shape]:
        return {name: shape for unit in self.exported for name, shape in unit.hf.items()}

    def digest(self) -> str:
        return hashlib.sha256(repr(self.units).encode()).hexdigest()


def make_plan(rules: list[Rule], stages: list[list[Live]], axes: dict[str, int]) -> Plan:
    """The plan of a model copy whose pipeline stage s holds `stages[s]` on each of its ranks; `axes` gives the
    number of ranks that may cut a tensor: {"tp": ..., "expert": ...}. ValueError with every offender."""
    units, problems = _match(rules, stages, axes)
    if not problems:  # coverage of a half-matched plan would only repeat the same names
        proven: dict[tuple, list[tuple[int, str]]] = {}
        problems = [text for unit in units for text in _uncovered(unit, proven)]
        found = {name for unit in units if not unit.copy for name in unit.hf}
        problems += [f"{name}: no live tensor holds it" for name in expected_names(rules) if name not in found]
    raise_all(
        problems,
        "live model and rules disagree",
        "every live tensor claimed by exactly one rule and every Hugging Face element by exactly one live tensor",
        "build the model with the options its config.json asks for, or add the missing rule to bridge/models",
    )
    return Plan(sorted(units, key=lambda unit: unit.order))


def _match(rules: list[Rule], stages: list[list[Live]], axes: dict[str, int]) -> tuple[list[Unit], list[str]]:
    units: dict[tuple, Unit] = {}
    homes: dict[str, int] = {}
    problems: list[str] = []
    for stage, live in ((stage, live) for stage, tensors in enumerate(stages) for live in tensors):
        claims = [
            (order, rule, place) for order, rule in enumerate(rules) if (place := rule.match(live.name)) is not None
        ]
        if len(claims) != 1:
            problems.append(_bad_claims(live, claims, rules))
            continue
        order, rule, place = claims[0]
        again = live.name in homes
        if again and (place.layer != FIRST or homes[live.name] == stage):
            problems.append(f"{live.name}: held by stage {homes[live.name]} and stage {stage}; check layer_offsets")
            continue
        homes.setdefault(live.name, stage)
        copy = rule.copy or again  # a later stage may hold a second embedding for its own use
        sources = rule.sources(place)
        shapes = tuple(sources.values())
        key = (live.name, stage) if copy else tuple(sources)  # copies of one source are filled one by one
        unit = units.setdefault(key, Unit((place.layer, order, place.expert), stage, copy, sources))
        parts = rule.op.parts_of(live.shape, list(shapes), axes[rule.op.axis])
        problems += _bad_live(live, rule, place, parts, axes)
        if unit.owner != stage:
            problems.append(f"{live.name}: on stage {stage}, its partner {unit.placed[0].live.name} on {unit.owner}")
        unit.placed.append(Placed(live, rule.op, parts or 1, shapes))
    return list(units.values()), problems


def expected_names(rules: list[Rule]) -> dict[str, Shape]:
    """Every Hugging Face tensor of the family at this depth, once."""
    return {name: shape for rule in rules for place in rule.places() for name, shape in rule.sources(place).items()}


def _bad_claims(live: Live, claims: list[tuple[int, Rule, Place]], rules: list[Rule]) -> str:
    if claims:
        return f"{live.name}: claimed by {len(claims)} rules: {', '.join(rule.mcore for _, rule, _ in claims)}"
    hint = nearest(re.sub("[0-9]+", "{i}", live.name), [rule.mcore for rule in rules])
    return f"{live.name} {list(live.shape)}: no rule{hint}"


def _bad_live(live: Live, rule: Rule, place: Place, parts: int | None, axes: dict[str, int]) -> list[str]:
    if parts is None:
        full = list(rule.op.full_shape(list(rule.sources(place).values())))
        cut = f"cut by {rule.op.axis} {axes[rule.op.axis]} on dimension {rule.op.dim}"
        return [
            f"{live.name}: live shape {list(live.shape)}, expected {full} "
            f"{cut if rule.op.dim is not None else 'uncut'} ({type(rule.op).__name__})"
        ]
    if rule.dtype is not None and live.dtype != rule.dtype:
        return [f"{live.name}: live dtype {live.dtype}, expected {rule.dtype}: a narrower one merges its values"]
    # Experts carry this attribute for another reason, with and without a split.
    if rule.op.axis == "tp" and parts > 1 and live.marked_split is False:
        return [
            f"{live.name}: cut into {parts} by its shape, but its attribute tensor_model_parallel says it is a copy"
        ]
    return []


def _uncovered(unit: Unit, proven: dict[tuple, list[tuple[int, str]]]) -> list[str]:
    """Prove that the blocks of all ranks tile every source exactly once, and every live tensor too. Layers and
    experts are alike: `proven` remembers by shapes what was found before."""
    key = (*((placed.op, placed.live.shape, placed.parts) for placed in unit.placed), *unit.hf.values())
    if key not in proven:
        proven[key] = _count_rows(unit)
    names = list(unit.hf)
    held = " and ".join(placed.live.name for placed in unit.placed)
    return [text.format(name=names[source], held=held) for source, text in proven[key]]


def _count_rows(unit: Unit) -> list[tuple[int, str]]:
    shapes = list(unit.hf.values())
    marks: dict[tuple[int, int], torch.Tensor] = {}
    for placed in unit.placed:
        for part in range(placed.parts):
            blocks = placed.blocks(part)
            for block in blocks:
                size = shapes[block.source][block.dim]
                count = marks.setdefault((block.source, block.dim), torch.zeros(size, dtype=torch.int32, device="cpu"))
                count[block.hf_start : block.hf_start + block.length] += 1
            filled, rows = sum(block.length for block in blocks), placed.live.shape[placed.op.dim or 0]
            assert filled == rows or placed.op.pads, f"{placed.live.name}: {filled} of {rows} rows have a source"
    problems = []
    for source in range(len(shapes)):
        counts = [count for (index, _), count in marks.items() if index == source]
        if not counts or any(int(count.min()) == 0 for count in counts):
            problems.append((source, "{name}: partly held by no live tensor (only {held})"))
        elif len(counts) > 1 or int(counts[0].max()) > 1:
            problems.append((source, "{name}: held twice, by {held}"))
    return problems
