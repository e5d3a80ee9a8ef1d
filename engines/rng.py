"""Random generators of one process: seed them, take their state, put it back."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from engines.device import get_device


def seed_everything(seed: int) -> None:
    """Python, numpy, torch and its devices."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def state(device: str) -> dict[str, Any]:
    """Python, numpy, torch and device generators as plain numbers and tensors (loadable without pickle)."""
    version, internal, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state()
    module = get_device(device).module
    return {
        "python": (version, internal, gauss),
        "numpy": (kind, torch.from_numpy(keys.astype(np.int64)), int(position), int(has_gauss), float(cached)),
        "torch": torch.get_rng_state(),
        "device": None if module is None else module.get_rng_state(),
    }


def set_state(saved: dict[str, Any], device: str) -> None:
    """Inverse of `state`."""
    version, internal, gauss = saved["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, position, has_gauss, cached = saved["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(saved["torch"])
    module = get_device(device).module
    if module is not None:
        module.set_rng_state(saved["device"])
