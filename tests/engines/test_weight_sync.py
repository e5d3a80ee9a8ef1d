import os
import socket
import threading
from collections.abc import Callable, Iterator

import pytest
import torch

from engines.transport import TransportError, open_receiver, open_sender
from engines.transport.receiver import Receiver
from engines.transport.sender import Sender

TRANSPORTS = ("shm", "broadcast")


def receivers_of(sender: Sender, count: int, timeout_s: float = 10) -> list[Receiver]:
    return [open_receiver(sender.address, "cpu", timeout_s, f"replica {index}") for index in range(count)]


def exchange(sender: Sender, receivers: list[Receiver], tensors: dict[str, torch.Tensor], version: int, check: bool):
    """One update over real sockets and media, a thread per receiver: (what each of them copied, what was sent)."""
    got: list[dict[str, torch.Tensor]] = [{} for _ in receivers]

    def receive(index: int) -> None:
        got[index] = {name: tensor.clone() for name, tensor in receivers[index].receive(version)}
        receivers[index].confirm(version)

    threads = [threading.Thread(target=receive, args=(index,)) for index in range(len(receivers))]
    for thread in threads:
        thread.start()
    sent = sender.send(iter(tensors.items()), version, check, len(receivers))
    for thread in threads:
        thread.join()
    return got, sent


def close(sender: Sender, receivers: list[Receiver]) -> None:
    for end in (*receivers, sender):
        end.close()


def some_tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "odd_bf16": torch.randn(3, 7, dtype=torch.bfloat16),
        "f32": torch.randn(11, 13),
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
        "large": torch.randn(100, 50),
        "strided": torch.randn(8, 6).T,
        "last": torch.arange(5),
    }


def assert_equal(received: dict[str, torch.Tensor], tensors: dict[str, torch.Tensor]) -> None:
    assert list(received) == list(tensors)
    for name, tensor in tensors.items():
        assert received[name].dtype == tensor.dtype and torch.equal(received[name], tensor), name


@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize("bucket_bytes", [256, 1000, 4096, 1 << 20])
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_every_tensor_arrives_bit_equal_for_any_bucket_size(transport, count, bucket_bytes, delta):
    tensors = some_tensors()
    sender = open_sender(transport, "cpu", bucket_bytes, timeout_s=10, delta=delta)
    receivers = receivers_of(sender, count)
    for version in (1, 2, 5):
        got, sent = exchange(sender, receivers, tensors, version, check=version < 5)
        for received in got:
            assert_equal(received, tensors)
        assert sent.tensors == len(tensors)
        assert sent.nbytes == sum(t.numel() * t.element_size() for t in tensors.values())
        assert (sent.buckets > 3) == (bucket_bytes <= 4096)
        tensors["f32"].add_(1)
    close(sender, receivers)


def test_a_full_bucket_is_sent_off_before_it_reaches_its_capacity():
    """Filling and reading overlap only if a model is more than one bucket."""
    sender = open_sender("shm", "cpu", 1 << 30, timeout_s=10)
    receivers = receivers_of(sender, 1)
    tensors = {f"w{index}": torch.full((5 << 20,), index, dtype=torch.uint8) for index in range(10)}
    got, sent = exchange(sender, receivers, tensors, 1, check=False)
    assert_equal(got[0], tensors)
    assert sent.buckets == 5  # 2 x 5 MiB pass 8 MiB
    close(sender, receivers)


def test_without_memfd_a_named_file_does_and_is_removed(monkeypatch, tmp_path):
    monkeypatch.delattr(os, "memfd_create")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    sender = open_sender("shm", "cpu", 4096, timeout_s=10)
    receivers = receivers_of(sender, 2)
    got, _ = exchange(sender, receivers, some_tensors(), 1, check=True)
    assert_equal(got[1], some_tensors())
    assert len(os.listdir(tmp_path)) == 1
    close(sender, receivers)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_receivers_may_come_go_and_be_replaced_between_updates(transport):
    tensors = some_tensors()
    sender = open_sender(transport, "cpu", 4096, timeout_s=10)
    first, second, third = receivers_of(sender, 3)
    for version, members in enumerate([[first], [first, second], [third], [first, third, second], [third]]):
        tensors["f32"].add_(1)
        for received in exchange(sender, members, tensors, version, check=True)[0]:
            assert_equal(received, tensors)
    close(sender, [first, second, third])


def run_in_thread(body: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=body)
    thread.start()
    return thread


