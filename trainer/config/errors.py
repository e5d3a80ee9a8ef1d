"""The one format in which every configuration error is shown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class ConfigError:
    """What we got, what we expected, what to paste. `position` is the argument's place in argv, from 1."""

    id: str
    key: str
    got: str
    expected: str
    fix: str
    position: int | None = None

    def __str__(self) -> str:
        place = f"   (argument {self.position})" if self.position is not None else ""
        return (
            f"ConfigError[{self.id}] {self.key}{place}\n"
            f"  got:      {self.got}\n"
            f"  expected: {self.expected}\n"
            f"  do this:  {self.fix}"
        )


class ConfigErrors(ValueError):
    """Everything that is wrong with one command line; `str()` is the complete text for the user."""

    def __init__(self, errors: Sequence[ConfigError]) -> None:
        self.errors = tuple(errors)
        super().__init__("\n".join(str(error) for error in self.errors))
