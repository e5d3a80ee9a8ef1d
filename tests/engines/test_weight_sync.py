import os
import threading
from collections.abc import Iterator

import pytest
import torch

from engines.transport.shm import ShmReceiver, ShmSender, TransportError


def _exchange(tensors: dict[str, torch.Tensor], bucket_bytes: int, *, receivers: int = 1, checksum: bool = True):
    """Send over real sockets and shared memory, one thread per end; returns what each receiver copied."""
    sender = ShmSender(receivers, bucket_bytes, timeout_s=10)
    got: list[dict[str, torch.Tensor]] = [{} for _ in range(receivers)]

    def receive(index: int) -> None:
        receiver = ShmReceiver(sender.address, timeout_s=10)
        for version in (1, 2):
            got[index] = {name: tensor.clone() for name, tensor in receiver.receive(version)}
            receiver.confirm(version)
        receiver.close()

    threads = [threading.Thread(target=receive, args=(index,)) for index in range(receivers)]
    for thread in threads:
        thread.start()
    sent = [sender.send(iter(tensors.items()), version, checksum) for version in (1, 2)]
    for thread in threads:
        thread.join()
    sender.close()
    return got, sent[-1]


def _tensors() -> dict[str, torch.Tensor]:
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


@pytest.mark.parametrize("bucket_bytes", [256, 1000, 4096, 1 << 20])
@pytest.mark.parametrize("receivers", [1, 2])
def test_every_tensor_arrives_bit_equal_for_any_bucket_size(bucket_bytes, receivers):
    tensors = _tensors()
    got, sent = _exchange(tensors, bucket_bytes, receivers=receivers)
    for received in got:
        assert list(received) == list(tensors)
        for name, tensor in tensors.items():
            assert received[name].dtype == tensor.dtype and torch.equal(received[name], tensor), name
    assert sent.tensors == len(tensors)
    assert sent.nbytes == sum(t.numel() * t.element_size() for t in tensors.values())
    assert (sent.buckets > 3) == (bucket_bytes <= 4096)


def test_nothing_is_left_in_shared_memory():
    before = set(os.listdir("/dev/shm"))
    _exchange(_tensors(), 4096)
    assert set(os.listdir("/dev/shm")) == before


def _start_receiver(sender: ShmSender, body) -> threading.Thread:
    thread = threading.Thread(target=lambda: body(ShmReceiver(sender.address, timeout_s=10)))
    thread.start()
    return thread


def test_a_receiver_that_dies_is_reported_at_once():
    sender = ShmSender(1, 4096, timeout_s=30)

    def die_after_first_tensor(receiver: ShmReceiver) -> None:
        next(receiver.receive(1))
        receiver.close()

    thread = _start_receiver(sender, die_after_first_tensor)
    with pytest.raises(TransportError, match="closed the weight channel"):
        sender.send(iter(_tensors().items()), 1, checksum=False)
    thread.join()
    sender.close()


def test_a_refusal_carries_its_text_to_the_sender():
    sender = ShmSender(1, 1 << 20, timeout_s=10)

    def refuse(receiver: ShmReceiver) -> None:
        for _ in receiver.receive(1):
            pass
        receiver.refuse("missing: model.norm.weight")

    thread = _start_receiver(sender, refuse)
    with pytest.raises(TransportError, match=r"missing: model\.norm\.weight"):
        sender.send(iter(_tensors().items()), 1, checksum=False)
    thread.join()
    sender.close()


def test_a_corrupted_bucket_fails_its_checksum():
    sender = ShmSender(1, 1 << 20, timeout_s=10)
    errors: list[str] = []

    def receive(receiver: ShmReceiver) -> None:
        receiver._map()
        original = receiver._next

        def corrupt() -> tuple:
            message = original()
            if message[0] == "bucket":
                receiver._memory[0] ^= 1  # flip one bit of what travels
            return message

        receiver._next = corrupt
        try:
            list(receiver.receive(1))
        except TransportError as error:
            errors.append(str(error))
            receiver.refuse(str(error))

    thread = _start_receiver(sender, receive)
    with pytest.raises(TransportError, match="checksum"):
        sender.send(iter(_tensors().items()), 1, checksum=True)
    thread.join()
    assert "checksum differs in slot 0" in errors[0]
    sender.close()


def test_the_wrong_version_is_an_error_and_silence_times_out():
    sender = ShmSender(1, 4096, timeout_s=0.3)

    def wait_for_another_version(receiver: ShmReceiver) -> None:
        with pytest.raises(TransportError, match="expected version 7"):
            list(receiver.receive(7))
        done.wait(10)

    done = threading.Event()
    thread = _start_receiver(sender, wait_for_another_version)
    with pytest.raises(TransportError, match=r"for 0\.3 s"):
        sender.send(iter(_tensors().items()), 1, checksum=False)
    done.set()
    thread.join()
    sender.close()


def test_a_missing_receiver_times_out_with_a_clear_error():
    sender = ShmSender(1, 4096, timeout_s=0.2)
    with pytest.raises(TransportError, match="no connection from a rollout worker"):
        sender.send(_one(), 1, checksum=False)
    sender.close()


def _one() -> Iterator[tuple[str, torch.Tensor]]:
    yield "w", torch.zeros(1)
