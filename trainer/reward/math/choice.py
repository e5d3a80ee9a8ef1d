"""Answer letters of multiple-choice questions."""

from __future__ import annotations

import re

_LETTER = re.compile(
    r"""\s*(?:
        \\(?:text|mathrm|mathbf|textbf)\s*\{\s*\(?([A-Ja-j])[).:]?\s*\}   # \text{E}
      | \*\*\(?([A-Ja-j])[).:]?\*\*                                       # **E**
      | \(([A-Ja-j])\)                                                    # (E)
      | ([A-Ja-j])(?:[):]|\.(?![A-Za-z])|\s*$)                            # E   E.   E)   E: text   but not e.g.
    )""",
    re.VERBOSE,
)


def choice_letter(text: str, small: bool = True) -> str | None:
    """The capital of the letter a text begins with: "B) 12" -> "B"; "A or B" -> None. `small` takes a-j too."""
    match = _LETTER.match(text)
    letter = next(filter(None, match.groups())) if match else ""
    return letter.upper() if letter and (small or letter.isupper()) else None
