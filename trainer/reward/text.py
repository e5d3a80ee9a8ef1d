"""The part of a response that is judged: what follows the last closed thinking block."""

from __future__ import annotations

OPEN, CLOSE = "<think>", "</think>"


def answer_part(text: str, think_open: bool = False) -> str | None:
    """Text after the last `</think>`; None when a thinking block is still open at the end.

    `think_open` says that the prompt itself ended inside a thinking block.
    """
    opened, closed = text.rfind(OPEN), text.rfind(CLOSE)
    if opened > closed or (think_open and closed < 0):
        return None
    return text if closed < 0 else text[closed + len(CLOSE) :]
