"""Send each answer to the scorer of its row; map and shape the score that comes back."""

from __future__ import annotations

import functools
import importlib.util
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from trainer.reward.code_sandbox import check_start, processes
from trainer.reward.custom import load_custom
from trainer.reward.instructions.accuracy import accuracies
from trainer.reward.judge.pool import AsyncPool
from trainer.reward.overlong import check_overlong, overlong_penalty
from trainer.reward.pool import ScorerError, Target, WorkerPool
from trainer.reward.result import RewardResult
from trainer.reward.spec import SCORED_DOMAINS, TIMEOUT_S, CustomSpec, DomainSpec, OverlongSpec, check_options
from trainer.reward.stopped import ScoringStopped

if TYPE_CHECKING:
    from trainer.prompts.row import Row

CUSTOM = "custom"  # pool name of the user's function
# domain -> (module, class) of the scorer built in each scoring process
SCORERS = {
    "choice": ("trainer.reward.choice", "Choice"),
    "code_sandbox": ("trainer.reward.code_sandbox", "CodeSandbox"),
    "crossthinkqa": ("trainer.reward.choice", "Choice"),
    "ifeval": ("trainer.reward.ifeval", "IfEval"),
    "math_rule": ("trainer.reward.math_rule", "MathRule"),
}
CODE = "code_sandbox"  # must be able to wall programs off
JUDGE = "llm_judge"  # waits for an endpoint instead of computing: no processes
SUMMARIES = {"ifeval": accuracies}  # domain -> numbers over many answers, from what their `extra` holds


