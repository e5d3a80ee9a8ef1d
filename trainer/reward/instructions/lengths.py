"""How many words, sentences and paragraphs."""

from __future__ import annotations

import re

from trainer.reward.instructions.text import count_sentences, holds, parts, words


def number_words(answer: str, num_words: int, relation: str) -> bool:
    return holds(len(words(answer)), relation, num_words)


def number_sentences(answer: str, num_sentences: int, relation: str) -> bool:
    return holds(count_sentences(answer), relation, num_sentences)


def number_paragraphs(answer: str, num_paragraphs: int) -> bool:
    """Exactly so many parts between lines of three asterisks; two such lines with nothing between follow nothing."""
    found = parts(answer, r"(?m)^[ \t]*\*\*\*[ \t]*$")
    return len(found) == num_paragraphs and all(found)


def nth_paragraph_first_word(answer: str, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    """Exactly so many paragraphs parted by empty lines; the nth (from 1) starts with the word, case ignored."""
    found = parts(answer, r"\n\s*\n")
    if len(found) != num_paragraphs or not 1 <= nth_paragraph <= num_paragraphs:
        return False
    return re.match(rf"\W*{re.escape(first_word)}(?!\w)", found[nth_paragraph - 1], re.IGNORECASE) is not None
