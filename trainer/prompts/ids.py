"""Ids used twice, found in 8 bytes per row: a dict of all ids would weigh as much as a file of short rows."""

from __future__ import annotations

import hashlib
from array import array

import numpy as np

Place = tuple[str, int]  # file, line


class SeenIds:
    """Where each (tag, id) was seen first, for the ids that repeat.

    A pass over the files notes a hash per row. Only after it is known which hashes repeat; where `finish_pass` says
    so the pass is made again, and then `first_place` knows the first place of those ids. Two ids with one hash are
    only watched, never taken for equal.
    """

    def __init__(self) -> None:
        self._hashes = array("Q")
        self._watched: set[int] = set()
        self._first: dict[tuple[str, str], Place] = {}

    def first_place(self, tag: str, row_id: str, place: Place) -> Place:
        """Where this id stood first; `place` itself if there, or as long as the id is not known to repeat."""
        digest = hashlib.blake2b(f"{tag}\0{row_id}".encode(), digest_size=8).digest()
        number = int.from_bytes(digest, "little")
        self._hashes.append(number)
        return self._first.setdefault((tag, row_id), place) if number in self._watched else place

    def finish_pass(self) -> bool:
        """Ready for another pass; True when ids repeated that this one did not watch."""
        numbers, counts = np.unique(np.array(self._hashes, dtype=np.uint64), return_counts=True)
        repeated = set(numbers[counts > 1].tolist())
        is_new = not repeated <= self._watched
        self._watched |= repeated
        self._hashes, self._first = array("Q"), {}
        return is_new
