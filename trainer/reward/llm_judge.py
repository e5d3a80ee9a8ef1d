"""A judge model decides whether an answer agrees with the reference. Runs in an AsyncPool: it only waits."""

from __future__ import annotations

import asyncio
import math
import os
import random
import time
from dataclasses import dataclass, field
from typing import Literal

from trainer.prompts.row import Row
from trainer.reward.judge.cache import VerdictCache, cache_key
from trainer.reward.judge.endpoint import Endpoint, EndpointError, Refused, Reply, Transient
from trainer.reward.judge.health import Health
from trainer.reward.judge.pool import AsyncPool
from trainer.reward.judge.prompt import REMINDER, load_template, messages_for, parse_verdict
from trainer.reward.result import RewardResult
from trainer.reward.stopped import ScoringStopped
from trainer.reward.text import answer_part

KEY = "rewards.llm_judge"


@dataclass(frozen=True)
class JudgeOptions:
    """`rewards.llm_judge.*`.

    api_base, model   an OpenAI-compatible endpoint (http://host:port/v1) and a model it lists
    api_key_env       name of the environment variable with the key
    prompt_path       template file; see judge/prompt.py
    timeout_s         seconds for one request
    max_retries       further tries of a failed request, after `backoff_s` x 1, 2, 4, ... seconds plus up to a quarter
    max_answer_chars  the end of an answer that the judge sees
    on_failure        mask marks a sample that cannot be judged as failed; stop ends the run
    max_down_s        seconds without any reply after which the run ends; `probe_s` between probes of a paused endpoint
    """

    api_base: str
    model: str
    api_key_env: str | None = None
    prompt_path: str | None = None
    max_tokens: int = 512
    temperature: float = 0.0
    timeout_s: float = 60.0
    max_retries: int = 3
    max_concurrency: int = 32
    cache_dir: str | None = None
    max_answer_chars: int = 4000
    on_failure: Literal["mask", "stop"] = "mask"
    max_down_s: float = 600.0
    backoff_s: float = 1.0
    probe_s: float = 10.0


@dataclass
class _Counts:
    """Since the metrics were last taken. `latencies` are seconds per answered request."""

    calls: int = 0
    cache_hit: int = 0
    retries: int = 0
    unparsed: int = 0
    verdicts: list[bool] = field(default_factory=list)
    latencies: list[float] = field(default_factory=list)


def build_pool(options: JudgeOptions) -> AsyncPool:
    """ValueError when the template, the key or the endpoint is not as it must be."""
    return AsyncPool(LlmJudge(options), options.max_concurrency)


