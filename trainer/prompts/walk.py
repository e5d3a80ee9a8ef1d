"""One endless pass over some rows: a new order in each epoch, and a state of three numbers.

The order is a pure function of (seed, epoch, name), so it is never stored and resuming replays nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np


class Walk:
    """Row numbers, epoch after epoch. `name` is the domain where domains are mixed: each has its own orders."""

    def __init__(self, rows: Sequence[int], seed: int, shuffle: bool, name: str = "") -> None:
        self.rows, self.seed, self.shuffle, self.name = rows, seed, shuffle, name
        self.epoch = 0  # epoch of the row handed out last, from 0
        self.position = 0  # rows handed out of that epoch
        self.consumed = 0  # rows handed out, over all epochs
        self._order: tuple[int, list[int]] = (-1, [])

    def next(self) -> tuple[int, int]:
        """(row number, epoch it belongs to)."""
        if self.position == len(self.rows):
            self.epoch, self.position = self.epoch + 1, 0
        if self._order[0] != self.epoch:
            order = epoch_order(len(self.rows), self.seed, self.epoch, self.shuffle, self.name)
            self._order = (self.epoch, order)
        row = self.rows[self._order[1][self.position]]
        self.position += 1
        self.consumed += 1
        return row, self.epoch

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "position": self.position, "consumed": self.consumed}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.position, self.consumed = state["epoch"], state["position"], state["consumed"]


def epoch_order(count: int, seed: int, epoch: int, shuffle: bool, name: str = "") -> list[int]:
    """The order of `count` rows in an epoch. RandomState's stream is frozen across numpy versions (NEP 19)."""
    if not shuffle:
        return list(range(count))
    key = f"{seed}:{epoch}:{name}" if name else f"{seed}:{epoch}"
    words = np.frombuffer(hashlib.sha256(key.encode()).digest(), dtype="<u4")
    return np.random.RandomState(words).permutation(count).tolist()
