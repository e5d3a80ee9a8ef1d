"""The calls that transports make on devices, against fakes: NCCL, HCCL and memory handles are untested on devices."""

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from engines.device import Device
from engines.transport import broadcast, choose, ipc, open_receiver, open_sender
from engines.transport.base import TransportError
from engines.transport.broadcast import BroadcastReceive, BroadcastSend


def host_slots(device: str, slot_bytes: int) -> list[torch.Tensor]:
    return [torch.zeros(slot_bytes, dtype=torch.uint8) for _ in range(2)]


class Library:
    """Stands for NCCL or HCCL: writes down what is asked of it."""

    def __init__(self) -> None:
        self.calls: list[tuple] = []
        self.fails = False

    def group(self, store: dist.Store, rank: int, size: int, patience: Any) -> Any:
        assert isinstance(store, dist.PrefixStore)
        patience = patience._timeout if isinstance(patience, Options) else patience
        self.calls.append(("group", rank, size, patience))
        return self

    def broadcast(self, tensor: torch.Tensor, root: int) -> Any:
        self.calls.append(("broadcast", tensor.dtype, len(tensor), root))
        return self

    def wait(self, timeout: timedelta) -> None:
        self.calls.append(("wait", timeout))
        if self.fails:
            raise RuntimeError("HcclBroadcast timed out\nstack")

    def abort(self) -> None:
        self.calls.append(("abort",))


class Options:
    _timeout = timedelta(minutes=10)


@pytest.fixture(params=["cuda", "npu"])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[Library, str]:
    library = Library()
    monkeypatch.setattr(broadcast, "device_slots", host_slots)
    if request.param == "npu":
        monkeypatch.setattr(dist, "ProcessGroupHCCL", library.group, raising=False)
    else:
        library.group.__func__.Options = Options
        monkeypatch.setattr(dist, "ProcessGroupNCCL", library.group, raising=False)
    return library, request.param


def test_a_device_group_is_made_once_broadcasts_bytes_as_int8_and_waits_before_a_slot_is_reused(library):
    library, device = library
    sender = BroadcastSend(1024, device, timeout_s=30)
    first, second = sender.offers([None, "group of another sender"])
    assert (first.rank, second.rank, first.size, first.slot_bytes) == (1, 2, 3, 1024) and first.port > 0
    assert library.calls == []  # the receivers are told first: the group forms only when all call
    sender.start()
    sender.publish(0, 512)
    sender.publish(1, 256)
    sender.settle(0)
    patience = timedelta(seconds=120)  # the library's own watchdog must not be faster than our time-out
    assert library.calls == [
        ("group", 0, 3, patience),
        ("broadcast", torch.int8, 512, 0),
        ("broadcast", torch.int8, 256, 0),
        ("wait", timedelta(seconds=30)),
    ]
    library.calls.clear()
    assert [offer.rank for offer in sender.offers([first.name, first.name])] == [None, None]
    sender.start()
    assert library.calls == []  # the same receivers: the same group
    (other,) = sender.offers([first.name])
    sender.start()
    assert other.name != first.name and library.calls == [("abort",), ("group", 0, 2, patience)]
    sender.close()


def test_a_receiver_joins_with_its_rank_and_reports_a_failed_collective(library):
    library, device = library
    sender = BroadcastSend(1024, device, timeout_s=30)
    offer = sender.offers([None])[0]
    receiver = BroadcastReceive(device, timeout_s=30)
    receiver.open(offer)
    assert receiver.holds == offer.name
    assert len(receiver.fetch(1, 512)) == 512
    assert [call[0] for call in library.calls] == ["group", "broadcast", "wait"]
    assert library.calls[0][1:3] == (1, 2)
    library.fails = True
    with pytest.raises(TransportError, match=r"got 'HcclBroadcast timed out' within 30\.0 s"):
        receiver.fetch(0, 512)
    receiver.drop()
    assert library.calls[-1] == ("abort",) and receiver.holds is None
    sender.close()


class Driver:
    """One device and the handles made of its memory. A handle has the fields of torch's rebuild functions."""

    def __init__(self) -> None:
        self.memory: dict[bytes, torch.Tensor] = {}
        self.opened: list[int] = []
        self.synchronized = 0

    def reduce(self, slot: torch.Tensor) -> tuple[Callable[..., torch.Tensor], tuple]:
        handle = f"handle {len(self.memory)}".encode()
        self.memory[handle] = slot
        counters = (b"counter", 0, b"event", True)
        return self.rebuild, (
            *(torch.Tensor, slot.shape, slot.stride(), 0, torch.UntypedStorage, slot.dtype),
            *(7, handle, len(slot), 0, False, *counters),  # 7: the device's index in the sender's process
        )

    def rebuild(self, *arguments: Any) -> torch.Tensor:
        self.opened.append(arguments[6])
        return self.memory[arguments[7]]

    def current_device(self) -> int:
        return 2

    def synchronize(self) -> None:
        self.synchronized += 1


