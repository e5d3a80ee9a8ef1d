"""Routes of the rollout, checked and made ready for replay (R3; arXiv 2510.11370).

A sample whose routes did not arrive whole must not be trained on as if they had: it is dropped, routed live, or ends
the run, and it is counted in every case. Padding never passes for a route.

Shape legend: T packed tokens, L decoder layers, K experts per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from engines.base import Sample
from engines.metric import Metric, Metrics
from engines.routes import LIVE, RouteShape, align

MODE = "actor_rollout_ref.actor.router_replay"


@dataclass(frozen=True)
class RouteOptions:
    """shape              layers, experts and top-k of the model
    on_missing         a sample without usable routes is left out of the update and of its group's statistics
                       (`drop`), learns from live routing (`live`), or ends the run (`error`)
    max_invalid_ratio  share of such samples above which a step fails
    """

    shape: RouteShape
    on_missing: Literal["drop", "live", "error"] = "drop"
    max_invalid_ratio: float = 0.05


@dataclass(frozen=True)
class Routes:
    """rows     [tokens, L, K] int16 of every sample; all -1 (live) where nothing can be replayed
    invalid  sample number -> what is wrong with its routes
    """

    rows: list[Tensor]
    invalid: dict[int, str]

    @property
    def metrics(self) -> Metrics:
        count, total = len(self.invalid), len(self.rows)
        return {
            "routing/invalid_samples": Metric("count", count),
            "routing/invalid_ratio": Metric("mean", count, total),
        }


def check_routes(samples: Sequence[Sample], options: RouteOptions) -> Routes:
    """Routes of every sample of a step. RuntimeError when more are invalid than allowed, with an example.

    An aborted sample that has neither tokens nor routes is not at fault and has nothing to learn.
    """
    shape, rows, invalid = options.shape, [], {}
    for number, sample in enumerate(samples):
        tokens = len(sample.prompt_ids) + len(sample.response_ids)
        live = torch.full((tokens, shape.layers, shape.topk), LIVE, dtype=torch.int16)
        if sample.finish_reason == "abort" and not sample.response_ids and sample.routes is None:
            rows.append(live)
            continue
        try:
            rows.append(align(sample.routes, tokens, shape))
        except ValueError as error:
            rows.append(live)
            invalid[number] = f"sample {sample.index} of {sample.uid!r}: {error}"
    allowed = 0.0 if options.on_missing == "error" else options.max_invalid_ratio
    if len(invalid) > allowed * len(samples):
        raise RuntimeError(
            f"got {len(invalid)} of {len(samples)} samples without usable routes; expected at most a share of "
            f"{allowed:g} ({MODE}.on_missing={options.on_missing}); the first one, {next(iter(invalid.values()))}; "
            f"mend the rollout's route return, raise {MODE}.max_invalid_ratio, or set {MODE}.mode=disabled"
        )
    return Routes(rows, invalid)
