"""The live tensors a Megatron-Core model will have, from the config alone: for plans and files without a model."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch

from bridge.layout import Layout
from bridge.models import Config, family_rules, full_indexer_layers, has_indexer, mtp_pattern
from bridge.models.mla import KV_SPLIT, KV_WHOLE
from bridge.models.mtp import INNER
from bridge.models.rows import FUSED_NORM, OWN_NORM
from bridge.models.scope import Target
from bridge.ops import RopeRows, Shape
from bridge.pipeline import Stages, check_indexer_starts
from bridge.problems import raise_all
from bridge.rules import FIRST, LAST, Live, Place, Rule

DOWN = ("linear_q_down_proj.weight", "linear_kv_down_proj.weight")
OPTION = {"tp": "--tp", "expert": "--etp"}


@dataclass(frozen=True)
class Form:
    """Which spelling a Megatron-Core model uses, where there are several.

    experts      one module each, one weight each in a grouped module, or the old stacked matrices
    fused_norms  norms inside the linear layer behind them, as TransformerEngine has it
    absorb       latent attention with linear_k_up_proj and linear_v_up_proj instead of linear_kv_up_proj
    whole_down   a copy of the latent attention's down projections on each rank, as TransformerEngine and MindSpeed
                 hold them; else they are cut
    mtp, mtp_inner  extra prediction layers, and the name of the layer inside
    indexer_rows    order of the indexer's rows; None: that of the file
    vocab_multiple  the vocabulary is padded to a multiple of this times tp
    """

    experts: Literal["sequential", "grouped", "stacked"] = "sequential"
    fused_norms: bool = False
    absorb: bool = False
    whole_down: bool = False
    mtp: bool = False
    mtp_inner: str = INNER[0]
    indexer_rows: RopeRows | None = None
    vocab_multiple: int = 128

    def target(self, ep: int) -> Target:
        return Target(ep, self.mtp, self.indexer_rows)

    def has(self, rule: Rule) -> bool:
        """Whether this spelling has the rule's live tensor."""
        chosen = {
            self.experts,
            FUSED_NORM if self.fused_norms else OWN_NORM,
            KV_SPLIT if self.absorb else KV_WHOLE,
            "mtp",
            self.mtp_inner,
        }
        return set(rule.form.split()) <= chosen


@dataclass(frozen=True)
class Chunk:
    """One virtual chunk of a stage: first layer, and its tensors with the chunk's own layer numbers."""

    first_layer: int
    live: list[Live]


def predict(config: Config, form: Form, layout: Layout, layers: Stages, dtype: torch.dtype) -> list[list[Chunk]]:
    """stage -> chunk -> live tensors of any rank of that stage (ranks of a stage have the same names and shapes).

    ValueError listing every tensor that cannot be cut as the layout asks, and the setting to change.
    """
    _check_form(config, form)
    if has_indexer(config):
        check_indexer_starts(layers, full_indexer_layers(config))
    rules = [rule for rule in family_rules(config, form.target(layout.ep)) if form.has(rule)]
    last = (layout.pp - 1, layout.vpp - 1)
    homes = {layer: (s, v) for s, chunks in enumerate(layers) for v, chunk in enumerate(chunks) for layer in chunk}
    found: dict[tuple[int, int], list[Live]] = {(s, v): [] for s in range(layout.pp) for v in range(layout.vpp)}
    problems: dict[str, list[str]] = {}  # one line a rule: its layers and experts fail alike
    for rule in rules:
        if rule.copy and layout.pp == 1:
            continue  # the embedding itself is the head
        for place in rule.places():
            shape = _cut(rule, place, form, layout, problems)
            dtype_here = rule.dtype or dtype
            for home in _homes(rule, place, homes, last, form.mtp):
                number = place.layer - (rule.shift or layers[home[0]][home[1]].start)
                found[home].append(Live(rule.live_name(place, number), shape, dtype_here))
    listed = [first + (f" (and {len(more)} like it)" if more else "") for first, *more in problems.values()]
    raise_all(listed, "the layout does not divide the model", "sizes that divide", "change the settings named")
    return [[Chunk(layers[s][v].start, found[s, v]) for v in range(layout.vpp)] for s in range(layout.pp)]


def _check_form(config: Config, form: Form) -> None:
    """ValueError for a spelling this model cannot have."""
    if form.absorb and form.fused_norms:
        raise ValueError(
            "got absorbed attention with fused norms; expected one of them, as absorbed models have own norms"
        )
    if form.absorb and "kv_lora_rank" not in config:
        raise ValueError(
            f"got absorbed attention for a {config['model_type']}; expected a model with latent attention (MLA); "
            "leave it out (--absorb)"
        )
    if form.mtp and mtp_pattern(config) is None:
        raise ValueError(
            "got extra prediction (MTP) layers for a model whose num_nextn_predict_layers is 0 or absent; expected "
            "one or more; leave them out (--mtp)"
        )


def _homes(
    rule: Rule, place: Place, homes: dict[int, tuple[int, int]], last: tuple[int, int], mtp: bool
) -> list[tuple[int, int]]:
    """The chunks that hold a tensor."""
    if place.layer == LAST or rule.shift:
        return [last]
    if place.layer == FIRST:  # extra prediction layers look tokens up again
        return [(0, 0), last] if mtp and last[0] > 0 else [(0, 0)]
    return [homes[place.layer]]


def _cut(rule: Rule, place: Place, form: Form, layout: Layout, problems: dict[str, list[str]]) -> Shape:
    """The shape on one rank; notes a problem if there is none."""
    op, hf = rule.op, list(rule.sources(place).values())
    ranks = layout.etp if op.axis == "expert" else layout.tp
    full = op.full_shape(hf)
    if op.pads:
        multiple = form.vocab_multiple * layout.tp
        return (math.ceil(full[0] / multiple) * multiple // layout.tp, *full[1:])
    if op.dim is None or (form.whole_down and rule.mcore.endswith(DOWN)):
        return full
    shape = (*full[: op.dim], full[op.dim] // ranks, *full[op.dim + 1 :])
    if full[op.dim] % ranks or op.parts_of(shape, hf, layout.axes[op.axis]) is None:
        name = rule.live_name(place, place.layer - rule.shift)
        problems.setdefault(rule.mcore, []).append(
            f"{name} {list(full)}: cannot be cut into {ranks} on dimension {op.dim}: change {OPTION[op.axis]}"
        )
    return shape