class RewardManager:
    """Scores answers in processes of their own, one pool per domain, so a slow domain blocks no other.

    The user's function replaces all scorers, or those of `custom.domains`. `num_workers` is the size of
    every pool without an own `world_size`. Raises ValueError for settings that cannot work.
    """

    def __init__(
        self,
        domains: Mapping[str, DomainSpec],
        custom: CustomSpec | None = None,
        *,
        num_workers: int,
        overlong: OverlongSpec | None = None,
    ) -> None:
        if num_workers < 1:
            raise ValueError(f"got reward.num_workers={num_workers}; expected at least 1; raise it")
        check_overlong(overlong)
        self._custom, self._overlong, self._num_workers = custom, overlong, num_workers
        self._domains = {
            name: DomainSpec(timeout_s=TIMEOUT_S.get(name, DomainSpec.timeout_s)) for name in SCORERS
        } | dict(domains)
        self._pools: dict[str, WorkerPool | AsyncPool] = {}
        self._seen: list[tuple[str, Mapping[str, Any]]] = []
        self._lock = threading.Lock()
        if custom is not None:
            load_custom(custom)  # here, so that mistakes show before any process or model is started
        for domain, spec in self._domains.items():
            if domain in SCORED_DOMAINS:
                check_options(domain, spec.options)
        if importlib.util.find_spec("math_verify") is None and not self._is_custom("math_rule"):
            raise ValueError("got no package math_verify; expected version 0.9.0; pip install math-verify==0.9.0")
        with ExitStack() as undo:
            undo.callback(self.close)
            if custom is not None:
                self._pool(CUSTOM)
            for domain in domains:
                if domain in SCORED_DOMAINS and not self._is_custom(domain):
                    self._pool(domain)
            undo.pop_all()

    def submit(self, text: str, row: Row, *, response_length: int, think_open: bool = False) -> Future[RewardResult]:
        """Score one answer; returns at once.

        `response_length` is in tokens, padding excluded. `think_open` says that the prompt ended inside a
        thinking block. The future raises ValueError when the user's function failed and `on_error=stop`, and
        ScoringStopped when the run must end in order.
        """
        name = CUSTOM if self._is_custom(row.domain) else row.domain
        outer: Future[RewardResult] = Future()
        outer.set_running_or_notify_cancel()
        inner = self._pool(name).submit(text, row, think_open)
        shape = functools.partial(self._shape, name=name, response_length=response_length)
        inner.add_done_callback(_forward(outer, shape, self._on_error(name, row)))
        return outer

    def take_metrics(self) -> dict[str, float]:
        """`reward/<domain>/{latency_mean, latency_max, queue_max, timeouts, failed}` and the domain's own numbers,
        since the last call."""
        metrics: dict[str, float] = {}
        for name, pool in list(self._pools.items()):
            stats = pool.take_stats()
            if stats.latencies:
                metrics[f"reward/{name}/latency_mean"] = sum(stats.latencies) / len(stats.latencies)
                metrics[f"reward/{name}/latency_max"] = max(stats.latencies)
            metrics[f"reward/{name}/queue_max"] = float(stats.queue_max)
            metrics[f"reward/{name}/timeouts"] = float(stats.timeouts)
            metrics[f"reward/{name}/failed"] = float(stats.failed)
            metrics |= {f"reward/{name}/{key}": value for key, value in stats.more.items()}
        seen, self._seen = self._seen, []
        for name, summary in SUMMARIES.items():
            numbers = summary([extra for domain, extra in seen if domain == name])
            metrics |= {f"reward/{name}/{key}": value for key, value in numbers.items()}
        return metrics

    def close(self) -> None:
        """End all processes; answers that still wait are cancelled."""
        with self._lock:
            pools = list(self._pools.values())
        for pool in pools:
            pool.close()

    def __enter__(self) -> RewardManager:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _is_custom(self, domain: str) -> bool:
        return self._custom is not None and (self._custom.domains is None or domain in self._custom.domains)

    def _pool(self, name: str) -> WorkerPool | AsyncPool:
        with self._lock:
            if name not in self._pools:
                self._pools[name] = self._build_pool(name)
            return self._pools[name]

    def _build_pool(self, name: str) -> WorkerPool | AsyncPool:
        if name == CUSTOM:
            target = Target("trainer.reward.custom", "CustomScorer", {"spec": self._custom})
            return WorkerPool(target, self._num_workers, self._custom.timeout_s)
        if name not in self._domains or name not in SCORED_DOMAINS:
            raise ValueError(
                f"got a row of domain {name!r}, which has no scorer; expected one of {sorted(SCORERS)}; "
                "remove the row or set reward.custom_reward_function.path"
            )
        spec = self._domains[name]
        if name == JUDGE:
            from trainer.reward.llm_judge import JudgeOptions, build_pool  # its HTTP client is for those who use it

            return build_pool(JudgeOptions(**spec.options, timeout_s=spec.timeout_s))
        target = Target(*SCORERS[name], dict(spec.options))
        size = spec.world_size or self._num_workers
        if name == CODE:
            check_start(spec.options, spec.timeout_s)
            size = processes(size, spec.options)
        return WorkerPool(target, size, spec.timeout_s)

    def _shape(self, result: RewardResult, name: str, response_length: int) -> RewardResult:
        """Map wrong/right to the domain's scores and add the length penalty. Accuracy stays untouched."""
        if result.failed:
            return result
        if name in SUMMARIES:
            self._seen.append((name, result.extra))
        wrong, right = (0.0, 1.0) if name == CUSTOM else self._domains[name].score_map
        penalty = overlong_penalty(self._overlong, response_length)
        extra = dict(result.extra)
        if self._overlong is not None and self._overlong.enable:
            extra["overlong_penalty"] = penalty
        return replace(result, score=wrong + (right - wrong) * result.score + penalty, extra=extra)

    def _on_error(self, name: str, row: Row) -> Callable[[ScorerError], RewardResult]:
        """What an exception inside the scorer becomes: a ValueError, or a result marked failed."""

        def decide(error: ScorerError) -> RewardResult:
            if name == CUSTOM and self._custom.on_error == "stop":
                raise ValueError(
                    f"got an exception from {self._custom.path} ({self._custom.name}) for row {row.id!r} of tag "
                    f"{row.tag!r}; expected a finite score; mend the function\n{error}"
                ) from error
            return RewardResult(0.0, None, None, "error", {"error": str(error)}, failed=True)

        return decide


def _forward(
    outer: Future[RewardResult],
    shape: Callable[[RewardResult], RewardResult],
    on_error: Callable[[ScorerError], RewardResult],
) -> Callable[[Future[RewardResult]], None]:
    """A done-callback that carries a pool's result over to the caller's future."""

    def done(inner: Future[RewardResult]) -> None:
        if inner.cancelled():
            outer.set_exception(RuntimeError("the reward manager was closed before this answer was scored"))
            return
        error = inner.exception()
        if isinstance(error, ScoringStopped):
            outer.set_exception(error)
            return
        try:
            outer.set_result(shape(inner.result()) if error is None else on_error(error))
        except ValueError as refused:
            outer.set_exception(refused)
        finally:
            if not outer.done():  # a fault of ours, logged by the executor: nobody may wait for ever
                outer.set_exception(RuntimeError("the score could not be shaped; the log has the traceback"))

    return done
