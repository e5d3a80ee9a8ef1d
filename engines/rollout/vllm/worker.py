"""What runs inside each of vLLM's worker processes (or in this one): mixed into its worker class by name."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from engines.rollout.vllm.platform import Platform, platform_of
from engines.rollout.vllm.routes import RouteCapture
from engines.rollout.vllm.update import update


class WeightWorker:
    """vLLM adds these methods to its worker; `model_runner` is the worker's."""

    model_runner: Any

    def prepare(self, device: str, capture_routes: bool) -> None:
        """Once, before the first update."""
        self._platform: Platform = platform_of(device)
        self._platform.remember(self.model_runner.get_model())
        self._capture = RouteCapture(self.model_runner) if capture_routes else None

    def load_stream(self, stream: Iterable[tuple[str, Tensor]]) -> None:
        """Write (HF name, full tensor) pairs; see update()."""
        update(self.model_runner.get_model(), self.model_runner.model_config, self._platform, stream)

    def take_routes(self, request: str, tokens: int) -> Tensor:
        return self._capture.take(request, tokens)

    def forget_routes(self) -> None:
        if self._capture is not None:
            self._capture.forget()
