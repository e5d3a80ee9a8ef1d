"""Requests into vLLM, samples out as they finish."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from vllm import EngineArgs, RequestOutput
from vllm import SamplingParams as VllmSampling
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.llm_engine import LLMEngine

from engines.base import Prompt, RolloutEngine, Sample, SamplingParams
from engines.rollout.sampling import check_sampling
from engines.rollout.vllm.arguments import engine_arguments, served_folder
from engines.rollout.vllm.pair import check_pair
from engines.rollout.vllm.platform import platform_of
from engines.spec import RolloutEngineSpec
from engines.weight_sync import WeightSource

REASONS = ("stop", "length", "abort")


@dataclass(frozen=True)
class _Request:
    prompt: Prompt
    index: int
    internal_id: str  # vLLM's own


class VllmRolloutEngine(RolloutEngine):
    """One replica. The weights are random until the first load_weights()."""

    def __init__(self, spec: RolloutEngineSpec) -> None:
        self.spec, self._platform = spec, platform_of(spec.device)
        with served_folder(spec) as folder:
            arguments = engine_arguments(spec, folder, self._platform)
            self._engine = LLMEngine.from_engine_args(EngineArgs(**arguments))
        served = self._engine.model_config
        self._vocabulary = served.hf_config.vocab_size
        check_pair(spec, served.hf_config.to_dict(), str(served.dtype).removeprefix("torch."), served.max_model_len)
        self._sleeps = self._platform.can_sleep and spec.vllm.enable_sleep_mode
        self._captures = spec.return_routes and not self._platform.returns_routes
        self._engine.collective_rpc("prepare_updates", args=(spec, self._captures))
        self.receivers = spec.vllm.tensor_parallel_size
        self._awake: set[str] = {"weights", "cache"}
        self._batches = 0
        self._running: dict[str, _Request] = {}  # by public id, like the next
        self._finished: dict[str, RequestOutput] = {}

    def generate(self, prompts: list[Prompt], sampling: SamplingParams) -> Iterator[Sample]:
        """Checks at once, generates as the result is iterated; closing the iterator aborts what is unfinished."""
        self._check_ready()
        check_sampling(sampling)
        wrong = {p.uid: len(p.token_ids) for p in prompts if not 0 < len(p.token_ids) < self.spec.max_model_len}
        if wrong:
            raise ValueError(
                f"got prompt lengths {wrong} (by uid); expected 1..{self.spec.max_model_len - 1} tokens; "
                "raise rollout.max_model_len or filter long prompts (data.filter_overlong_prompts)"
            )
        ends = [token for token in sampling.eos_token_ids if not 0 <= token < self._vocabulary]
        if ends:
            raise ValueError(
                f"got end tokens {ends}; expected ids below the vocabulary's {self._vocabulary}: no answer could end "
                "with them; use the tokenizer that belongs to the model"
            )
        return self._run(prompts, sampling, self.version)

    def _run(self, prompts: list[Prompt], sampling: SamplingParams, version: int) -> Iterator[Sample]:
        self._batches += 1
        waiting: set[str] = set()
        try:
            for number, prompt in enumerate(prompts):
                for index in range(sampling.n):
                    name = f"{self._batches}.{number}.{index}"
                    inside = self._engine.add_request(
                        name,
                        {"prompt_token_ids": list(prompt.token_ids)},
                        request_sampling(sampling, prompt.uid, index),
                    )
                    waiting.add(name)
                    self._running[name] = _Request(prompt, index, inside)
            while waiting:
                if self.version != version or len(self._awake) < 2:
                    raise RuntimeError("weights were changed or put to sleep while samples were still being generated")
                name = next((name for name in self._finished if name in waiting), None)
                if name is None:
                    self._advance()
                else:
                    waiting.remove(name)
                    yield self._sample(self._running.pop(name), self._finished.pop(name), version)
        finally:
            self._drop(waiting)

    def _advance(self) -> None:
        """One step of everything that runs, whoever asked for it."""
        for output in self._engine.step():
            if output.finished:
                self._finished[output.request_id] = output

    def _drop(self, names: Iterable[str]) -> None:
        """Stop these requests and forget them."""
        dropped = {name: self._running.pop(name) for name in names if name in self._running}
        if not dropped:
            return
        self._engine.abort_request(list(dropped))
        for name in dropped:
            self._finished.pop(name, None)
        if self._captures:
            self._engine.collective_rpc("forget_routes", args=([each.internal_id for each in dropped.values()],))

    def _sample(self, request: _Request, output: RequestOutput, version: int) -> Sample:
        answer = output.outputs[0]
        if answer.finish_reason not in REASONS:
            raise RuntimeError(
                f"vLLM ended a sample of prompt {request.prompt.uid} with {answer.finish_reason!r}; expected one of "
                f"{REASONS}"
            )
        tokens = list(answer.token_ids)
        return Sample(
            uid=request.prompt.uid,
            index=request.index,
            prompt_ids=request.prompt.token_ids,
            response_ids=tokens,
            log_probs=[step[token].logprob for step, token in zip(answer.logprobs, tokens, strict=True)],
            finish_reason=answer.finish_reason,
            weight_version=version,
            routes=self._routes(request, answer, len(request.prompt.token_ids) + len(tokens) - 1),
        )

    def _routes(self, request: _Request, answer, tokens: int) -> Tensor | None:
        if not self.spec.return_routes:
            return None
        if self._captures:
            return self._engine.collective_rpc("take_routes", args=(request.internal_id, tokens))[0]
        if answer.routed_experts is None:
            return None  # counted and handled like any sample without routes
        return torch.as_tensor(answer.routed_experts.astype("int16"))

    def load_weights(self, stream: Iterable[tuple[str, Tensor]], version: int) -> None:
        if self.receivers > 1:
            raise ValueError(
                f"got a stream for a replica of {self.receivers} processes; expected an address to fetch from: tensors "
                "do not travel between them; call fetch_weights()"
            )
        self._begin_update()
        self._engine.collective_rpc("load_stream", args=(stream, version))
        self._finish_update(version)

    def fetch_weights(self, source: WeightSource, version: int) -> None:
        self._begin_update()
        for errors in self._engine.collective_rpc("fetch_weights", args=(source, version)):
            for error in errors:
                raise error
        self._finish_update(version)

    def _begin_update(self) -> None:
        """What still runs began under other weights; its iterator will say so."""
        if "weights" not in self._awake:
            raise RuntimeError("this rollout engine's weights are asleep: call wake('weights') first")
        self.version = -1
        self._drop(list(self._running))

    def _finish_update(self, version: int) -> None:
        """Keys and values of known prompts belong to the old weights."""
        if not self._engine.reset_prefix_cache():
            raise RuntimeError("vLLM did not drop its prefix cache, which belongs to the old weights")
        self.version = version

    def score(self, sequences: list[list[int]], temperature: float) -> list[list[float]]:
        """vLLM scores prompts by their raw logits: temperature 1 only."""
        self._check_ready()
        if temperature != 1.0:
            raise ValueError(f"got temperature={temperature}; expected 1.0: vLLM scores prompts by raw logits only")
        params = VllmSampling(
            max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
        )
        names = [f"score.{number}" for number in range(len(sequences))]
        for name, sequence in zip(names, sequences, strict=True):
            self._engine.add_request(name, {"prompt_token_ids": list(sequence)}, params)
        while not self._finished.keys() >= set(names):
            self._advance()
        scores = []
        for output in map(self._finished.pop, names):
            steps = zip(output.prompt_logprobs[1:], output.prompt_token_ids[1:], strict=True)
            scores.append([0.0, *(step[token].logprob for step, token in steps)])
        return scores

    def _check_ready(self) -> None:
        if self.version < 0 or len(self._awake) < 2:
            state = (
                f"is asleep (only {sorted(self._awake)} awake): call wake()"
                if len(self._awake) < 2
                else "holds no complete set of weights: call load_weights()"
            )
            raise RuntimeError(f"this rollout engine {state} first")

    def sleep(self) -> None:
        """Level 1 keeps the weights on the host, 2 drops them: the next update brings them back."""
        self._drop(list(self._running))
        if self._sleeps and self._awake:
            self._engine.sleep(level=self.spec.vllm.sleep_level)
            if self.spec.vllm.sleep_level == 2:
                self.version = -1
        self._awake.clear()

    def wake(self, part: Literal["all", "weights", "cache"] = "all") -> None:
        """`weights` before an update, `cache` after it: both at once would need the memory of both."""
        wanted = {"weights", "cache"} if part == "all" else {part}
        for each in sorted(wanted - self._awake, reverse=True):
            if self._sleeps:
                self._engine.wake_up(tags=["kv_cache" if each == "cache" else each])
            self._awake.add(each)

    def close(self) -> None:
        self.version = -1
        self._engine.engine_core.shutdown()


def request_sampling(sampling: SamplingParams, uid: str, index: int) -> VllmSampling:
    """One sample's own random stream, whatever is decoded beside it."""
    digest = hashlib.blake2b(f"{sampling.seed}/{index}/{uid}".encode(), digest_size=8).digest()
    return VllmSampling(
        n=1,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        repetition_penalty=sampling.repetition_penalty,
        max_tokens=sampling.max_new_tokens,
        stop_token_ids=[] if sampling.ignore_eos else list(sampling.eos_token_ids),
        ignore_eos=True,  # the list above decides; vLLM's own end token comes from the config
        seed=None if sampling.temperature == 0 else int.from_bytes(digest, "little") >> 1,
        logprobs=0,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
