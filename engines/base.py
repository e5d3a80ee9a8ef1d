"""The contracts of this folder: what every training engine and every rollout engine must do.

`fsdp` and `megatron` behave the same behind TrainEngine; the same tests run on both.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from torch import Tensor

from engines.batch import Denominators, PolicyOutput, TrainBatch, ValueOutput
from engines.metric import Metrics

if TYPE_CHECKING:
    from engines.weight_sync import WeightReceiver, WeightSource

# (model output of one micro-batch, that micro-batch, global denominators) -> (scalar loss, metrics).
# The loss is this micro-batch's share of the global value: sum over its tokens / global denominator.
PolicyLossFn = Callable[[PolicyOutput, TrainBatch, Denominators], tuple[Tensor, Metrics]]
ValueLossFn = Callable[[ValueOutput, TrainBatch, Denominators], tuple[Tensor, Metrics]]
LossFn = PolicyLossFn | ValueLossFn  # by the model's head


@dataclass(frozen=True)
class ForwardOptions:
    """How to cut a rank's batch into micro-batches, and what to compute.

    Exactly one of `micro_batch_size` (sequences) and `max_tokens` (token budget) is set. The number of
    micro-batches is the maximum over DP ranks; ranks with less work run masked fillers.
    Logits are divided by `temperature` before log-softmax. `entropy` asks for per-token entropy;
    `entropy_grad` lets gradient flow through it. `sum_pi_squared` asks a scoring pass for the sum of the squared
    probabilities that each token was drawn from.

    In a mixture of experts, `record_routes` returns the experts of every token, and `replay_routes` dictates those
    of the batch's `routes` (engines/routes.py).
    """

    temperature: float = 1.0
    micro_batch_size: int | None = None
    max_tokens: int | None = None
    entropy: bool = False
    entropy_grad: bool = False
    sum_pi_squared: bool = False
    record_routes: bool = False
    replay_routes: bool = False

    def __post_init__(self) -> None:
        assert (self.micro_batch_size is None) != (self.max_tokens is None), (
            f"set one of micro_batch_size={self.micro_batch_size} and max_tokens={self.max_tokens}"
        )
        assert self.temperature > 0, f"temperature must be positive, got {self.temperature}"
        assert not (self.record_routes and self.replay_routes), "routes are recorded or replayed, not both"


class TrainEngine(ABC):
    """A model sharded over ranks that can score tokens, learn, and show its weights.

    One instance per process; `torch.distributed` is initialised before construction. All methods are
    collective over all ranks unless said otherwise. Data-parallel rank d receives its own share of the
    batch; the ranks of one model-parallel group (TP, PP, CP) receive the same share.
    """

    dp_rank: int
    dp_size: int
    is_output_rank: bool  # this rank's log_probs() and metrics are the ones of its DP share
    is_weight_source: bool  # this rank's hf_weights() yields tensors; others yield nothing

    @abstractmethod
    def load(self, hf_path: str | Path) -> None:
        """Read weights from a Hugging Face directory; every parameter is written exactly once."""

    @abstractmethod
    def log_probs(self, batch: TrainBatch, options: ForwardOptions) -> PolicyOutput:
        """Score without gradient. Returns [T] float32 on CPU in the batch's own order (zeros at first
        tokens) on `is_output_rank`; other ranks return the same shape with unspecified content. Recorded routes
        [T, layers, K] come likewise."""

    @abstractmethod
    def values(self, batch: TrainBatch, options: ForwardOptions) -> Tensor:
        """What a value model (`head` "value") has in the place of `log_probs`: [T] float32 on CPU, entry t the value
        of the state before token t, 0 at first tokens; on other than output ranks as there. Of `options` only the
        cut into micro-batches counts."""

    @abstractmethod
    def update(
        self, batch: TrainBatch, loss: LossFn, denominators: Denominators, options: ForwardOptions, step: int
    ) -> Metrics:
        """One optimizer step on one mini-batch share, at the learning rate of training step `step`
        (completed steps before this one). Metrics hold the loss's own (merged over this rank's
        micro-batches) plus `<role>/grad_norm` (before clipping, global), `<role>/lr`,
        `<role>/nonfinite_grad_steps`. A non-finite gradient norm changes no parameter on any rank."""

    @abstractmethod
    def hf_weights(self) -> Iterator[tuple[str, Tensor]]:
        """(HF disk name, full tensor) in the compute dtype, in one fixed order; at most one bucket of
        extra memory. Tensors are valid until the next item is asked for."""

    @abstractmethod
    def save(self, directory: Path) -> None:
        """Write this rank's shard of weights, optimizer state and rng into an existing directory."""

    @abstractmethod
    def restore(self, directory: Path) -> None:
        """Inverse of save on the same layout; another layout is a ValueError naming both."""

    @abstractmethod
    def offload(self) -> None:
        """Move what the spec asks for to host memory (between phases). No-op on CPU."""

    @abstractmethod
    def onload(self) -> None:
        """Undo offload."""

    @abstractmethod
    def close(self) -> None:
        """Free the model; the process group stays the caller's."""