class LlmJudge:
    """Scores 1 or 0. Reasons: agrees, differs, no_answer, think_unclosed; failed: judge_unparsed, judge_refused,
    judge_down."""

    def __init__(self, options: JudgeOptions) -> None:
        self._options = options
        self._template = load_template(options.prompt_path)
        self._key = _api_key(options.api_key_env)
        self._cache = VerdictCache(options.cache_dir)
        self._counts = _Counts()

    async def start(self) -> None:
        options = self._options
        self._endpoint = Endpoint(options.api_base, self._key, options.timeout_s, options.max_concurrency)
        self._health = Health(self._check_model, options.probe_s, options.max_down_s)
        try:
            await self._check_model()
        except EndpointError as error:
            raise ValueError(
                f"got {error} from the judge at {KEY}.api_base={options.api_base}; expected it to list the model "
                f"{options.model!r}; start the judge's server or correct {KEY}.api_base and {KEY}.model"
            ) from error

    async def __call__(self, text: str, row: Row, think_open: bool = False) -> RewardResult:
        judged = answer_part(text, think_open)
        if judged is None:
            return RewardResult(0.0, 0.0, None, "think_unclosed")
        candidate = judged.strip()[-self._options.max_answer_chars :]
        if not candidate:
            return RewardResult(0.0, 0.0, None, "no_answer")
        question = next(message.content for message in reversed(row.messages) if message.role == "user")
        try:
            verdict = await self._verdict(question, row.ground_truth, candidate)
        except Refused as error:
            return self._failure("judge_refused", row, str(error))
        except Transient as error:
            return self._failure("judge_down", row, str(error))
        if verdict is None:
            return self._failure("judge_unparsed", row, "two replies without a verdict line")
        self._counts.verdicts.append(verdict)
        return RewardResult(float(verdict), float(verdict), None, "agrees" if verdict else "differs")

    async def close(self) -> None:
        self._health.close()
        await self._endpoint.close()
        self._cache.close()

    def take_metrics(self) -> dict[str, float]:
        """calls, cache_hit, retries, unparsed, and where there are any latency_p50, latency_p95, yes_rate."""
        counts, self._counts = self._counts, _Counts()
        metrics = {name: float(vars(counts)[name]) for name in ("calls", "cache_hit", "retries", "unparsed")}
        if counts.verdicts:
            metrics["yes_rate"] = sum(counts.verdicts) / len(counts.verdicts)
        if counts.latencies:
            ordered = sorted(counts.latencies)
            for percent in (50, 95):
                metrics[f"latency_p{percent}"] = ordered[math.ceil(len(ordered) * percent / 100) - 1]
        return metrics

    async def _check_model(self) -> None:
        served = await self._endpoint.models()
        if self._options.model not in served:
            raise EndpointError(f"the models {served}")

    async def _verdict(self, question: str, reference: str, candidate: str) -> bool | None:
        """From the cache, else from the judge; None when two replies hold none. EndpointError."""
        options = self._options
        key = cache_key(
            *(options.model, self._template, question, reference, candidate, options.max_tokens, options.temperature)
        )
        known = self._cache.get(key)
        if known is not None:
            self._counts.cache_hit += 1
            return known
        messages = messages_for(self._template, question, reference, candidate)
        reply = await self._reply(messages)
        verdict = self._parse(reply)
        if verdict is None:
            repeat = [{"role": "assistant", "content": reply.text}, {"role": "user", "content": REMINDER}]
            verdict = self._parse(await self._reply([*messages, *repeat]))
        if verdict is not None:
            self._cache.put(key, verdict)
        return verdict

    def _parse(self, reply: Reply) -> bool | None:
        """A reply that the token limit cut says nothing, however its last line looks."""
        verdict = parse_verdict(reply.text) if reply.complete else None
        self._counts.unparsed += verdict is None
        return verdict

    async def _reply(self, messages: list[dict[str, str]]) -> Reply:
        """One reply, however many requests it takes. Refused, Transient, ScoringStopped."""
        options, tries = self._options, 0
        while True:
            await self._health.wait_until_up()
            self._counts.calls += 1
            started = time.monotonic()
            try:
                reply = await self._endpoint.chat(
                    options.model, messages, max_tokens=options.max_tokens, temperature=options.temperature
                )
            except Transient as error:
                if error.outage and self._health.failed(error):
                    continue
                if tries == options.max_retries:
                    raise
                self._counts.retries += 1
                await asyncio.sleep(self._pause(error, tries))
                tries += 1
            else:
                self._health.succeeded()
                self._counts.latencies.append(time.monotonic() - started)
                return reply

    def _pause(self, error: Transient, tries: int) -> float:
        """Seconds: what the server asks for, within reason, else the growing wait with jitter."""
        if error.retry_after is not None:
            return min(error.retry_after, self._options.max_down_s)
        return self._options.backoff_s * 2**tries * random.uniform(1.0, 1.25)

    def _failure(self, reason: str, row: Row, text: str) -> RewardResult:
        if self._options.on_failure == "stop":
            raise ScoringStopped(
                f"got {reason} for row {row.id!r} of tag {row.tag!r} ({text}); expected a verdict; mend the judge, or "
                f"set {KEY}.on_failure=mask to leave such samples out"
            )
        return RewardResult(0.0, None, None, reason, {"error": text}, failed=True)


def _api_key(name: str | None) -> str | None:
    if name is None:
        return None
    key = os.environ.get(name)
    if not key:
        raise ValueError(f"got {KEY}.api_key_env={name}, which is not set; expected the key in it; export {name}=...")
    return key
