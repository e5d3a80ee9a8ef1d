import threading

import numpy as np
import pytest
import torch

from engines.transport import TransportError, open_receiver, open_sender
from engines.transport.base import Record
from engines.transport.buckets import Bucket, checksum
from engines.transport.delta import BLOCK, DeltaReceiver, DeltaSender
from tests.engines.test_weight_sync import assert_equal, close, exchange, receivers_of


def bucket(delta: DeltaSender, content: torch.Tensor) -> Bucket:
    delta.staging[: len(content)] = content
    return Bucket(delta.staging, [Record("w", (len(content),), torch.uint8, 0, len(content), 0)], len(content))


def test_only_changed_blocks_travel():
    """16 blocks, of which blocks 3 and 15 change by one byte each."""
    sender, receiver, slot = DeltaSender(1024), DeltaReceiver(), torch.zeros(1024, dtype=torch.uint8)
    content = torch.arange(1024).to(torch.uint8)
    assert sender.begin([None]) is False
    receiver.begin(False)
    used, patch = sender.encode(bucket(sender, content), slot)
    assert (used, patch.mask) == (1024, None)
    receiver.decode(slot[:used], patch, checksum(content))
    sender.finish(1)

    content[3 * BLOCK] += 1
    content[15 * BLOCK + 63] += 1
    assert sender.begin([sender.stamp]) is True
    receiver.begin(True)
    used, patch = sender.encode(bucket(sender, content), slot)
    assert used == 2 * BLOCK
    assert np.unpackbits(np.frombuffer(patch.mask, dtype=np.uint8)).nonzero()[0].tolist() == [3, 15]
    assert slot[0] == content[3 * BLOCK] and slot[2 * BLOCK - 1] == content[-1]
    assert torch.equal(receiver.decode(slot[:used], patch, checksum(content)), content)


def test_a_bucket_that_changed_by_more_than_half_is_sent_whole():
    sender, slot = DeltaSender(1024), torch.zeros(1024, dtype=torch.uint8)
    content = torch.zeros(1024, dtype=torch.uint8)
    sender.begin([None])
    sender.encode(bucket(sender, content), slot)
    sender.finish(1)
    content[: 9 * BLOCK] = 1
    sender.begin([sender.stamp])
    used, patch = sender.encode(bucket(sender, content), slot)
    assert (used, patch.mask) == (1024, None)


def test_a_receiver_whose_copy_differs_is_noticed():
    sender, receiver, slot = DeltaSender(1024), DeltaReceiver(), torch.zeros(1024, dtype=torch.uint8)
    content = torch.zeros(1024, dtype=torch.uint8)
    sender.begin([None])
    receiver.begin(False)
    used, patch = sender.encode(bucket(sender, content), slot)
    receiver.decode(slot[:used], patch, checksum(content))[100] = 1  # somebody wrote into the tensors it handed out
    sender.finish(1)
    sender.begin([sender.stamp])
    receiver.begin(True)
    used, patch = sender.encode(bucket(sender, content), slot)
    assert used == 0
    with pytest.raises(TransportError, match=r"bucket 0 .* another checksum"):
        receiver.decode(slot[:used], patch, checksum(content))


def some_weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    return {f"layer {index}": torch.randn(2000).bfloat16() for index in range(20)}  # 4096 bytes each, aligned


@pytest.mark.parametrize("transport", ["shm", "broadcast"])
def test_an_update_after_a_small_step_moves_little_and_arrives_bit_equal(transport):
    weights = some_weights()
    sender = open_sender(transport, "cpu", 10_000, timeout_s=10, delta=True)
    receivers = receivers_of(sender, 2)
    moved = []
    for version in range(4):
        if version:
            weights["layer 3"][::700] += 1.0  # 3 of its 63 blocks
        if version == 3:
            weights["layer 4"] = weights["layer 4"] + 1
        got, sent = exchange(sender, receivers, weights, version, check=False)
        for received in got:
            assert_equal(received, weights)
        moved.append(sent.wire_bytes)
    assert moved[:3] == [20 * 4096, 3 * BLOCK, 3 * BLOCK]
    assert 4000 < moved[3] <= 2 * 4096  # layers 3 and 4 share no bucket with more than one other
    close(sender, receivers)


def test_everything_is_sent_anew_to_one_that_missed_an_update():
    weights = some_weights()
    sender = open_sender("shm", "cpu", 10_000, timeout_s=10, delta=True)
    first, second = receivers_of(sender, 2)

    def moved(members: list, version: int) -> int:
        got, sent = exchange(sender, members, weights, version, check=False)
        for received in got:
            assert_equal(received, weights)
        return sent.wire_bytes

    full = 20 * 4096
    assert moved([first, second], 1) == full
    assert moved([first, second], 2) == 0
    weights["layer 0"][0] = 9
    assert moved([first], 3) == BLOCK
    weights["layer 1"][0] = 9
    assert moved([first, second], 4) == full  # second remembers version 2
    assert moved([first, second], 5) == 0
    assert moved([open_receiver(sender.address, "cpu", 10, "fresh")], 6) == full
    close(sender, [first, second])


def test_everything_is_sent_anew_after_a_failed_update():
    weights = some_weights()
    sender = open_sender("shm", "cpu", 10_000, timeout_s=10, delta=True)
    (receiver,) = receivers_of(sender, 1)
    exchange(sender, [receiver], weights, 1, check=False)

    def refuse() -> None:
        next(receiver.receive(2))
        receiver.refuse("no")

    thread = threading.Thread(target=refuse)
    thread.start()
    with pytest.raises(TransportError):
        sender.send(iter(weights.items()), 2, False, 1)
    thread.join()
    got, sent = exchange(sender, [receiver], weights, 2, check=False)
    assert_equal(got[0], weights)
    assert sent.wire_bytes == 20 * 4096
    close(sender, [receiver])
