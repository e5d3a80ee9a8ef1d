"""All problems of all files, collected and raised together.

Each line reads `[Dnn] FILE:LINE field 'FIELD': got GOT; expected EXPECTED. FIX`; parts that do not
apply are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

MAX_GOT = 80  # characters of GOT that are shown


class DataError(ValueError):
    """One or more problems in the data; `problems` holds the reported lines, `total` counts all."""

    def __init__(self, problems: list[str], total: int) -> None:
        more = [f"... and {total - len(problems)} more (data.max_reported_errors)"] if total > len(problems) else []
        super().__init__("\n".join(problems + more))
        self.problems, self.total = problems, total

    @classmethod
    def joined(cls, errors: Sequence[DataError], limit: int) -> DataError:
        """One error for several sets of files, with at most `limit` lines."""
        lines = [line for error in errors for line in error.problems]
        return cls(lines[:limit], sum(error.total for error in errors))


class FieldProblem(Exception):
    """Raised by a check of one value; the reader adds the place."""

    def __init__(self, code: str, field_name: str | None, got: str, expected: str, fix: str) -> None:
        super().__init__(code, field_name, got, expected, fix)  # all of it, so that it survives pickling
        self.code, self.field, self.got, self.expected, self.fix = code, field_name, got, expected, fix


@dataclass
class Problems:
    """Collects problems; keeps the text of the first `limit` only, so memory stays bounded."""

    limit: int = 20
    lines: list[str] = field(default_factory=list)
    total: int = 0

    def add(self, problem: FieldProblem, file: str = "", line: int | None = None) -> None:
        self.total += 1
        if len(self.lines) >= self.limit:
            return
        place = file if line is None else f"{file}:{line}"
        named = f"field '{problem.field}'" if problem.field else ""
        where = " ".join(part for part in (place, named) if part)
        prefix = f"[{problem.code}] {where}: " if where else f"[{problem.code}] "
        self.lines.append(f"{prefix}got {shorten(problem.got)}; expected {problem.expected}. {problem.fix}")

    def raise_if_any(self) -> None:
        if self.total:
            raise DataError(self.lines, self.total)


def shorten(text: str) -> str:
    """At most 80 characters on one line."""
    text = " ".join(text.split())
    return text if len(text) <= MAX_GOT else text[: MAX_GOT - 3] + "..."


def kind(value: object) -> str:
    """How a value is called in messages: its type (a subclass of float is a float), or `null`."""
    if value is None:
        return "null"
    return "float" if isinstance(value, float) else type(value).__name__
