"""What runs inside each of vLLM's worker processes (or in this one): mixed into its worker class by name."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from engines.rollout.vllm.inventory import Inventory
from engines.rollout.vllm.platform import platform_of
from engines.rollout.vllm.routes import RouteCapture
from engines.rollout.vllm.update import update
from engines.spec import RolloutEngineSpec

if TYPE_CHECKING:
    from engines.weight_sync import WeightReceiver, WeightSource


class Weights:
    """The shard of this worker, in the words of weight_sync: a version, and something that loads a stream."""

    def __init__(self, runner: Any, spec: RolloutEngineSpec) -> None:
        self.version = -1
        self._runner, self._platform, self._inventory = runner, platform_of(spec.device), Inventory(spec.model)
        self._receiver: WeightReceiver | None = None

    def load_weights(self, stream: Iterable[tuple[str, Tensor]], version: int) -> None:
        self.version = -1
        update(self._runner.get_model(), self._runner.model_config, self._platform, self._inventory, stream)
        self.version = version

    def fetch(self, source: WeightSource, version: int) -> None:
        """Every worker receives the whole model and keeps its part."""
        if self._receiver is None:
            self._receiver = source.receiver()
        self._receiver.pull(self, version)


class WeightWorker:
    """vLLM adds these methods to its worker; `model_runner` is the worker's."""

    model_runner: Any

    def prepare_updates(self, spec: RolloutEngineSpec, capture_routes: bool) -> None:
        """Once, before the first update."""
        platform_of(spec.device).prepare_process()
        self.trainer_weights = Weights(self.model_runner, spec)
        self.route_capture = RouteCapture(self.model_runner) if capture_routes else None

    def load_stream(self, stream: Iterable[tuple[str, Tensor]], version: int) -> None:
        self.trainer_weights.load_weights(stream, version)

    def fetch_weights(self, source: WeightSource, version: int) -> list[Exception]:
        """Errors are returned, in a list: at one that is raised, or returned as such, vLLM stops listening, and would
        take the answers of the other workers for those of its next call."""
        try:
            self.trainer_weights.fetch(source, version)
        except (ValueError, RuntimeError, LookupError) as error:
            return [error]
        return []

    def take_routes(self, request: str, tokens: int) -> Tensor:
        return self.route_capture.take(request, tokens)

    def forget_routes(self, requests: Sequence[str]) -> None:
        self.route_capture.forget(requests)