@dataclass(frozen=True)
class SamplingParams:
    """`temperature` 0 is greedy. `top_k` -1 and `top_p` 1.0 are off. `seed` with a prompt's uid and the
    sample index fixes the random stream of a sample whatever batch it is generated in."""

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_new_tokens: int = 512
    eos_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    repetition_penalty: float = 1.0
    seed: int = 0


@dataclass(frozen=True)
class Prompt:
    """Token ids of one prompt; `uid` groups its samples."""

    uid: str
    token_ids: tuple[int, ...]


@dataclass
class Sample:
    """One finished response.

    response_ids     R >= 0 token ids, the end token included when one was sampled
    log_probs        R floats: log p(token) under softmax(logits / temperature), before top-p/top-k cuts
    finish_reason    stop (end token), length (max_new_tokens), abort
    weight_version   version of the weights that produced it
    routes           [rows, layers, K] int16, the experts of every token that was fed to the model: all but the last
                     sampled one (engines/routes.py); None unless the engine was told to return them
    """

    uid: str
    index: int
    prompt_ids: tuple[int, ...]
    response_ids: list[int]
    log_probs: list[float]
    finish_reason: Literal["stop", "length", "abort"]
    weight_version: int
    routes: Tensor | None = field(default=None, compare=False, repr=False)


class RolloutEngine(ABC):
    """A model that generates. `version` is the weight version it holds; -1 before the first load. `receivers` is
    how many of its processes fetch weights for themselves."""

    version: int = -1
    receivers: int = 1
    _receiver: WeightReceiver | None = None

    @abstractmethod
    def generate(self, prompts: list[Prompt], sampling: SamplingParams) -> Iterator[Sample]:
        """Yield n samples per prompt as they finish, in any order. Raises RuntimeError when no complete
        set of weights has been loaded."""

    @abstractmethod
    def load_weights(self, stream: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Copy a full set of HF-named tensors in. Every parameter must be written exactly once (tied
        heads follow their embedding): otherwise ValueError listing missing, doubled and unknown names,
        and the engine refuses to generate until a complete load succeeded."""

    def fetch_weights(self, source: WeightSource, version: int) -> None:
        """Load one update from where the trainer offers it. On any error the trainer is told, and the engine stays
        unusable until the next complete update."""
        if self._receiver is None:
            self._receiver = source.receiver()  # lives on: what it maps is costly
        self._receiver.pull(self, version)

    @abstractmethod
    def score(self, sequences: list[list[int]], temperature: float) -> list[list[float]]:
        """log p of every token of each sequence (0.0 for the first) under the current weights: the probe
        that compares trainer and rollout."""

    @abstractmethod
    def sleep(self) -> None:
        """Free what generation needs while the trainer works."""

    @abstractmethod
    def wake(self, part: Literal["all", "weights", "cache"] = "all") -> None:
        """Undo sleep: `weights` before an update, `cache` after it, when the trainer has left the device."""

    @abstractmethod
    def close(self) -> None: ...