def test_what_does_not_know_the_secret_is_left_at_the_door():
    sender = open_sender("shm", "cpu", 4096, timeout_s=10)
    (receiver,) = receivers_of(sender, 1)
    stranger = open_receiver(
        type(sender.address)("shm", sender.address.host, sender.address.port, b"wrong"), "cpu", 10, "stranger"
    )
    sent = []
    thread = run_in_thread(lambda: sent.append(sender.send(iter(some_tensors().items()), 1, False, 1)))
    with pytest.raises(TransportError, match="at the door"):
        list(stranger.receive(1))
    received = {name: tensor.clone() for name, tensor in receiver.receive(1)}  # the sender is still waiting for it
    receiver.confirm(1)
    thread.join()
    assert_equal(received, some_tensors())
    assert sent[0].tensors == len(received)
    assert sender.address.key.hex() not in repr(sender.address) and "key" not in repr(sender.address)
    close(sender, [receiver, stranger])


def test_a_process_that_hangs_at_the_door_does_not_hold_up_the_others(monkeypatch):
    monkeypatch.setattr("engines.transport.channel._KNOCK_S", 0.2)
    sender = open_sender("shm", "cpu", 4096, timeout_s=10)
    (receiver,) = receivers_of(sender, 1)
    with socket.create_connection((sender.address.host, sender.address.port)):  # connects, never answers
        got, _ = exchange(sender, [receiver], some_tensors(), 1, check=False)
    assert_equal(got[0], some_tensors())
    close(sender, [receiver])


def test_a_refusal_carries_its_text_to_the_sender_and_the_next_update_works():
    sender = open_sender("shm", "cpu", 1 << 20, timeout_s=10)
    (receiver,) = receivers_of(sender, 1)

    def refuse() -> None:
        list(receiver.receive(1))
        receiver.refuse("missing: model.norm.weight")

    thread = run_in_thread(refuse)
    with pytest.raises(TransportError, match=r"replica 0 refused the weights.*missing: model\.norm\.weight"):
        sender.send(iter(some_tensors().items()), 1, False, 1)
    thread.join()
    assert_equal(exchange(sender, [receiver], some_tensors(), 1, check=False)[0][0], some_tensors())
    close(sender, [receiver])


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_corrupted_bucket_fails_its_checksum(transport):
    sender = open_sender(transport, "cpu", 1 << 20, timeout_s=10)
    (receiver,) = receivers_of(sender, 1)
    fetch = receiver._medium.fetch

    def corrupt(slot: int, used: int) -> torch.Tensor:
        flat = fetch(slot, used)
        flat[0] ^= 1  # flip one bit of what travels
        return flat

    receiver._medium.fetch = corrupt
    errors: list[str] = []

    def receive() -> None:
        try:
            list(receiver.receive(1))
        except TransportError as error:
            errors.append(str(error))
            receiver.refuse(str(error))

    thread = run_in_thread(receive)
    with pytest.raises(TransportError, match=r"odd_bf16 to last.*another checksum"):
        sender.send(iter(some_tensors().items()), 1, True, 1)
    thread.join()
    assert "bucket 0" in errors[0]
    close(sender, [receiver])


def test_a_failing_stream_tells_the_receivers_why():
    sender = open_sender("shm", "cpu", 4096, timeout_s=10)
    (receiver,) = receivers_of(sender, 1)
    errors: list[str] = []

    def receive() -> None:
        try:
            list(receiver.receive(1))
        except TransportError as error:
            errors.append(str(error))

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        yield "w", torch.zeros(4096)
        raise RuntimeError("gather of w2 failed")

    thread = run_in_thread(receive)
    with pytest.raises(RuntimeError, match="gather of w2 failed"):
        sender.send(stream(), 1, False, 1)
    thread.join()
    assert "gather of w2 failed" in errors[0]
    close(sender, [receiver])


def test_the_stream_is_read_to_its_end_when_receivers_fail():
    """Other training ranks take part in the collectives behind it and must not be left waiting."""
    sender = open_sender("shm", "cpu", 4096, timeout_s=0.2)
    taken = []

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        for index in range(5):
            taken.append(index)
            yield f"w{index}", torch.zeros(2000)

    with pytest.raises(TransportError, match="got 0 of 1 rollout workers"):
        sender.send(stream(), 1, False, 1)
    assert taken == [0, 1, 2, 3, 4]
    sender.close()


def test_an_update_is_confirmed_only_when_it_was_read_to_the_end():
    sender = open_sender("shm", "cpu", 4096, timeout_s=10)
    (receiver,) = receivers_of(sender, 1)

    refused = []

    def stop_early() -> None:
        next(receiver.receive(1))
        try:
            receiver.confirm(1)
        except AssertionError as error:
            refused.append(str(error))
        receiver.close()

    thread = run_in_thread(stop_early)
    with pytest.raises(TransportError, match="replica 0 closed the weight channel"):
        sender.send(iter(some_tensors().items()), 1, False, 1)
    thread.join()
    assert refused == ["version 1 was confirmed before its stream was read to the end"]
    sender.close()
