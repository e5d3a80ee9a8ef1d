"""Move storages between device and host without changing a single tensor object."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


class HostCopy:
    """Empties the device storages behind some tensors and refills them.

    Megatron's parameters and gradients are views into shared buffers: resizing the storage frees the memory
    while every view stays valid for the refill. `keep=False` drops the content (gradients).
    """

    def __init__(self, keep: bool = True):
        self._keep = keep
        self._copies: list[tuple[torch.UntypedStorage, int, Tensor | None]] = []

    def offload(self, tensors: Iterable[Tensor]) -> None:
        """Free the distinct storages of the tensors that lie on a device. Host tensors are left alone."""
        assert not self._copies, "already offloaded"
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors if t.device.type != "cpu"}
        for storage in storages.values():
            copy = None
            if self._keep:
                copy = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=True)
                copy.copy_(_bytes(storage), non_blocking=True)
            self._copies.append((storage, storage.nbytes(), copy))
        if self._copies and self._keep:
            torch.get_device_module(self._copies[0][0].device).synchronize()
        for storage, _, _ in self._copies:
            storage.resize_(0)

    def onload(self) -> None:
        """Undo offload; dropped content comes back as zeros."""
        for storage, size, copy in self._copies:
            storage.resize_(size)
            if copy is None:
                _bytes(storage).zero_()
            else:
                _bytes(storage).copy_(copy)
        self._copies = []


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
