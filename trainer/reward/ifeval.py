"""Does an answer follow the instructions of its prompt? Runs only in scoring processes (see reward/pool.py)."""

from __future__ import annotations

from dataclasses import dataclass

from trainer.prompts.row import Row
from trainer.reward.instructions.language import language_of
from trainer.reward.instructions.table import parse_instructions
from trainer.reward.result import RewardResult
from trainer.reward.text import answer_part


@dataclass(frozen=True)
class IfEval:
    """Scores the strict reading. Reasons: followed, not_followed, no_answer, think_unclosed.

    reward         all: 1 when every instruction is followed; fraction: the share that is
    keyword_match  word: keywords are whole words; substring: anywhere, as in the public script

    `extra` holds one 0/1 per instruction, in the row's order, under `strict` and `loose`.
    """

    reward: str = "all"
    keyword_match: str = "word"

    def __post_init__(self) -> None:
        language_of("loads the language profiles before the first answer's time starts")

    def __call__(self, text: str, row: Row, think_open: bool = False) -> RewardResult:
        instructions = parse_instructions(row.ground_truth)
        judged = answer_part(text, think_open)
        answer, whole_words = judged or "", self.keyword_match == "word"
        strict = [int(each.follows(answer, whole_words)) for each in instructions]
        loose = [int(each.follows_loosely(answer, whole_words)) for each in instructions]
        score = sum(strict) / len(strict) if self.reward == "fraction" else float(all(strict))
        if judged is None:
            reason = "think_unclosed"
        elif not answer.strip():
            reason = "no_answer"
        else:
            reason = "followed" if all(strict) else "not_followed"
        return RewardResult(score, score, None, reason, {"strict": strict, "loose": loose})
