"""Shares of followed prompts and instructions over many answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def accuracies(extras: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """`{prompt,instruction}_{strict,loose}` over answers whose `extra` holds a 0/1 per instruction.

    A prompt counts when all of its instructions hold; instructions are averaged over all prompts together.
    """
    shares: dict[str, float] = {}
    for mode in ("strict", "loose"):
        lists = [extra[mode] for extra in extras if mode in extra]
        if lists:
            shares[f"prompt_{mode}"] = sum(all(each) for each in lists) / len(lists)
            shares[f"instruction_{mode}"] = sum(map(sum, lists)) / sum(map(len, lists))
    return shares
