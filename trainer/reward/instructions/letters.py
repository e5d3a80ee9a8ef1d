"""Capitals, small letters and commas."""

from __future__ import annotations

from trainer.reward.instructions.language import is_english
from trainer.reward.instructions.text import holds, words


def capital_word_frequency(answer: str, capital_frequency: int, capital_relation: str) -> bool:
    return holds(sum(word.isupper() for word in words(answer)), capital_relation, capital_frequency)


def english_capital(answer: str) -> bool:
    return not any(letter.islower() for letter in answer) and is_english(answer)


def english_lowercase(answer: str) -> bool:
    return not any(letter.isupper() for letter in answer) and is_english(answer)


def no_comma(answer: str) -> bool:
    return "," not in answer
