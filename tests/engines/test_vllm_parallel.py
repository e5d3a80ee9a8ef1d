"""One replica over two processes (tensor parallelism): each of them fetches the weights for itself."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
from torch import Tensor

from engines.base import RolloutEngine
from engines.transport import TransportError
from engines.weight_sync import WeightSender, WeightSource
from tests.engines.vllm_bench import (
    GREEDY,
    PROMPTS,
    assert_same,
    changed,
    engine,
    ordered,
    weights_of,
    write_model,
)
from tests.vllm_process import needs_vllm, run

pytestmark = [*needs_vllm, pytest.mark.gloo, pytest.mark.slow, pytest.mark.timeout(500)]


class Trainer:
    """The one training rank, as a sender sees it."""

    def __init__(self, weights: dict[str, Tensor]) -> None:
        self.weights = weights

    def hf_weights(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.weights.items()


def _push(
    sender: WeightSender, rollout: RolloutEngine, weights: dict[str, Tensor], version: int
) -> BaseException | None:
    """One update through shared memory; returns what the sender raised."""
    source, failures = WeightSource(sender.address, 60.0, "replica 0", "cpu"), []

    def send() -> None:
        try:
            sender.push(Trainer(weights), version)
        except (TransportError, ValueError) as error:
            failures.append(error)

    thread = threading.Thread(target=send)
    thread.start()
    try:
        rollout.fetch_weights(source, version)
    finally:
        thread.join()
    return failures[0] if failures else None


def _follow(folder: str, kind: str) -> None:
    model = write_model(folder, kind)
    routes = kind == "qwen3_moe"
    rollout = engine("vllm", model, routes, tensor_parallel_size=2)
    reference = engine("hf", model, routes)
    assert rollout.receivers == 2
    children = [child.pid for child in psutil.Process().children(recursive=True)]
    mapped = [line for pid in children for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    shared = [line for line in mapped if "cpushm" in line]
    assert shared and all(line.endswith("(deleted)") for line in shared), (
        "shared memory that a killed replica would leave"
    )
    with pytest.raises(ValueError, match=r"got a stream for a replica of 2 processes.*call fetch_weights\(\)"):
        rollout.load_weights(iter(()), 1)
    sender = WeightSender(True, rollout.receivers, 1 << 16, 60.0, verify_every=1)
    weights = weights_of(model)
    for version in (1, 2):
        newest = changed(weights, version)
        assert _push(sender, rollout, newest, version) is None
        reference.load_weights(newest.items(), version)
        assert_same(rollout, reference)
    gone = "model.layers.1.self_attn.o_proj.weight"
    kept = {name: tensor for name, tensor in newest.items() if name != gone}
    with pytest.raises(ValueError, match=rf"missing \['{gone}'\]"):
        _push(sender, rollout, kept, 3)
    with pytest.raises(RuntimeError, match="holds no complete set of weights"):
        rollout.generate(PROMPTS, GREEDY)
    assert _push(sender, rollout, newest, 4) is None
    answers = assert_same(rollout, reference)
    if routes:
        expected = ordered(reference.generate(PROMPTS, GREEDY))
        for got, want in zip(answers, expected, strict=True):
            assert torch.equal(got.routes.sort(-1).values, want.routes.sort(-1).values)
    sender.close()
    rollout.close()


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe", "deepseek_v3"])
def test_two_processes_answer_like_one(tmp_path, kind):
    run(_follow, str(tmp_path), kind, timeout=400)
