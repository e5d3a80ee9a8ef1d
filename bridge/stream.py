"""The bridge between a live Megatron-Core model and Hugging Face weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bridge.export import export_units
from bridge.gather import Gatherer
from bridge.layout import Groups, Layout
from bridge.live import check_options, describe, live_tensors
from bridge.load import LoadReport, load_units
from bridge.models import Target, check_supported, family_extras, family_rules, local_experts
from bridge.ops import RopeRows
from bridge.plan import Plan, make_plan
from bridge.rules import Live
from bridge.source import open_source
from bridge.source_check import Readable, check_source


class Bridge:
    """Converts the weights of one model copy, spread over tensor, pipeline and expert parallel ranks.

    hf_config      content of config.json
    chunks         live model chunks of this rank (one, or one per virtual pipeline stage)
    layer_offsets  global number of each chunk's local layer 0
    bucket_bytes   bound on the buffers of an export in flight
    indexer_rows   order of the live indexer's rows; None: that of the file, as our layers have it

    Construction is collective over the groups: it plans, and proves the plan total, before any weight moves.
    """

    def __init__(
        self,
        hf_config: dict[str, Any],
        chunks: list[nn.Module],
        layout: Layout,
        groups: Groups,
        layer_offsets: list[int],
        bucket_bytes: int = 256 << 20,
        indexer_rows: RopeRows | None = None,
    ) -> None:
        groups.check(layout)
        check_supported(hf_config)
        check_options(chunks)
        self._config, self._layout, self._groups = hf_config, layout, groups
        self._chunks, self._offsets, self._bucket_bytes = chunks, layer_offsets, bucket_bytes
        self._experts = local_experts(hf_config, layout.ep)
        self._described = self._describe()
        stages = _exchange(self._described, layout.pp, groups.pp)
        mtp = any(live.name.startswith("mtp.") for stage in stages for live in stage)
        self._target = Target(layout.ep, mtp, indexer_rows)
        self.plan: Plan = make_plan(family_rules(hf_config, self._target), stages, layout.axes)
        _check_agreement(f"{self.plan.digest()} in buckets of {bucket_bytes}", groups)
        self._unusable: str | None = None

    @torch.no_grad()
    def load(self, hf_dir: Path | str | Readable) -> LoadReport:
        """Read every live tensor of this rank from a folder, or from one that is open. Everything is checked before
        the first write; a later error leaves the model unusable until a load succeeds."""
        source = open_source(hf_dir) if isinstance(hf_dir, (Path, str)) else hf_dir
        where = str(source.directory)
        left_out = check_source(self.plan, source, family_extras(self._config, self._target), where)
        live = self._live()
        mine = [unit for unit in self.plan.units if unit.owner == self._layout.pp_rank]
        self._unusable = f"loading {where} did not finish"
        report = load_units(mine, live, source, self._layout, left_out, where)
        self._unusable = None
        return report

    @torch.no_grad()
    def hf_weights(self, source_only: bool = True) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, full tensor in the live dtype) in plan order.

        Collective over the groups: every rank iterates to the end (or closes its iterator). With `source_only`,
        only the source of the copy (`Layout.is_source`) yields. A tensor is valid until the next one is asked for.
        Extra memory: `bucket_bytes` for the buffers, plus the one tensor yielded.
        """
        if self._unusable:
            raise ValueError(
                f"got a model whose weights are incomplete ({self._unusable}); expected loaded weights; load again"
            )
        live = self._live()
        layout = self._layout
        gatherer = Gatherer(layout, self._groups, next(iter(live.values())).device, everywhere=not source_only)
        yields = layout.is_source or not source_only
        # Two buckets are in flight, so each has half.
        yield from export_units(self.plan.exported, live, gatherer, self._bucket_bytes // 2, yields)

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        return live_tensors(self._chunks, self._offsets, self._experts, self._config["hidden_size"])

    def _describe(self) -> list[Live]:
        return [describe(name, tensor) for name, tensor in self._tensors()]

    def _live(self) -> dict[str, Tensor]:
        """Live tensors by global name; ValueError if names, shapes or dtypes are not those of the plan."""
        now = self._describe()
        if now != self._described:
            changed = sorted({live.name for live in set(now) ^ set(self._described)})
            raise ValueError(
                f"got changed live tensors {changed}; expected those the plan was made for; "
                "build a new Bridge after changing the model"
            )
        return dict(self._tensors())


def _exchange(mine: list[Live], pp: int, group: dist.ProcessGroup | None) -> list[list[Live]]:
    """The live tensors of every pipeline stage, in stage order."""
    stages: list[list[Live]] = [mine] * pp
    if group is not None:
        dist.all_gather_object(stages, mine, group=group)
    return stages


def _check_agreement(digest: str, groups: Groups) -> None:
    """All ranks of a model copy must have derived the same plan, or their collectives would not match."""
    for group in (groups.tp, groups.pp, groups.expert):
        if group is not None:
            digests = [""] * group.size()
            dist.all_gather_object(digests, digest, group=group)
            assert len(set(digests)) == 1, f"ranks derived different plans: {digests}"
