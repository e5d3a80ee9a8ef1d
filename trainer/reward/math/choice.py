"""Answer letters of multiple-choice questions."""

from __future__ import annotations

import re

_LETTER = re.compile(
    r"""\s*(?:
        \\(?:text|mathrm|mathbf|textbf)\s*\{\s*\(?([A-Ja-j])[).:]?\s*\}   # \text{E}
      | \*\*\(?([A-Ja-j])[).:]?\*\*                                       # **E**
      | \(([A-Ja-j])\)                                                    # (E)
      | ([A-Ja-j])(?:[.):]|\s*$)                                          # E   E.   E)   E: text
    )""",
    re.VERBOSE,
)


def choice_letter(text: str) -> str | None:
    """The letter a box or marked line begins with: "B) 12" -> "B"; "A or B" -> None."""
    match = _LETTER.match(text)
    return next(letter for letter in match.groups() if letter).upper() if match else None
