"""The program inside an answer."""

from __future__ import annotations

import re
import warnings

TAGS = ("python", "py", "python3")
_OPENING = re.compile(r"^( {0,3})(`{3,}|~{3,})[ \t]*([^`\n]*)$")


def extract_program(text: str) -> str | None:
    """The last fenced block tagged as Python, else the last untagged one, else the whole text if it compiles."""
    blocks = _blocks(text)
    for wanted in (TAGS, ("",)):
        found = [code for tag, code in blocks if tag in wanted]
        if found:
            return found[-1] if found[-1].strip() else None
    return text if not blocks and text.strip() and _compiles(text) else None


def _blocks(text: str) -> list[tuple[str, str]]:
    """(tag in lower case, content) per fenced block; one that is never closed reaches to the end."""
    blocks: list[tuple[str, str]] = []
    fence, indent, tag, lines = "", 0, "", []
    for line in text.replace("\r\n", "\n").split("\n"):
        if fence:
            bare = line.strip()
            if bare and set(bare) == {fence[0]} and len(bare) >= len(fence):
                blocks.append((tag, "\n".join(lines)))
                fence = ""
            else:
                lines.append(line[min(indent, len(line) - len(line.lstrip(" "))) :])
        elif opening := _OPENING.match(line):
            indent, fence = len(opening[1]), opening[2]
            words = opening[3].split()
            tag, lines = words[0].lower() if words else "", []
    return [*blocks, (tag, "\n".join(lines))] if fence else blocks


def _compiles(text: str) -> bool:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compile(text, "answer", "exec")
    except (SyntaxError, ValueError, MemoryError, RecursionError, OverflowError):
        return False
    return True
