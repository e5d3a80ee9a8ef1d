"""Routing replay on the routers of a transformers model, for the FSDP engine and the transformers rollout.

Every family here has its router at `layers[i].mlp.gate`; since transformers 5.13 all of them return
(logits [T, E], weights [T, K], experts [T, K]).

Shape legend: T packed tokens, L decoder layers, E experts of a layer, K experts per token.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from engines.batch import TrainBatch
from engines.metric import Metrics
from engines.routes import LIVE, RoutePass, RouteShape, matters, replay_metrics, replayed_rows


def routers(model: PreTrainedModel) -> dict[int, nn.Module]:
    """The routers by decoder layer, from 0; dense layers have none."""
    return {
        number: layer.mlp.gate for number, layer in enumerate(model.base_model.layers) if hasattr(layer.mlp, "experts")
    }


@contextmanager
def hooked(model: PreTrainedModel, routes: RoutePass) -> Iterator[None]:
    """The model's routers ask `routes`, and nobody once it is over, also after an exception."""
    handles = [gate.register_forward_hook(partial(_ask, routes, layer)) for layer, gate in routers(model).items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _ask(
    routes: RoutePass, layer: int, gate: nn.Module, _: tuple, output: tuple[Tensor, Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor] | None:
    logits_TE, weights_TK, live_TK = output
    chosen_TK = routes.choose(layer, live_TK)
    if chosen_TK is live_TK:
        return None
    return logits_TE, weigh(gate, logits_TE, chosen_TK).to(weights_TK.dtype), chosen_TK


def weigh(gate: nn.Module, logits_TE: Tensor, chosen_TK: Tensor) -> Tensor:
    """Weights [T, K] float32 of the given experts, as the family's own router weighs those it chooses.

    Sigmoid routers have a correction bias, which decides who is chosen and plays no part here (DeepSeek-V3, arXiv
    2412.19437, section 2.1.2).
    """
    sigmoid = hasattr(gate, "e_score_correction_bias")
    scores_TE = logits_TE.float().sigmoid() if sigmoid else logits_TE.softmax(-1, dtype=torch.float32)
    weights_TK = scores_TE.gather(1, chosen_TK)
    if gate.norm_topk_prob:
        weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + (1e-20 if sigmoid else 0.0))
    return weights_TK * gate.routed_scaling_factor if sigmoid else weights_TK


def forward_recording(model: PreTrainedModel, **inputs: Any) -> tuple[Any, Tensor]:
    """The model's output, and where its tokens went: [T, L, K] int16 on the host, all rows of `input_ids` in order."""
    routes = RoutePass(replay=False)
    routes.enter(0)
    with hooked(model, routes):
        output = model(**inputs)
    return output, _stack(routes, 0, len(model.base_model.layers)).cpu()


def _stack(routes: RoutePass, number: int, layers: int) -> Tensor:
    columns = {layer: value for (at, layer), value in routes.recorded.items() if at == number}
    dense_TK = torch.full_like(next(iter(columns.values())), LIVE)
    return torch.stack([columns.get(layer, dense_TK) for layer in range(layers)], dim=1)


class Routing:
    """One recording or replaying pass of a training engine over its micro-batches."""

    def __init__(self, routes: RoutePass, model: PreTrainedModel) -> None:
        self.routes, self.model = routes, model
        self.shape = RouteShape.of(model.config.to_dict())
        self._micro_batches: list[tuple[list[int], TrainBatch]] = []
        self._rows = 0

    @contextmanager
    def hooked(self) -> Iterator[None]:
        with hooked(self.model, self.routes):
            yield
        self.routes.check_asked(range(len(self._micro_batches)), self.shape.moe_layers)

    def enter(self, rows: list[int], part: TrainBatch, device: torch.device) -> None:
        """Before the model runs the next micro-batch, and for its backward pass; a filler has no `rows`."""
        number = len(self._micro_batches)
        if self.routes.replay:
            routes_TLK = part.tokens["routes"]
            columns = {layer: routes_TLK[:, layer].to(device) for layer in self.shape.moe_layers}
            self.routes.dictate(number, columns, matters(part) & bool(rows))
            self._rows += replayed_rows(part, routes_TLK) if rows else 0
        self._micro_batches.append((rows, part))
        self.routes.enter(number)

    def recorded(self, batch: TrainBatch) -> Tensor:
        """[T, L, K] int16 on the host, the tokens of `batch`."""
        routes_TLK = torch.full((batch.num_tokens, self.shape.layers, self.shape.topk), LIVE, dtype=torch.int16)
        targets = batch.rows(routes_TLK)
        for number, (rows, part) in enumerate(self._micro_batches):
            values = part.rows(_stack(self.routes, number, self.shape.layers).cpu())
            for row, value in zip(rows, values, strict=False):  # a filler has values and no rows
                targets[row].copy_(value)
        return routes_TLK

    def metrics(self) -> Metrics:
        return replay_metrics(*self.routes.overlap(), self._rows)
