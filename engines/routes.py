"""Which experts each token goes to: recorded in one pass, dictated in another (routing replay).

Replaying the routes of the pass before the updates (R2; arXiv 2507.18071, 2512.01374) or of the rollout (R3; arXiv
2510.11370) replaces the *set* of experts only: how much each weighs comes from the live router, which keeps learning.

Shape legend: T tokens, L decoder layers, M of them with experts, E experts of a layer, K experts per token.

`routes` [T, L, K] int16 belong to the tokens like every per-token tensor: row t holds the experts of *input* token t,
whose output predicts token t+1. Layers count from 0 over the whole model. -1 dictates nothing: all of a dense layer's
columns, and rows that route live.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bridge.models.moe import moe_layers, num_experts
from engines.base import ForwardOptions
from engines.batch import TrainBatch
from engines.metric import Metric, Metrics

LIVE = -1


@dataclass(frozen=True)
class RouteShape:
    """What the routes of a model look like: L, the layers with experts, E and K."""

    layers: int
    moe_layers: tuple[int, ...]
    experts: int
    topk: int

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> RouteShape:
        """From the fields of a Hugging Face config.json. ValueError for a dense model."""
        sparse = tuple(moe_layers(config)) if num_experts(config) else ()
        if not sparse:
            raise ValueError(
                f"got a dense model ({config.get('model_type')}); expected layers with experts, whose routes can be "
                "recorded and replayed; set actor_rollout_ref.actor.router_replay.mode=disabled"
            )
        shape = cls(config["num_hidden_layers"], sparse, num_experts(config), config["num_experts_per_tok"])
        assert shape.experts <= torch.iinfo(torch.int16).max, f"{shape.experts} experts do not fit into int16"
        return shape


def align(routes: Tensor | None, tokens: int, shape: RouteShape) -> Tensor:
    """Routes as an inference engine returns them -> [tokens, L, K] int16 for a sequence of that many tokens.

    routes  [rows, L or M, K]; with L columns those of dense layers are ignored. One row per token, or one less: the
            last sampled token was never fed to the engine. Nothing depends on its route; it becomes `filler`.

    ValueError says what is wrong: rows, layers, K, ids outside 0..E-1 or twice in a token, all of them 0.
    """
    if routes is None:
        raise ValueError("got no routes; expected one row per token")
    if routes.ndim != 3 or routes.shape[0] not in (tokens, tokens - 1):
        raise ValueError(f"got routes {tuple(routes.shape)}; expected {tokens - 1} or {tokens} rows x layers x experts")
    columns = routes.shape[1]
    if columns not in (shape.layers, len(shape.moe_layers)) or routes.shape[2] != shape.topk:
        raise ValueError(
            f"got routes {tuple(routes.shape)}; expected {shape.layers} layers or {len(shape.moe_layers)} with "
            f"experts, {shape.topk} of these each"
        )
    own = list(shape.moe_layers)
    given_TMK = routes[:, own] if columns == shape.layers else routes
    _check_ids(given_TMK, shape)
    aligned_TLK = torch.full((tokens, shape.layers, shape.topk), LIVE, dtype=torch.int16)
    aligned_TLK[: len(given_TMK), own] = given_TMK.to(torch.int16)
    missing = tokens - len(given_TMK)
    aligned_TLK[len(given_TMK) :, own] = filler(missing, shape).unsqueeze(1)
    return aligned_TLK


def _check_ids(given_TMK: Tensor, shape: RouteShape) -> None:
    if given_TMK.numel() == 0:
        return
    low, high = int(given_TMK.min()), int(given_TMK.max())
    if low < 0 or high >= shape.experts:
        raise ValueError(f"got expert ids {low}..{high}; expected 0..{shape.experts - 1}")
    if high == 0:
        raise ValueError("got expert 0 for every token and layer; expected routes that were really recorded")
    sorted_TMK = given_TMK.sort(-1).values
    if bool((sorted_TMK[..., 1:] == sorted_TMK[..., :-1]).any()):
        raise ValueError(f"got one expert twice in a token; expected {shape.topk} different ones")


def filler(rows: int, shape: RouteShape) -> Tensor:
    """[rows, K] int16 for tokens that count nowhere: distinct ids (dispatch kernels rely on that), each row going
    on where the last one ended, so that no expert is flooded."""
    return (torch.arange(rows * shape.topk).view(rows, shape.topk) % shape.experts).to(torch.int16)


class RoutePass:
    """The routes of one pass over micro-batches, recorded or dictated.

    The engine says which micro-batch runs (`enter`), also before a backward pass recomputes its layers; every router
    asks `choose`. Asking changes nothing, so that a layer that runs twice gets the same answer twice, however many
    micro-batches are in flight.
    """

    def __init__(self, replay: bool) -> None:
        self.replay = replay
        self.recorded: dict[tuple[int, int], Tensor] = {}
        self._dictated: dict[int, Mapping[int, Tensor]] = {}
        self._counted: dict[int, Tensor] = {}
        self._common: dict[tuple[int, int], Tensor] = {}
        self._asked: set[tuple[int, int]] = set()
        self._current: int | None = None

    @classmethod
    def of(cls, options: ForwardOptions) -> RoutePass | None:
        """None where the options ask for neither."""
        return cls(options.replay_routes) if options.record_routes or options.replay_routes else None

    def dictate(self, number: int, routes: Mapping[int, Tensor], counted_T: Tensor) -> None:
        """Routes [T, K] of micro-batch `number` by layer, for the tokens of this rank. `counted_T` (bool) are those
        whose agreement with live routing is measured."""
        self._dictated[number] = routes
        self._counted[number] = counted_T

    def enter(self, number: int) -> None:
        self._current = number

    def choose(self, layer: int, live_TK: Tensor) -> Tensor:
        """The experts [T, K] that a router must use, given those it would."""
        assert self._current is not None, f"the router of layer {layer} ran outside any micro-batch"
        number, key = self._current, (self._current, layer)
        self._asked.add(key)
        if not self.replay:
            self.recorded[key] = live_TK.to(torch.int16)
            return live_TK
        target_TK = self._dictated[number][layer].to(live_TK)
        assert target_TK.shape == live_TK.shape, f"layer {layer} routes {live_TK.shape}, dictated {target_TK.shape}"
        given_T1 = target_TK[:, :1] >= 0
        counted_T = given_T1[:, 0] & self._counted[number].to(live_TK.device)
        common_T = (target_TK[:, :, None] == live_TK[:, None, :]).any(-1).sum(-1)
        self._common[key] = torch.stack([(common_T * counted_T).sum(), counted_T.sum() * live_TK.shape[1]])
        return torch.where(given_T1, target_TK, live_TK)

    def check_asked(self, numbers: Iterable[int], layers: Iterable[int]) -> None:
        """Every router must have asked in every micro-batch: one that did not was never under control."""
        silent = sorted({(number, layer) for number in numbers for layer in layers} - self._asked)
        assert not silent, f"these (micro-batch, layer) pairs routed without asking: {silent}"

    def overlap(self) -> tuple[int, int]:
        """(dictated experts that live routing would have chosen too, all dictated ones) of this rank's tokens."""
        common, total = torch.stack(list(self._common.values())).sum(0).tolist() if self._common else (0, 0)
        return common, total


def matters(batch: TrainBatch) -> Tensor:
    """[T] bool, False at the last token of each sequence, which predicts nothing."""
    mask_T = torch.ones(batch.num_tokens, dtype=torch.bool, device=batch.input_ids.device)
    mask_T[batch.cu_seqlens[1:] - 1] = False
    return mask_T


def replayed_rows(batch: TrainBatch, routes_TLK: Tensor) -> int:
    """Tokens whose route is dictated and matters."""
    return int((matters(batch) & (routes_TLK >= 0).any(-1).any(-1)).sum())


def replay_metrics(common: int, total: int, rows: int) -> Metrics:
    """`routing/overlap_ratio`: share of replayed experts that live routing would choose."""
    return {
        "routing/overlap_ratio": Metric("mean", float(common), float(total)),
        "routing/replayed_rows": Metric("count", float(rows)),
    }
