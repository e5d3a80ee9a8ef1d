"""Key patterns of the status tables: `a.{b,c}.d` stands for a.b.d and a.c.d; a listed section covers its sub-keys."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator


def expand(pattern: str) -> Iterator[str]:
    """`{x,y}` braces, one after the other (not nested)."""
    head, brace, rest = pattern.partition("{")
    if not brace:
        yield pattern
        return
    body, _, tail = rest.partition("}")
    for option in body.split(","):
        yield from expand(head + option.strip() + tail)


def expand_all(patterns: Iterable[str]) -> Iterator[str]:
    for pattern in patterns:
        yield from expand(pattern)


def covering(key: str, names: Container[str]) -> str | None:
    """The longest name that is `key` or one of its sections."""
    while key not in names:
        key, dot, _ = key.rpartition(".")
        if not dot:
            return None
    return key