def test_handles_are_opened_on_the_receivers_own_device_and_both_ends_wait_for_queued_copies(monkeypatch):
    driver = Driver()
    device = Device("cuda", "nccl", None, "GPU")
    monkeypatch.setattr(Device, "module", property(lambda self: driver))
    monkeypatch.setattr(ipc, "get_device", lambda kind: device)
    monkeypatch.setattr(ipc, "device_slots", host_slots)
    monkeypatch.setattr("engines.transport.ipc.reductions.reduce_tensor", driver.reduce)
    monkeypatch.setattr("engines.transport.channel.pickle.dumps", keep)
    monkeypatch.setattr("engines.transport.channel.pickle.loads", KEPT.__getitem__)
    sender = open_sender("ipc", "cuda", 4096, timeout_s=10)
    receiver = open_receiver(sender.address, "cuda", 10, "replica 0")
    tensors = {"a": torch.randn(500), "b": torch.randn(700), "c": torch.randn(900)}
    got: dict[str, torch.Tensor] = {}

    def receive() -> None:
        got.update({name: tensor.clone() for name, tensor in receiver.receive(1)})
        receiver.confirm(1)

    thread = threading.Thread(target=receive)
    thread.start()
    sent = sender.send(iter(tensors.items()), 1, True, 1)
    thread.join()
    assert sent.buckets == 3 and all(torch.equal(got[name], value) for name, value in tensors.items())
    assert driver.opened == [2, 2]  # each handle once, on the index that the device has here
    assert driver.synchronized == 2 * sent.buckets
    receiver.close()
    sender.close()


KEPT: dict[bytes, Any] = {}


def keep(message: Any) -> bytes:
    """Fake handles do not pickle; both ends live in this process."""
    KEPT[name := f"message {len(KEPT)}".encode()] = message
    return name


def test_the_backend_and_the_device_choose_the_transport(monkeypatch, caplog):
    assert choose("naive", "cpu", one_device=True) == "shm"
    assert choose("nccl", "cpu", one_device=False) == "broadcast"
    assert choose("nccl", "npu", one_device=True) == "broadcast"
    assert choose("naive", "cuda", one_device=True) == "ipc"
    assert not caplog.records
    assert choose("naive", "cuda", one_device=False) == "shm"
    assert "opens only on its own device" in caplog.records[-1].message
    assert choose("naive", "npu", one_device=True) == "shm"  # there is no driver file here
    assert "no version of the driver was found" in caplog.records[-1].message


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("25.3.rc1", (25, 3, 1.0)),
        ("25.3.rc1.2", (25, 3, 1.0)),
        ("8.3.RC1", (8, 3, 1.0)),
        ("25.5.t3.b001", (25, 5, float("inf"))),
        ("25.5.0", (25, 5, float("inf"))),
        ("25.5", (25, 5, float("inf"))),
    ],
)
def test_versions_of_ascend_software_are_read(text, version):
    assert ipc.ascend_version(text) == version


@pytest.mark.parametrize("text", ["", "25", "25.3.beta", "v25.3.0", "25.3.rc"])
def test_an_unknown_form_of_version_is_an_error(text):
    with pytest.raises(ValueError, match="expected a form like"):
        ipc.ascend_version(text)


def test_memory_handles_need_recent_ascend_software(tmp_path, monkeypatch):
    assert ipc.npu_obstacle("25.3.rc1", "8.3.RC1") is None
    assert ipc.npu_obstacle("25.5.0", "9.1.0") is None
    assert ipc.npu_obstacle("25.2.3", "9.1.0") == "the driver 25.2.3 is older than 25.3.rc1"
    assert ipc.npu_obstacle("25.3.0", "8.2.rc2") == "CANN 8.2.rc2 is older than 8.3.rc1"
    assert ipc.npu_obstacle("25.3.0", None) == "no version of CANN was found"
    file = tmp_path / "version.info"
    file.write_text("Package=driver\nVersion=25.3.rc1\nversion_dir=x\n")
    monkeypatch.setattr(ipc, "_DRIVER_FILE", file)
    assert ipc.obstacle("npu", one_device=True) == "no version of CANN was found"
