"""Which words and letters occur, and how often."""

from __future__ import annotations

import re
from collections.abc import Sequence

from trainer.reward.instructions.text import holds


def count_of(keyword: str, answer: str, whole_words: bool) -> int:
    """Occurrences of the literal text, case ignored; `whole_words` asks for no word character on either side."""
    pattern = re.escape(keyword)
    if whole_words:
        pattern = rf"(?<!\w){pattern}(?!\w)"
    return len(re.findall(pattern, answer, re.IGNORECASE))


def existence(answer: str, keywords: Sequence[str], whole_words: bool) -> bool:
    return all(count_of(keyword, answer, whole_words) for keyword in keywords)


def frequency(answer: str, keyword: str, frequency: int, relation: str, whole_words: bool) -> bool:
    return holds(count_of(keyword, answer, whole_words), relation, frequency)


def forbidden_words(answer: str, forbidden_words: Sequence[str]) -> bool:
    """Always whole words, in the public script too: "been" does not hold "bee"."""
    return not any(count_of(word, answer, whole_words=True) for word in forbidden_words)


def letter_frequency(answer: str, letter: str, let_frequency: int, let_relation: str) -> bool:
    return holds(answer.casefold().count(letter.casefold()), let_relation, let_frequency)
