"""What an answer contains beside its prose: placeholders, bullets, titles, JSON, and how it begins and ends."""

from __future__ import annotations

import json
import re

from trainer.reward.instructions.text import parts

_PLACEHOLDER = re.compile(r"\[[^\[\]\n]+\]")
_BULLET = re.compile(r"^[ \t]*(?:\*[ \t]|-(?!-))", re.MULTILINE)
_HIGHLIGHT = re.compile(r"\*\*([^*\n]+)\*\*|\*([^*\n]+)\*")
_CONSTRAINED = ("My answer is yes.", "My answer is no.", "My answer is maybe.")


def number_placeholders(answer: str, num_placeholders: int) -> bool:
    return len(_PLACEHOLDER.findall(answer)) >= num_placeholders


def postscript(answer: str, postscript_marker: str) -> bool:
    """A line starts with the marker, case ignored. `P.P.S` is no `P.S.`: the texts differ at their third letter."""
    marker = postscript_marker.casefold()
    return any(line.lstrip().casefold().startswith(marker) for line in answer.splitlines())


def number_bullet_lists(answer: str, num_bullets: int) -> bool:
    return len(_BULLET.findall(answer)) == num_bullets


def constrained_response(answer: str) -> bool:
    return any(sentence in answer for sentence in _CONSTRAINED)


def number_highlighted_sections(answer: str, num_highlights: int) -> bool:
    without_bullets = re.sub(r"(?m)^[ \t]*\*[ \t]", "", answer)  # a bullet must not pair up with a highlight
    found = [two or one for two, one in _HIGHLIGHT.findall(without_bullets)]
    return sum(bool(text.strip()) for text in found) >= num_highlights


def multiple_sections(answer: str, section_spliter: str, num_sections: int) -> bool:
    """At least so many marks such as `SECTION 1`. The argument is spelt as in the public set."""
    return len(re.findall(rf"(?<!\w){re.escape(section_spliter)}\s?\d+", answer)) >= num_sections


def json_format(answer: str) -> bool:
    text = answer.strip()
    head, _, rest = text.partition("\n")
    if head.startswith("```") and rest.endswith("```"):
        text = rest.removesuffix("```")
    try:
        json.loads(text, parse_constant=_no_constant, parse_int=str)
    except (ValueError, RecursionError):
        return False
    return True


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def title(answer: str) -> bool:
    for line in answer.splitlines():
        start, end = line.find("<<"), line.rfind(">>")
        if start >= 0 and line[start + 2 : max(end, 0)].strip("<> \t"):
            return True
    return False


def two_responses(answer: str) -> bool:
    found = parts(answer, re.escape("******"))
    return len(found) == 2 and all(found) and found[0] != found[1]


def repeat_prompt(answer: str, prompt_to_repeat: str) -> bool:
    """Case ignored, as in the public script: the row may also ask for capitals."""
    return answer.strip().casefold().startswith(prompt_to_repeat.strip().casefold())


def end_checker(answer: str, end_phrase: str) -> bool:
    return answer.strip(' \t\r\n"').casefold().endswith(end_phrase.strip(' \t\r\n"').casefold())


def quotation(answer: str) -> bool:
    text = answer.strip()
    return len(text) > 1 and text[0] == text[-1] == '"'
