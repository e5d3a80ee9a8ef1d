"""Routing replay on Megatron's routers, over every way to split tokens and layers.

Megatron-Core has a replay of its own (RouterReplay). Only its place is used here, the router's attribute
`router_replay`: its process-wide list also holds the routers of discarded models, it keeps one target per router
whatever micro-batch is in flight, and it loses that target when it is read in a backward pass.

Shape legend: T tokens of a micro-batch, C those of this context-parallel rank (with padding), S those of them that
this tensor-parallel rank routes (all C without sequence parallelism), L layers, M of them on this rank with experts,
K experts per token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor, nn

from engines.batch import TrainBatch
from engines.megatron.context_parallel import Cut
from engines.megatron.forward import MicroBatch
from engines.metric import Metrics
from engines.routes import LIVE, RoutePass, RouteShape, filler, matters, replay_metrics, replayed_rows


def live_routers(models: Sequence[nn.Module]) -> dict[int, TopKRouter]:
    """The routers of these chunks by layer of the whole model, from 0. Layers that predict further tokens stand
    outside the decoder and always route live."""
    return {
        layer.layer_number - 1: module
        for model in models
        for layer in model.decoder.layers
        for module in layer.modules()
        if isinstance(module, TopKRouter)
    }


@dataclass(frozen=True)
class _Hook:
    """What Megatron's router asks instead of choosing by itself."""

    routes: RoutePass
    layer: int

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[Tensor, Tensor]] | None = None,
    ) -> tuple[Tensor, Tensor]:
        _, live_SK = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        chosen_SK = self.routes.choose(self.layer, live_SK)
        return scores.gather(1, chosen_SK), chosen_SK


class Routing:
    """One recording or replaying pass over the micro-batches of this rank's chunks."""

    def __init__(
        self,
        routes: RoutePass,
        models: Sequence[nn.Module],
        shape: RouteShape,
        micro_batches: list[MicroBatch],
        sequence_parallel: bool,
    ) -> None:
        self.routes, self.shape, self.micro_batches = routes, shape, micro_batches
        self.routers = live_routers(models)
        self.layers = sorted(self.routers)
        self.sequence_parallel = sequence_parallel
        self._cuts: dict[int, Cut] = {}

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Routers ask this pass, and nobody once it is over, also after an exception."""
        try:
            for layer, router in self.routers.items():
                router.router_replay = _Hook(self.routes, layer)
            yield
        finally:
            for router in self.routers.values():
                router.router_replay = None
        self.routes.check_asked(range(len(self.micro_batches)), self.layers)

    def enter(self, number: int, cut: Cut) -> None:
        """Before a chunk runs micro-batch `number`."""
        if self.routes.replay and number not in self._cuts:
            self.routes.dictate(number, *self._targets(self.micro_batches[number], cut))
        self._cuts[number] = cut
        self.routes.enter(number)

    def follow(self, number: int, output: Tensor) -> None:
        """After it ran: its layers may run again in the backward pass, which begins at its output."""
        if output.requires_grad:
            output.register_hook(lambda _: self.routes.enter(number))

    def _targets(self, micro: MicroBatch, cut: Cut) -> tuple[dict[int, Tensor], Tensor]:
        """Routes [S, K] by layer of this rank, and which tokens count. Padding gets routes that flood no expert."""
        assert micro.routes is not None, "a pass that replays needs the routes of its batch"
        batch, device = micro.batch, cut.places_T.device
        routes_CMK = cut.local(micro.routes[:, self.layers].to(device), fill=LIVE)
        padding_C = ~cut.local(torch.ones(batch.num_tokens, dtype=torch.bool, device=device), fill=False)
        count = int(padding_C.sum())
        routes_CMK[padding_C] = filler(count, self.shape).to(device).unsqueeze(1)
        counted_C = cut.local(matters(batch).to(device), fill=False) & bool(micro.rows)
        routes_SMK, counted_S = self._split(routes_CMK), self._split(counted_C)
        return {layer: routes_SMK[:, m] for m, layer in enumerate(self.layers)}, counted_S

    def _split(self, values_C: Tensor) -> Tensor:
        if not self.sequence_parallel:
            return values_C
        size = parallel_state.get_tensor_model_parallel_world_size()
        return values_C.chunk(size)[parallel_state.get_tensor_model_parallel_rank()]

    def recorded(self, batch: TrainBatch) -> Tensor:
        """[T, L, K] int16 on the host, the tokens of `batch`: of all layers on every rank. Collective."""
        shape = (batch.num_tokens, self.shape.layers, self.shape.topk)
        routes_TLK = torch.full(shape, LIVE, dtype=torch.int32, device=self._device)
        targets = batch.rows(routes_TLK)
        for number, micro in enumerate(self.micro_batches):
            if not micro.rows or not self.layers:
                continue
            # int32 from here on: not every communication library moves int16.
            routes_SMK = torch.stack([self.routes.recorded[number, layer] for layer in self.layers], 1).int()
            whole_TMK = self._cuts[number].whole(self._join(routes_SMK))
            for row, part in zip(micro.rows, micro.batch.rows(whole_TMK), strict=True):
                targets[row][:, self.layers] = part
        if parallel_state.get_pipeline_model_parallel_world_size() > 1:
            group = parallel_state.get_pipeline_model_parallel_group()
            dist.all_reduce(routes_TLK, op=dist.ReduceOp.MAX, group=group)  # each layer is LIVE on all stages but one
        return routes_TLK.to("cpu", torch.int16)

    def _join(self, values_S: Tensor) -> Tensor:
        if not self.sequence_parallel:
            return values_S
        return gather_from_sequence_parallel_region(values_S, group=parallel_state.get_tensor_model_parallel_group())

    @property
    def _device(self) -> torch.device:
        return next(iter(self._cuts.values())).places_T.device

    def metrics(self, dp_rank: int) -> Metrics:
        """Overlap over all tokens and layers, reported by one share; replayed rows of this share. Collective."""
        counts = torch.tensor(self.routes.overlap(), dtype=torch.int64, device=self._device)
        dist.all_reduce(counts)
        common, total = counts.tolist() if dp_rank == 0 else (0, 0)
        rows = sum(replayed_rows(micro.batch, micro.routes) for micro in self.micro_batches if micro.rows)
        return replay_metrics(common, total, rows)
