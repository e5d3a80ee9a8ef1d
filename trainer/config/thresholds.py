"""Bounds of rollout correction as they are written: `2.0`, `"0.5_2.0"`, and one or several joined by commas."""

from __future__ import annotations

from typing import NamedTuple

WEIGHT_KINDS = ("token", "sequence", "geometric", "segment")
REJECTIONS = (
    *(f"{level}_{measure}" for level in ("token", "seq_sum", "seq_mean") for measure in ("k1", "k2", "k3")),
    *("seq_max_k2", "seq_max_k3"),
)


class Bounds(NamedTuple):
    low: float | None
    high: float


class BadBounds(ValueError):
    """The text of the error is what was expected instead."""


def weight_bounds(value: float | str | None) -> Bounds:
    """Of importance weights: `2.0` truncates at 2, `"0.5_2.0"` drops weights outside. BadBounds for anything else."""
    bounds = _parse(value)
    if not bounds.high > 0:
        raise BadBounds('a number above 0, or "low_high"')
    return bounds


def rejection_bounds(rules: str, thresholds: float | str | None) -> list[tuple[str, Bounds]]:
    """(name, bounds) per rule of a comma-joined list; one threshold serves all rules, or each has its own.

    k1 bounds a ratio: `"low_high"`, and a single number u means [1/u, u]. k2 and k3 take an upper bound.
    """
    names = [name.strip() for name in rules.split(",")]
    unknown = [name for name in names if name not in REJECTIONS]
    if unknown or len(set(names)) < len(names):
        raise BadBounds(f"a comma-joined list of {', '.join(REJECTIONS)}, each at most once")
    texts: list[float | str | None] = [thresholds]
    if isinstance(thresholds, str):
        texts = [text.strip() for text in thresholds.split(",")]
    if len(texts) not in (1, len(names)):
        raise BadBounds(f"one threshold, or one for each of {', '.join(names)}")
    texts = texts * (len(names) // len(texts))
    return [(name, _bounds_of(name, text)) for name, text in zip(names, texts, strict=True)]


def _bounds_of(name: str, text: float | str | None) -> Bounds:
    bounds = _parse(text)
    if name.endswith("k1"):
        if bounds.low is None and not bounds.high > 1:
            raise BadBounds(f'bounds of a ratio for {name}: "low_high", or one number u above 1 for [1/u, u]')
        return bounds if bounds.low is not None else Bounds(1 / bounds.high, bounds.high)
    if bounds.low is not None or not bounds.high > 0:
        raise BadBounds(f"an upper bound above 0 for {name}")
    return bounds


def _parse(value: float | str | None) -> Bounds:
    if isinstance(value, bool) or value is None:
        raise BadBounds('a number, or "low_high"')
    if not isinstance(value, str):
        return Bounds(None, float(value))
    try:
        # An underscore separates bounds here; float() would take it for a separator of digits.
        numbers = [float(part) for part in value.split("_")]
    except ValueError as error:
        raise BadBounds('a number, or "low_high"') from error
    if len(numbers) == 1:
        return Bounds(None, numbers[0])
    if len(numbers) > 2 or not 0 <= numbers[0] < numbers[1]:
        raise BadBounds('"low_high" with 0 <= low < high')
    return Bounds(*numbers)
