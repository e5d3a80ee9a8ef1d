"""Weight sync when something goes wrong, between real processes: every fault ends in time, with an error that names
the peer or the tensor, leaves nothing behind, and the next update works."""

import multiprocessing
import os
import re
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from engines import build_rollout_engine
from engines.base import RolloutEngine
from engines.spec import ModelSpec, RolloutEngineSpec
from engines.transport import Address, TransportError, open_receiver, open_sender
from engines.weight_sync import WeightReceiver, WeightSender
from tests.tiny import write_tiny_model

pytestmark = pytest.mark.gloo

TRANSPORTS = ("shm", "broadcast")
TIMEOUT_S = 2.0  # of every wait inside an update
SLACK_S = 4.0  # for a busy machine
FATAL = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload([__name__, "engines.rollout.hf"])


class Weights:
    """What WeightSender asks of a training engine. After `fault[1]` tensors the process does itself `fault[0]`."""

    def __init__(self, tensors: dict[str, torch.Tensor], fault: tuple[str, int] | None = None) -> None:
        self.tensors, self._fault = tensors, fault

    def hf_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from with_fault(self.tensors.items(), self._fault)


def with_fault(stream: Any, fault: tuple[str, int] | None) -> Iterator[tuple[str, torch.Tensor]]:
    for index, item in enumerate(stream):
        if fault is not None and index == fault[1]:
            os.kill(os.getpid(), FATAL[fault[0]])
        yield item


class Faulty(RolloutEngine):
    """A real rollout engine whose process meets its fault while it reads the stream."""

    def __init__(self, engine: RolloutEngine, fault: tuple[str, int] | None) -> None:
        self._engine, self._fault = engine, fault

    @property
    def version(self) -> int:
        return self._engine.version

    def load_weights(self, stream: Any, version: int) -> None:
        self._engine.load_weights(with_fault(stream, self._fault), version)

    generate = score = sleep = wake = close = None


def rollout_engine(model: str) -> RolloutEngine:
    return build_rollout_engine(RolloutEngineSpec("hf", "cpu", ModelSpec(model), dtype="float32"))


def replica(pipe: Connection, address: Address, model: str, name: str, fault: tuple[str, int] | None) -> None:
    """A rollout process: pulls the versions it is told, answers with "" or the error."""
    torch.set_num_threads(1)
    engine = Faulty(rollout_engine(model), fault)
    receiver = WeightReceiver(address, TIMEOUT_S, name)
    pipe.send("ready")
    while (version := pipe.recv()) is not None:
        try:
            receiver.pull(engine, version)
            pipe.send("")
        except (ValueError, TransportError) as error:
            pipe.send(str(error))


def trainer(pipe: Connection, transport: str, weights: Weights) -> None:
    """A training process that sends one update."""
    torch.set_num_threads(1)
    sender = WeightSender(True, 1, 20_000, TIMEOUT_S, 1, transport)
    pipe.send(sender.address)
    sender.push(weights, 1)


class Child:
    """A process and the pipe to it."""

    def __init__(self, target: Callable[..., None], *args: Any) -> None:
        self.pipe, end = FORKS.Pipe()
        self.process = FORKS.Process(target=target, args=(end, *args), daemon=True)
        self.process.start()
        end.close()

    def told(self, seconds: float = 60) -> Any:
        assert self.pipe.poll(seconds), f"{self.process} says nothing"
        return self.pipe.recv()

    def end(self) -> None:
        self.process.kill()
        self.process.join()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_model(tmp_path_factory.mktemp("faults") / "model", "qwen3"))


@pytest.fixture(scope="module")
def tensors(model: str) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in sorted(Path(model).glob("*.safetensors")):
        found |= load_file(file)
    return found


@pytest.fixture
def children() -> Iterator[Callable[..., Child]]:
    """Start processes; in the end all are gone and no shared memory, temporary file or open file is left."""
    started: list[Child] = []

    def start(*args: Any) -> Child:
        started.append(Child(*args))
        return started[-1]

    before = leftovers()
    yield start
    for child in started:
        child.end()
        child.pipe.close()
    assert leftovers() <= before
    assert not any(child.process.is_alive() for child in started)


def leftovers() -> set[str]:
    """Our names only: other runs on this machine come and go."""
    opened = [os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if os.path.lexists(entry)]
    return {
        *(str(file) for folder in ("/dev/shm", tempfile.gettempdir()) for file in Path(folder).glob("weights*")),
        *(file for file in opened if "memfd:weights" in file),
    }


def replicas(children: Any, sender: WeightSender, model: str, *faults: tuple[str, int] | None) -> list[Child]:
    found = [children(replica, sender.address, model, f"replica {i}", fault) for i, fault in enumerate(faults)]
    for child in found:
        assert child.told() == "ready"
    return found


def push(sender: WeightSender, tensors: dict[str, torch.Tensor], version: int, pulling: list[Child]) -> str:
    """One update with the replicas that pull it: the sender's error or "". It must end in time."""
    for child in pulling:
        child.pipe.send(version)
    start = time.monotonic()
    try:
        sender.push(Weights(tensors), version, len(pulling))
        return ""
    except TransportError as error:
        return str(error)
    finally:
        assert time.monotonic() - start < TIMEOUT_S + SLACK_S


