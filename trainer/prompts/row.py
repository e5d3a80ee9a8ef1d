"""One typed row: whatever the file format was, nothing after the loader looks at raw dicts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Message(NamedTuple):
    """One turn of a conversation; role is system, user, assistant or tool."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Row:
    """One task.

    id, tag         together unique; `domain` is the scorer that judges the answer
    messages        the conversation up to the point where the model must answer
    ground_truth    reference answer as text, None where the domain needs none
    style           rule or model
    cases           parsed test cases and their `case_type` (code only)
    difficulty      a number when it was one; `difficulty_text` is what stood in the file
    extra           every other field
    origin          (file as named in the configuration, 1-based line or row)
    """

    id: str
    tag: str
    domain: str
    messages: tuple[Message, ...]
    ground_truth: str | None = None
    style: str = "rule"
    cases: tuple[dict[str, Any], ...] = ()
    case_type: str = ""
    difficulty: float | None = None
    difficulty_text: str = ""
    source: str = ""
    ability: str = ""
    extra: dict[str, Any] = field(default_factory=dict)
    origin: tuple[str, int] = ("", 0)
