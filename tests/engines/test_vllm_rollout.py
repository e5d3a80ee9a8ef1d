"""The vLLM rollout engine on a tiny mixture of experts: the default set's one look at it. It runs in a process of its
own; the steps share that process because starting vLLM takes most of the time."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from engines.base import RolloutEngine, SamplingParams
from engines.routes import LIVE, RouteShape, align
from tests.engines.vllm_bench import (
    DRAWN,
    GREEDY,
    PROMPTS,
    assert_same,
    changed,
    engine,
    ordered,
    stream_of,
    weights_of,
    write_model,
)
from tests.vllm_process import needs_vllm, run

pytestmark = [*needs_vllm, pytest.mark.timeout(400)]

LAYER = "model.layers.1"


def _run_all(folder: str) -> None:
    model = write_model(folder, "qwen3_moe")
    weights = weights_of(model)
    rollout, reference = engine("vllm", model, routes=True), engine("hf", model, routes=True)
    _refuses_to_generate(rollout, "holds no complete set of weights")
    for version in (1, 2, 3):
        newest = changed(weights, version)
        rollout.load_weights(stream_of(newest), version)
        reference.load_weights(newest.items(), version)
        assert_same(rollout, reference)
        _routes_are_those_of_transformers(rollout, reference)
    _faults(rollout, newest)
    rollout.load_weights(stream_of(newest), 4)
    assert_same(rollout, reference)
    _iterators(rollout, reference, newest)
    _sleep(rollout, newest)
    rollout.close()


def _routes_are_those_of_transformers(rollout: RolloutEngine, reference: RolloutEngine) -> None:
    shape = RouteShape(layers=3, moe_layers=(0, 1, 2), experts=8, topk=2)
    pairs = zip(*(ordered(each.generate(PROMPTS, GREEDY)) for each in (rollout, reference)), strict=True)
    for got, expected in pairs:
        tokens = len(got.prompt_ids) + len(got.response_ids)
        aligned = align(got.routes, tokens, shape)
        assert aligned.shape == (tokens, 3, 2) and int((aligned == LIVE).sum()) == 0
        assert torch.equal(got.routes.sort(-1).values, expected.routes.sort(-1).values)


def _refuses_to_generate(rollout: RolloutEngine, reason: str) -> None:
    with pytest.raises(RuntimeError, match=reason):
        rollout.generate(PROMPTS, GREEDY)
    with pytest.raises(RuntimeError, match=reason):
        rollout.score([[3, 4, 5]], 1.0)


def _dying(weights: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    yield from list(weights.items())[: len(weights) // 2]
    raise ConnectionError("the sender died")


def _faults(rollout: RolloutEngine, weights: dict[str, Tensor]) -> None:
    """Each names its tensor and leaves an engine that does not answer."""
    for gone in (
        f"{LAYER}.self_attn.k_proj.weight",  # one part of a fused target
        f"{LAYER}.input_layernorm.weight",
        f"{LAYER}.mlp.experts.5.up_proj.weight",
        f"{LAYER}.mlp.gate.weight",
        "model.embed_tokens.weight",
    ):
        kept = {name: tensor for name, tensor in weights.items() if name != gone}
        _is_refused(rollout, kept.items(), rf"missing \['{gone}'\], doubled \[\] and unknown \[\]")
    _is_refused(rollout, (weights | {"model.nope": torch.zeros(3)}).items(), r"unknown \['model.nope'\]")
    for name in (f"{LAYER}.self_attn.q_proj.weight", f"{LAYER}.mlp.experts.2.down_proj.weight"):
        tensor = weights[name]
        _is_refused(rollout, [*weights.items(), (name, tensor)], rf"doubled \['{name}'\]")
        # vLLM's own loaders would cut the longer one and say nothing.
        for other in (tensor[:-1], torch.cat([tensor, tensor[:32]])):
            _is_refused(rollout, (weights | {name: other}).items(), rf"unusable tensors \{{'{name}'")
    with pytest.raises(ConnectionError, match="the sender died"):
        rollout.load_weights(_dying(weights), 9)
    _refuses_to_generate(rollout, "holds no complete set of weights")


def _is_refused(rollout: RolloutEngine, stream, reason: str) -> None:
    left = iter(stream)
    with pytest.raises(ValueError, match=reason):
        rollout.load_weights(left, 9)
    assert next(left, None) is None, "the stream must be read to its end: its producers may be collective"
    _refuses_to_generate(rollout, "holds no complete set of weights")


def _iterators(rollout: RolloutEngine, reference: RolloutEngine, weights: dict[str, Tensor]) -> None:
    unfinished = rollout._engine.get_num_unfinished_requests
    long = SamplingParams(n=2, max_new_tokens=20, ignore_eos=True)
    with pytest.raises(ValueError, match=r"got end tokens \[130\]"):
        rollout.generate(PROMPTS, SamplingParams(eos_token_ids=(130,)))

    abandoned = rollout.generate(PROMPTS, SamplingParams(n=2, max_new_tokens=20, eos_token_ids=tuple(range(20))))
    next(abandoned)
    assert unfinished() > 0
    abandoned.close()
    assert unfinished() == 0 and not rollout._running and not rollout._finished

    # Two at once, and a score between: nobody takes another one's samples.
    one, other = rollout.generate(PROMPTS, GREEDY), rollout.generate(PROMPTS, DRAWN)
    first = next(one)
    drawn = [next(other)]
    rollout.score([[3, 4, 5]], 1.0)
    greedy, drawn = [first, *one], drawn + list(other)
    assert ordered(greedy) == ordered(rollout.generate(PROMPTS, GREEDY))
    assert ordered(drawn) == ordered(rollout.generate(PROMPTS, DRAWN)), "a sample's stream is its own"

    late = rollout.generate(PROMPTS, long)
    started = rollout.generate(PROMPTS, SamplingParams(n=2, max_new_tokens=30, eos_token_ids=tuple(range(20))))
    next(started)
    rollout.load_weights(stream_of(weights), 5)
    for each in (late, started):
        with pytest.raises(RuntimeError, match="weights were changed"):
            list(each)
    assert unfinished() == 0
    reference.load_weights(weights.items(), 5)
    assert_same(rollout, reference)


def _sleep(rollout: RolloutEngine, weights: dict[str, Tensor]) -> None:
    before = ordered(rollout.generate(PROMPTS, GREEDY))
    rollout.sleep()
    _refuses_to_generate(rollout, "is asleep")
    with pytest.raises(RuntimeError, match=r"weights are asleep: call wake\('weights'\)"):
        rollout.load_weights(stream_of(weights), 6)
    rollout.wake("weights")
    _refuses_to_generate(rollout, r"is asleep \(only \['weights'\] awake\)")
    rollout.load_weights(stream_of(weights), 6)
    rollout.wake("cache")
    after = ordered(rollout.generate(PROMPTS, GREEDY))
    assert [(s.response_ids, s.log_probs) for s in after] == [(s.response_ids, s.log_probs) for s in before]


def test_updates_faults_routes_iterators_and_sleep(tmp_path):
    run(_run_all, str(tmp_path), timeout=300)
