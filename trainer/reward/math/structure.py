"""Lists, tuples, intervals, sets and assignments: their shape, read from the text alone."""

from __future__ import annotations

import re
from dataclasses import dataclass

_OR = re.compile(r"\\(?:text|mathrm|mbox)\s*\{\s*(?:,\s*)?(?:or|and)\s*\}|\b(?:or|and)\b", re.IGNORECASE)
_LETTER = re.compile(r"(?:[A-Za-z]|\\(?!frac|sqrt|text|cdot|times)[A-Za-z]+)(?:_(?:\w|\{\w+\}))?'?")
_FUNCTION = re.compile(r"[A-Za-z](?:_(?:\w|\{\w+\}))?'?\s*\(\s*[A-Za-z](?:\s*,\s*[A-Za-z])*\s*\)")
_BRACKET = re.compile(r"\\[{}]|[()\[\]{}]")
_EQUALS = re.compile(r"(?<![<>!:\\])=(?!=)")


@dataclass(frozen=True)
class Items:
    """Several values. `brackets` is "()", "[)" and so on when the order counts, else ""."""

    values: tuple[str, ...]
    brackets: str = ""


def items_of(text: str) -> Items | None:
    r"""`(1,2)` ordered; `1,2`, `\{1,2\}`, `1 or 2`, `1\pm2` unordered; None for a single value."""
    text = text.strip()
    braces = text.startswith(r"\{") and text.endswith(r"\}") and _closes_at_end(text)
    if braces:
        return Items(tuple(_expand(split_top(text[2:-2]))))
    if text[:1] in ("(", "[") and text[-1:] in (")", "]") and _closes_at_end(text):
        inside = split_top(text[1:-1])
        return Items(tuple(inside), text[0] + text[-1]) if len(inside) > 1 else None
    values = _expand(split_top(_OR.sub(",", text)))
    return Items(tuple(values)) if len(values) > 1 else None


def unparenthesise(text: str) -> str:
    """`((5))` -> `5`, as long as the brackets belong together and hold one value. Linear in the text's length."""
    partner: dict[int, int] = {}
    opened: list[int] = []
    for match in _BRACKET.finditer(text):
        if match.group()[-1] in "([{":
            opened.append(match.start())
        elif opened:
            partner[opened.pop()] = match.end() - 1
    start, end = 0, len(text)
    while text[start : start + 1] == "(" and partner.get(start) == end - 1:
        start, end = start + 1, end - 1
    inside = text[start:end].strip()
    return inside if len(split_top(inside)) == 1 else text


def split_top(text: str, separator: str = ",") -> list[str]:
    """Cut at separators outside all brackets and environments; empty parts are dropped."""
    parts, depth, start = [], 0, 0
    for match in re.finditer(r"\\begin|\\end|\\[{}]|[()\[\]{}]|" + re.escape(separator), text):
        token = match.group()
        if token == separator:
            if depth == 0:
                parts.append(text[start : match.start()])
                start = match.end()
        else:
            depth += 1 if token in (r"\begin", r"\{", "(", "[", "{") else -1
    parts.append(text[start:])
    return [part.strip() for part in parts if part.strip()]


def _closes_at_end(text: str) -> bool:
    """True when the bracket that opens the text is closed by its last character."""
    depth = 0
    for match in _BRACKET.finditer(text):
        depth += 1 if match.group()[-1] in "([{" else -1
        if depth == 0:
            return match.end() == len(text)
    return False


def _expand(values: list[str]) -> list[str]:
    r"""`1\pm2` -> `1+2`, `1-2`."""
    expanded = []
    for value in values:
        if re.search(r"\\(?:pm|mp)(?![A-Za-z])", value):
            for pm, mp in (("+", "-"), ("-", "+")):
                one = re.sub(r"\\pm(?![A-Za-z])\s*", pm, value)
                expanded.append(re.sub(r"\\mp(?![A-Za-z])\s*", mp, one).removeprefix("+"))
        else:
            expanded.append(value)
    return expanded


def is_equation(text: str) -> bool:
    return _EQUALS.search(text) is not None


def assignment(text: str) -> tuple[str, str] | None:
    """(name, value) of `x=5`, `5=x`, `f(x)=x+1` and of a chain `x=2+3=5` (its last part); else None."""
    parts = [part.strip() for part in _EQUALS.split(text)]
    if len(parts) < 2 or not all(parts):
        return None
    if _is_name(parts[0]):
        return parts[0], parts[-1]
    if len(parts) == 2 and _is_name(parts[1]):
        return parts[1], parts[0]
    return None


def chain_value(text: str) -> str | None:
    """Last part of a chain of numbers without any letter: `2+3=5` -> `5`; else None."""
    bare = re.sub(r"\\(?:frac|sqrt|cdot|times|div)", "", text)
    return _EQUALS.split(text)[-1].strip() if is_equation(text) and not re.search(r"[A-Za-z\\]", bare) else None


def member_of(text: str) -> str | None:
    r"""`x \in S` -> `S`."""
    match = re.fullmatch(r"(.+?)\\in(?![A-Za-z])(.+)", text, re.DOTALL)
    return match.group(2).strip() if match and _is_name(match.group(1).strip()) else None


def _is_name(text: str) -> bool:
    return bool(_LETTER.fullmatch(text) or _FUNCTION.fullmatch(text))
