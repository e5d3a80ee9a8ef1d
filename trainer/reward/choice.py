"""Multiple-choice questions. Runs only in scoring processes (see reward/pool.py)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from trainer.prompts.row import Row
from trainer.reward.math.candidate import MAX_WHOLE, boxes, marked_lines, undecorate
from trainer.reward.math.choice import choice_letter
from trainer.reward.math.clean import unwrap_text
from trainer.reward.result import RewardResult
from trainer.reward.text import answer_part

# reward_type -> score of a (right boxed, right unboxed, wrong boxed, wrong unboxed) answer
REWARDS = {
    "binary": (1.0, 1.0, 0.0, 0.0),
    "loose": (1.0, 1.0, -1.0, -1.0),
    "soft": (1.0, 0.5, -0.5, -1.0),
    "strict": (1.0, -1.0, -1.0, -1.0),
}
REPETITION = 0.5  # what an answer loses that says one thing only
GRAM = 3  # words


class Mention(NamedTuple):
    """A letter the answer commits itself to, and whether a box does so."""

    letter: str
    boxed: bool


@dataclass(frozen=True)
class Choice:
    """Scores by `reward_type`; `acc` is right or wrong. Reasons: correct, wrong, no_answer, think_unclosed.

    reward_type         see REWARDS; without a letter an answer is wrong and unboxed
    repetition_penalty  takes off up to 0.5 for repeated three-word groups
    """

    reward_type: str = "binary"
    repetition_penalty: bool = False

    def __call__(self, text: str, row: Row, think_open: bool = False) -> RewardResult:
        judged = answer_part(text, think_open)
        options = row.extra.get("extra_info", {}).get("options") or ()
        mention = None if judged is None else last_mention(judged, options)
        right = mention is not None and is_right(mention.letter, row.ground_truth.strip(), options)
        boxed = mention is not None and mention.boxed
        score = REWARDS[self.reward_type][2 * (not right) + (not boxed)]
        if self.repetition_penalty:
            score -= REPETITION * repetition(text)
        if mention is None:
            reason = "think_unclosed" if judged is None else "no_answer"
        else:
            reason = "correct" if right else "wrong"
        return RewardResult(score, float(right), mention.letter if mention else None, reason)


def is_right(letter: str, gold: str, options: Sequence[str]) -> bool:
    """A letter beyond the options is wrong whatever the reference says."""
    return letter == gold and (not options or ord(letter) - ord("A") < len(options))


def last_mention(answer: str, options: Sequence[str] = ()) -> Mention | None:
    """The last box or marked line that begins with a letter; without any, a short whole answer that does.

    Boxes and lines that hold something else count for nothing, unless it is the text of exactly one option.
    """
    boxed = next(((place, found) for place, text in boxes(answer) if (found := _letter(text, options))), None)
    marked = next(((place, found) for place, text in marked_lines(answer) if (found := _letter(text, options))), None)
    if boxed and (not marked or boxed[0] > marked[0]):
        return Mention(boxed[1], True)
    if marked:
        return Mention(marked[1], False)
    whole = answer.strip()
    if len(whole) > MAX_WHOLE or "\n" in whole:
        return None
    letter = choice_letter(whole, small=False)  # a small letter in plain prose is a word or an item
    return Mention(letter, False) if letter else None


def _letter(text: str | None, options: Sequence[str]) -> str | None:
    """The letter that a box or line begins with, or that of the one option whose text it is."""
    plain = undecorate(text or "")
    by_text = [place for place, option in enumerate(options) if unwrap_text(str(option)) == unwrap_text(plain)]
    if len(plain) > 1 and len(by_text) == 1:
        return chr(ord("A") + by_text[0])
    return choice_letter(text or "") or choice_letter(plain)


def repetition(text: str) -> float:
    """1 - unique / all three-word groups, case ignored: 0 when none comes twice or there is none."""
    words = text.casefold().split()
    grams = list(zip(*(words[start:] for start in range(GRAM)), strict=False))
    return 1 - len(set(grams)) / len(grams) if grams else 0.0
