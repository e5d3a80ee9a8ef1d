"""Which experts each token went to, on devices where vLLM itself does not return them.

Every router calls a function with the experts of the tokens of one forward pass. The model runner knows at that moment
which rows belong to which request and how many tokens of it came before.

Shape legend: T tokens of one forward pass, M layers with experts, L decoder layers, K experts per token.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

from engines.routes import LIVE


class RouteCapture:
    """Collects the routes of running requests; `runner` is vLLM's model runner."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._layers = runner.model_config.hf_config.num_hidden_layers
        self._max_tokens = runner.max_model_len
        self._routes: dict[str, Tensor] = {}
        self._pass: dict[int, Tensor] = {}
        moe = [module for module in runner.get_model().modules() if isinstance(module, MoERunner)]
        for module in moe:
            module.router.set_capture_fn(partial(self._capture, module.layer_id))
        self._moe_layers = sorted(module.layer_id for module in moe)
        assert self._moe_layers, "routes of a dense model were asked for"

    def _capture(self, layer: int, experts_TK: Tensor) -> None:
        """One layer of one forward pass; the last layer puts the rows where they belong."""
        self._pass[layer] = experts_TK.to(torch.int16).cpu()
        if len(self._pass) < len(self._moe_layers):
            return
        experts_TMK = torch.stack([self._pass.pop(each) for each in self._moe_layers], dim=1)
        batch = self._runner.input_batch
        starts = self._runner.query_start_loc.np
        for number, request in enumerate(batch.req_ids):
            rows_TMK = experts_TMK[starts[number] : starts[number + 1]]
            first = int(batch.num_computed_tokens_cpu[number])
            self._table(request, rows_TMK.shape[-1])[first : first + len(rows_TMK), self._moe_layers] = rows_TMK

    def _table(self, request: str, topk: int) -> Tensor:
        if request not in self._routes:
            self._routes[request] = torch.full((self._max_tokens, self._layers, topk), LIVE, dtype=torch.int16)
        return self._routes[request]

    def take(self, request: str, tokens: int) -> Tensor:
        """[tokens, L, K] int16 of a finished request, which is forgotten. Dense layers hold -1."""
        return self._routes.pop(request)[:tokens].clone()

    def forget(self, requests: Iterable[str]) -> None:
        """Drop what aborted requests left."""
        for request in requests:
            self._routes.pop(request, None)
