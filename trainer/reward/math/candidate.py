"""Find the one piece of an answer that counts: a box, a marked line, or a short whole answer."""

from __future__ import annotations

import re
from collections.abc import Iterator

MAX_WHOLE = 64  # characters of an answer that may count as a whole

_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])")
_MARK = re.compile(r"####|\banswer\b[*_ \t]*(?:is\b|:)", re.IGNORECASE)
# A minus is a sign when it touches the number and nothing it could be subtracted from.
_NUMBER = re.compile(r"(?:(?<![\w)\]}])-)?(?:\d{1,3}(?:,\d{3})+(?![\d,])(?:\.\d+)?|\d+\.\d+|\d+|\.\d+)")


def by_rules(answer: str, require_box: bool) -> str | None:
    """The last box; without any box the last marked line, then a short one-line answer; else None.

    The last box decides even when it is empty or never closed: then there is no candidate.
    """
    for _, content in boxes(answer):
        return content or None
    if require_box:
        return None
    for _, line in marked_lines(answer):
        return undecorate(line) or None
    whole = answer.strip()
    return whole if whole and "\n" not in whole and len(whole) <= MAX_WHOLE else None


def last_number(answer: str) -> str | None:
    """The last integer or decimal anywhere in the answer: "3 + 4 = 7" -> "7"."""
    numbers = _NUMBER.findall(answer.replace("\u2212", "-"))
    return numbers[-1].replace(",", "") if numbers else None


def boxes(answer: str) -> Iterator[tuple[int, str | None]]:
    """(place, content) of every box, the last one first; content None when it is never closed."""
    for match in reversed(list(_BOX.finditer(answer))):
        yield match.start(), _box_content(answer, match.end())


def marked_lines(answer: str) -> Iterator[tuple[int, str]]:
    """(place, rest of the line) of every `#### x`, `answer is x` and `answer: x`, the last one first."""
    for match in reversed(list(_MARK.finditer(answer))):
        yield match.start(), answer[match.end() :].split("\n", 1)[0]


def _box_content(text: str, start: int) -> str | None:
    """Content of the box whose command ended at `start`; one token when no brace follows; None if unclosed."""
    while start < len(text) and text[start].isspace():
        start += 1
    if start == len(text):
        return None
    if text[start] != "{":
        return re.match(r"\\[A-Za-z]+|\\.|.", text[start:], re.DOTALL).group()
    depth, place = 0, start
    while place < len(text):
        if text[place] == "\\":
            place += 2  # an escaped brace is not a brace
            continue
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return text[start + 1 : place].strip()
        place += 1
    return None


def undecorate(line: str) -> str:
    """Without markdown emphasis, a leading colon and a final full stop."""
    line = line.replace("**", "").replace("__", "").strip(" \t\r:*_`")
    return line.removesuffix(".").strip(" \t*_`")
