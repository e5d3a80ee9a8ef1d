"""The 25 instructions by id, and whether an answer follows the list of a row."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from trainer.reward.instructions import keywords, language, layout, lengths, letters
from trainer.reward.instructions.text import RELATIONS

# Parameters carry the names that the public set uses in `kwargs`.
RULES: dict[str, Callable[..., bool]] = {
    "keywords:existence": keywords.existence,
    "keywords:frequency": keywords.frequency,
    "keywords:forbidden_words": keywords.forbidden_words,
    "keywords:letter_frequency": keywords.letter_frequency,
    "language:response_language": language.response_language,
    "length_constraints:number_sentences": lengths.number_sentences,
    "length_constraints:number_paragraphs": lengths.number_paragraphs,
    "length_constraints:number_words": lengths.number_words,
    "length_constraints:nth_paragraph_first_word": lengths.nth_paragraph_first_word,
    "detectable_content:number_placeholders": layout.number_placeholders,
    "detectable_content:postscript": layout.postscript,
    "detectable_format:number_bullet_lists": layout.number_bullet_lists,
    "detectable_format:constrained_response": layout.constrained_response,
    "detectable_format:number_highlighted_sections": layout.number_highlighted_sections,
    "detectable_format:multiple_sections": layout.multiple_sections,
    "detectable_format:json_format": layout.json_format,
    "detectable_format:title": layout.title,
    "combination:two_responses": layout.two_responses,
    "combination:repeat_prompt": layout.repeat_prompt,
    "startend:end_checker": layout.end_checker,
    "startend:quotation": layout.quotation,
    "change_case:capital_word_frequency": letters.capital_word_frequency,
    "change_case:english_capital": letters.english_capital,
    "change_case:english_lowercase": letters.english_lowercase,
    "punctuation:no_comma": letters.no_comma,
}


@dataclass(frozen=True)
class Instruction:
    """One entry of a row's list; `arguments` are those that its rule takes."""

    id: str
    arguments: Mapping[str, Any]

    def follows(self, answer: str, whole_words: bool) -> bool:
        """An empty answer follows nothing."""
        rule = RULES[self.id]
        setting = {"whole_words": whole_words} if "whole_words" in _parameters(rule) else {}
        return bool(answer.strip()) and rule(answer, **self.arguments, **setting)

    def follows_loosely(self, answer: str, whole_words: bool) -> bool:
        return any(self.follows(form, whole_words) for form in loose_forms(answer))


def parse_instructions(ground_truth: str) -> list[Instruction]:
    """`{instruction_id_list, kwargs}` as JSON text. ValueError for an unknown id and for missing or odd arguments.

    A parquet file gives every entry the keys of all entries, unused ones null, and whole numbers as floats.
    """
    stored = json.loads(ground_truth)
    pairs = zip(stored["instruction_id_list"], stored["kwargs"], strict=True)
    return [_instruction(name, arguments or {}) for name, arguments in pairs]


def _instruction(name: str, arguments: Mapping[str, Any]) -> Instruction:
    if name not in RULES:
        raise ValueError(f"got instruction {name!r}; expected one of {', '.join(sorted(RULES))}; correct the row")
    wanted = [parameter for parameter in _parameters(RULES[name]) if parameter not in ("answer", "whole_words")]
    missing = [key for key in wanted if arguments.get(key) is None]
    if missing:
        raise ValueError(f"got {name} without {', '.join(missing)}; expected {', '.join(wanted)}; complete its kwargs")
    kept = {key: _whole(arguments[key]) for key in wanted}
    for key, value in kept.items():
        if key.endswith("relation") and value not in RELATIONS:
            raise ValueError(f"got {name} with {key} {value!r}; expected {' or '.join(RELATIONS)}; correct the row")
    return Instruction(name, kept)


def _parameters(rule: Callable[..., bool]) -> tuple[str, ...]:
    return tuple(inspect.signature(rule).parameters)


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def loose_forms(answer: str) -> list[str]:
    """The answer as it is, without its first line, its last line, or both; each with and without asterisks."""
    lines = answer.split("\n")
    cut = [answer, *("\n".join(part).strip() for part in (lines[1:], lines[:-1], lines[1:-1]))]
    return [form for text in cut for form in (text, text.replace("*", ""))]
