"""Device memory handles: trainer and rollout are two processes on one CUDA or NPU device and share the slots there.

A handle opens only on the device it was made on, and a process sees only its own devices: this serves replicas that
share the device of the source rank. `obstacle` says what stands against it; shared memory is used then.

Untested on a device: the calls are checked against fakes.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.multiprocessing import reductions

from engines.device import Device, get_device
from engines.transport.base import ReceiveMedium, SendMedium, device_slots

FLUSH_BYTES = 256 << 20
# The oldest software of an Ascend host that shares device memory between processes.
DRIVER_SINCE, CANN_SINCE = "25.3.rc1", "8.3.rc1"
_DRIVER_FILE = Path("/usr/local/Ascend/driver/version.info")
_DEVICE_ARGUMENT = 6  # of rebuild_cuda_tensor and rebuild_npu_tensor: the device index to open the handle on


class IpcSend(SendMedium):
    """Slots are allocated once: a handle stays valid as long as the buffer it stands for."""

    def __init__(self, slot_bytes: int, device: str) -> None:
        self.flush_bytes = FLUSH_BYTES
        self._device = get_device(device)
        self.slots = device_slots(device, slot_bytes)

    def offers(self, held: list[Any]) -> list[Any]:
        # A handle each: opening one releases its count on the sender's memory.
        return [[reductions.reduce_tensor(slot) for slot in self.slots] for _ in held]

    def start(self) -> None:
        """The slots are there from the beginning."""

    def publish(self, slot: int, used: int) -> None:
        """The copies into the slot may still be queued; another process does not wait for our stream."""
        self._device.synchronize()

    def settle(self, slot: int) -> None:
        """An acknowledged slot has been read."""

    def drop(self) -> None:
        """The slots depend on nobody."""

    def close(self) -> None:
        self.slots = []


class IpcReceive(ReceiveMedium):
    def __init__(self, device: str) -> None:
        self._device: Device = get_device(device)
        self._slots: list[Tensor] = []

    def open(self, offer: list[tuple[Callable[..., Tensor], tuple]]) -> None:
        here = self._device.module.current_device()
        self._slots = [
            rebuild(*arguments[:_DEVICE_ARGUMENT], here, *arguments[_DEVICE_ARGUMENT + 1 :])
            for rebuild, arguments in offer
        ]

    def fetch(self, slot: int, used: int) -> Tensor:
        return self._slots[slot][:used]

    def release(self, slot: int) -> None:
        self._device.synchronize()  # copies out of the slot may still be queued

    def drop(self) -> None:
        self._slots = []

    def close(self) -> None:
        self._slots = []


def obstacle(device: str, one_device: bool) -> str | None:
    """Why handles cannot be used here; None when they can. `one_device`: source rank and replicas share it."""
    if device == "cpu":
        return "a CPU has no device memory"
    if not one_device:
        return "a handle opens only on its own device, and replicas have others"
    if device == "npu":
        return npu_obstacle(_version_in(_DRIVER_FILE), _version_in(_cann_file()))
    return None


def npu_obstacle(driver: str | None, cann: str | None) -> str | None:
    """As `obstacle`, of an Ascend host with these versions; None is one that was not found."""
    for what, found, since in (("the driver", driver, DRIVER_SINCE), ("CANN", cann, CANN_SINCE)):
        if found is None:
            return f"no version of {what} was found"
        if ascend_version(found) < ascend_version(since):
            return f"{what} {found} is older than {since}"
    return None


def ascend_version(text: str) -> tuple[int, int, float]:
    """Sortable (major, minor, release candidate): `25.3.rc1.2` is 25.3.rc1; `25.5.0` and the build `25.5.t3.b001`
    are 25.5, which is newer than any of its candidates. Anything else is a ValueError."""
    found = re.fullmatch(r"(\d+)\.(\d+)(?:\.(?:rc(\d+)(?:\.\d+)*|t\d+\.b\d+|\d+(?:\.\d+)*))?", text.strip().lower())
    if found is None:
        raise ValueError(
            f"got the Ascend version {text!r}; expected a form like 25.3.rc1, 25.5.0 or 25.5.t3.b001; "
            "set actor_rollout_ref.rollout.checkpoint_engine.backend=nccl with a pool of its own, and report the form"
        )
    return int(found[1]), int(found[2]), float(found[3]) if found[3] else float("inf")


def _cann_file() -> Path:
    home = Path(os.environ.get("ASCEND_HOME_PATH", "/usr/local/Ascend/ascend-toolkit/latest"))
    return home / f"{platform.machine()}-linux" / "ascend_toolkit_install.info"


def _version_in(file: Path) -> str | None:
    """The value of the line `version=` of an Ascend information file."""
    if not file.is_file():
        return None
    found = re.search(r"^version\s*=\s*\[?([^\s\]]+)", file.read_text(), re.IGNORECASE | re.MULTILINE)
    return found[1] if found else None