@pytest.fixture(params=TRANSPORTS)
def sender(request: pytest.FixtureRequest) -> Iterator[WeightSender]:
    sender = WeightSender(True, 1, 20_000, TIMEOUT_S, 1, request.param)
    yield sender
    sender.close()


def closing_or_silent(fault: str, who: str) -> str:
    return rf"{who}.* closed the weight channel" if fault == "kill" else rf"got nothing from {who}.* for \d\.\d s"


@pytest.mark.parametrize("fault", ["kill", "stop"])
def test_a_replica_that_dies_or_hangs_in_a_bucket_is_named_and_can_be_replaced(children, sender, model, tensors, fault):
    well, bad = replicas(children, sender, model, None, (fault, 7))
    error = push(sender, tensors, 1, [well, bad])
    assert re.search(closing_or_silent(fault, r"replica 1 \(pid \d+ on"), error), error
    assert re.search(r"in version 1, bucket \d+, which ends with \S+weight", error), error
    assert re.search(r"gave the update up in version 1, bucket \d+, after \S+weight: .*replica 1", well.told())
    bad.end()
    (fresh,) = replicas(children, sender, model, None)
    assert push(sender, tensors, 1, [well, fresh]) == ""  # the same version again
    assert (well.told(), fresh.told()) == ("", "")
    assert push(sender, tensors, 2, [fresh]) == ""


@pytest.mark.parametrize("fault", ["kill", "stop"])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_training_rank_that_dies_or_hangs_leaves_an_engine_that_refuses_to_generate(
    children, model, tensors, transport, fault
):
    child = children(trainer, transport, Weights(tensors, (fault, 7)))
    engine = rollout_engine(model)
    receiver = WeightReceiver(child.told(), TIMEOUT_S, "replica 0")
    start = time.monotonic()
    with pytest.raises(TransportError, match=closing_or_silent(fault, "the training rank")):
        receiver.pull(engine, 1)
    assert time.monotonic() - start < 2 * TIMEOUT_S + SLACK_S
    assert engine.version == -1
    receiver.close()


def test_missing_extra_and_badly_shaped_tensors_are_named_on_both_ends_and_repaired_by_the_next_update(
    children, sender, model, tensors
):
    (child,) = replicas(children, sender, model, None)
    name = "model.layers.1.self_attn.q_norm.weight"
    wrong = {
        name: {key: value for key, value in tensors.items() if key != name},
        "model.layers.7.extra.weight": tensors | {"model.layers.7.extra.weight": torch.zeros(3)},
        "model.norm.weight": tensors | {"model.norm.weight": torch.zeros(3)},
    }
    for version, (culprit, sent) in enumerate(wrong.items()):
        error = push(sender, sent, version, [child])
        assert "replica 0 (pid" in error and "refused the weights" in error and culprit in error
        assert culprit in child.told()
    assert push(sender, tensors, 3, [child]) == ""
    assert child.told() == ""


def test_a_replica_that_asks_for_another_version_is_told_at_once(children, sender, model, tensors):
    (child,) = replicas(children, sender, model, None)
    child.pipe.send(7)
    start = time.monotonic()
    error = push(sender, tensors, 1, [child])  # the child works off its orders one by one: first 7, then 1
    assert "the trainer is sending version 1" in child.told(TIMEOUT_S)
    assert time.monotonic() - start < TIMEOUT_S
    assert (error, child.told()) == ("", "")


def test_a_replica_that_never_comes_ends_the_update_in_time(children, sender, model, tensors):
    (child,) = replicas(children, sender, model, None)
    child.pipe.send(7)
    error = push(sender, tensors, 1, [])
    assert error == ""  # nobody was asked for
    child.pipe.send(None)
    start = time.monotonic()
    with pytest.raises(TransportError, match=rf"got 0 of 1 rollout workers .* within {TIMEOUT_S} s; replica 0 .*asked"):
        sender.push(Weights(tensors), 1)
    assert TIMEOUT_S <= time.monotonic() - start < TIMEOUT_S + SLACK_S


def collector(pipe: Connection, address: Address, file: str) -> None:
    receiver = open_receiver(address, "cpu", TIMEOUT_S, "collector")
    pipe.send("ready")
    torch.save({name: tensor.clone() for name, tensor in receiver.receive(1)}, file)
    receiver.confirm(1)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_bucket_smaller_than_the_largest_tensor_and_odd_sizes_arrive_bit_equal(children, transport, tmp_path):
    torch.manual_seed(0)
    wanted = {
        "odd": torch.randn(3, 7).bfloat16(),
        "f32": torch.randn(5),
        "large": torch.randn(100, 50),
        "odd again": torch.randn(1).bfloat16(),
        "f64": torch.randn(3).double(),
    }
    sender = open_sender(transport, "cpu", 1000, TIMEOUT_S)
    child = children(collector, sender.address, str(tmp_path / "got"))
    child.told()
    sent = sender.send(iter(wanted.items()), 1, True, 1)
    child.process.join(30)
    got = torch.load(tmp_path / "got")
    assert list(got) == list(wanted) and sent.buckets > 20000 / 1024
    assert all(got[name].dtype == value.dtype and torch.equal(got[name], value) for name, value in wanted.items())
    sender.close()
