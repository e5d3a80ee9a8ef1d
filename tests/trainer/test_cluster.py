"""Ray for real: placement, calls, streams, and the one error a broken worker leaves behind."""

import os
import signal
import time
from pathlib import Path

import pytest

from trainer import cluster
from trainer.cluster import Cluster, Lost, Pool, WorkerFailed

pytestmark = pytest.mark.gloo
REPOSITORY = str(Path(__file__).resolve().parents[2])


class Echo:
    def __init__(self, index: int) -> None:
        self.index = index

    def pid(self) -> int:
        return os.getpid()

    def add(self, value: int) -> int:
        return self.index + value

    def count(self, upto: int):
        for value in range(upto):
            yield self.index, value

    def count_and(self, upto: int, then: str):
        yield from self.count(upto)
        if then == "die":
            time.sleep(0.5)  # its items are on their way
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(10)

    def fail(self, guilty: int) -> None:
        if self.index == guilty:
            raise ValueError("the real cause")
        time.sleep(0.5)
        raise RuntimeError("[gloo] Connection closed by peer [127.0.0.1]")

    def echo_first(self) -> None:
        if self.index == 0:
            raise RuntimeError("[gloo] Connection closed by peer [127.0.0.1]")
        time.sleep(0.5)
        raise ValueError("the real cause")

    def die(self, guilty: int) -> None:
        if self.index == guilty:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)


@pytest.fixture(scope="module")
def ray_cluster():
    started = Cluster(bundles=4, env={"PYTHONPATH": REPOSITORY})
    yield started
    started.shutdown()


@pytest.fixture
def group(ray_cluster):
    placement = ray_cluster.place(Pool(2, "CPU"))
    group = ray_cluster.spawn("echo", Echo, placement, [(0,), (1,)], share=0.5)
    yield group
    group.kill()
    ray_cluster.release(placement)


def test_calls_answer_in_worker_order_and_two_groups_share_one_placement(ray_cluster):
    placement = ray_cluster.place(Pool(2, "CPU"))
    first = ray_cluster.spawn("first", Echo, placement, [(0,), (1,)], share=0.5)
    second = ray_cluster.spawn("second", Echo, placement, [(10,), (11,)], share=0.5)
    assert first.call("add", 5) == [5, 6]
    assert second.call_each("add", [(1,), (2,)]) == [11, 13]
    assert cluster.wait(first.start("add", 0), second.start("add", 0)) == [[0, 1], [10, 11]]
    for each in (first, second):
        each.kill()
    ray_cluster.release(placement)


def test_streams_deliver_every_item_of_every_worker(group):
    streams = group.streams("count", idle_s=60)
    for index, upto in enumerate((3, 5)):
        streams.open(index, upto)
    items = list(streams)
    assert sorted(items) == [(0, (0, i)) for i in range(3)] + [(1, (1, i)) for i in range(5)]
    assert [value for index, (_, value) in items if index == 1] == list(range(5))


def test_a_stream_that_dies_or_falls_silent_is_lost_and_a_fresh_worker_goes_on(group):
    streams = group.streams("count_and", idle_s=3)
    streams.open(0, 2, "die")
    streams.open(1, 2, "sleep")
    found = list(streams)
    assert sorted(item for item in found if not isinstance(item[1], Lost)) == [
        (i, (i, j)) for i in (0, 1) for j in (0, 1)
    ]
    why = {index: item.why for index, item in found if isinstance(item, Lost)}
    assert "echo 0 died in count_and()" in why[0] and "echo 1 gave nothing for 3 s" in why[1]
    before = group.only([1]).call("pid")
    for index in (0, 1):
        group.respawn(index)
    assert group.call("add", 1) == [1, 2] and group.only([1]).call("pid") != before


@pytest.mark.parametrize("method,args", [("fail", (0,)), ("fail", (1,)), ("echo_first", ())])
def test_the_cause_is_told_from_a_peers_echo_of_it(group, method, args):
    with pytest.raises(WorkerFailed, match="the real cause") as caught:
        group.call(method, *args)
    assert f"in {method}()" in str(caught.value)
    assert "Traceback" in str(caught.value) or "ray::" in str(caught.value)


def test_a_killed_worker_is_named_within_seconds(group):
    start = time.monotonic()
    with pytest.raises(WorkerFailed, match=r"echo 1 in die\(\): the process died"):
        group.call("die", 1)
    assert time.monotonic() - start < 20


def test_too_large_a_pool_is_refused_with_what_is_there(ray_cluster):
    with pytest.raises(ValueError, match=r"no place for 999 x .*within 1 s"):
        ray_cluster.place(Pool(999, "CPU"), timeout_s=1)
