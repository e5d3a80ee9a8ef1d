"""How an answer falls into words, sentences and parts, and how a count is compared."""

from __future__ import annotations

import operator
import re

RELATIONS = {"less than": operator.lt, "at least": operator.ge}

_WORD = re.compile(r"\w+")
# A full stop inside a number or a web address has no white space behind it and is no candidate at all.
_STOP = re.compile(
    r"""(?<![.!?\u2026])(?P<mark>[.!?\u2026]+)["'\u201d\u2019)\]*_]*(?=\s|$)   # ... ?! ." .)
      | [\u3002\uff01\uff1f]+                                                  # full-width
      | \n[ \t]*(?=\n)                                                        # an empty line""",
    re.VERBOSE,
)
_LAST_WORD = re.compile(r"[\w.]*$")
_INITIAL = re.compile(r"[A-HJ-Z]")  # J. Smith; but a sentence may well end in "I"
_TITLES = {"mr", "mrs", "ms", "dr", "prof", "st", "vs", "cf", "e.g", "i.e"}  # a word always follows
_BEFORE_NUMBER = {"no", "fig", "eq", "vol", "sec", "ch", "pp", "ca", "approx"}
# else they end the sentence
_BEFORE_SMALL = {"etc", "jr", "sr", "inc", "ltd", "co", "corp", "a.m", "p.m", "u.s", "u.k", "ph.d"}


def holds(count: int, relation: str, limit: int) -> bool:
    """`count` is `less than` or `at least` `limit`."""
    return RELATIONS[relation](count, limit)


def words(text: str) -> list[str]:
    """Maximal runs of word characters: "don't" is two words."""
    return _WORD.findall(text)


def count_sentences(text: str) -> int:
    """Stretches with at least one word that end at . ! ? or their East Asian forms, at an empty line, or at the end.

    A full stop ends nothing inside a number, after a title, an initial or an item number, nor after an
    abbreviation that goes on with what usually follows it.
    """
    count, start = 0, 0
    for match in _STOP.finditer(text):
        before, after = text[max(start, match.start() - 80) : match.start()], text[match.end() : match.end() + 80]
        if match["mark"] == "." and _is_abbreviation(before, after):
            continue
        count += _WORD.search(text, start, match.start()) is not None
        start = match.end()
    return count + (_WORD.search(text, start) is not None)


def _is_abbreviation(before: str, after: str) -> bool:
    line = before.rpartition("\n")[2].strip()
    word, following = _LAST_WORD.search(line).group(), after.lstrip()[:1]
    if _INITIAL.fullmatch(word) or line.isdigit():  # a line that is a number so far: an item of a list
        return True
    word = word.casefold()
    return (
        word in _TITLES
        or (word in _BEFORE_NUMBER and following.isdigit())
        or (word in _BEFORE_SMALL and following.islower())
    )


def parts(text: str, divider: str) -> list[str]:
    """What lies between matches of `divider`, stripped; empty parts at both ends are dropped, inner ones stay."""
    found = [part.strip() for part in re.split(divider, text)]
    if found and not found[0]:
        found = found[1:]
    if found and not found[-1]:
        found = found[:-1]
    return found
