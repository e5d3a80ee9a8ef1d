"""Is this answer the reference answer? The first rule that applies decides."""

from __future__ import annotations

import re
from itertools import permutations

from trainer.reward.math.choice import choice_letter
from trainer.reward.math.clean import clean, squeeze, unwrap_text
from trainer.reward.math.numbers import numbers_equal, parse_number
from trainer.reward.math.structure import (
    Items,
    assignment,
    chain_value,
    is_equation,
    items_of,
    member_of,
    unparenthesise,
)
from trainer.reward.math.symbolic import symbolically_equal
from trainer.reward.math.units import split_unit

_BASE = re.compile(r"\(?((?=[A-Z]*[0-9])[0-9A-Z]+)\)?_(?:\{\s*(\d{1,2})\s*\}|(\d{1,2}))")
_WORD = re.compile(r"\\text\s*\{[^{}0-9]*\}|[A-Za-z]{3,}")


def equal(gold: str, answer: str) -> bool:
    """Compare two pieces of LaTeX or plain text as mathematics; `gold` sets the rules."""
    gold, answer = clean(gold), clean(answer)
    if gold == answer or _same_words(gold, answer):
        return gold != ""
    if re.fullmatch(r"[A-J]", gold):
        return choice_letter(answer) == gold
    return _equal_cleaned(gold, answer)


def _equal_cleaned(gold: str, answer: str) -> bool:
    gold, answer = squeeze(gold.strip()), squeeze(answer.strip())
    if gold == answer or not gold or not answer:
        return gold == answer and gold != ""
    if _WORD.fullmatch(gold):
        return unwrap_text(gold) == unwrap_text(answer)
    based = _based_equal(gold, answer)
    if based is not None:
        return based
    (gold, gold_unit), (answer, answer_unit) = split_unit(gold), split_unit(answer)
    if gold_unit and answer_unit and gold_unit != answer_unit:
        return False
    gold_number, answer_number = parse_number(gold), parse_number(answer)
    if gold_number is not None and answer_number is not None:
        return numbers_equal(gold_number, answer_number)
    return _equal_structures(gold, answer)


def _same_words(gold: str, answer: str) -> bool:
    r"""`\text{June 20}` and `June 20`."""
    return gold.startswith(r"\text") and unwrap_text(gold) == unwrap_text(answer)


def _based_equal(gold: str, answer: str) -> bool | None:
    """52_8: same digits, same base, the answer may leave the base out. None when no base is involved."""
    gold_match, answer_match = _BASE.fullmatch(gold), _BASE.fullmatch(answer)
    if gold_match is None:
        return None if answer_match is None else False
    digits, base = gold_match.group(1), gold_match.group(2) or gold_match.group(3)
    if answer_match is None:
        return answer == digits
    return answer_match.group(1) == digits and (answer_match.group(2) or answer_match.group(3)) == base


def _equal_structures(gold: str, answer: str) -> bool:
    gold_items, answer_items = items_of(gold), items_of(answer)
    if gold_items is None and answer_items is None:
        return _equal_single(gold, answer)
    if gold_items is None or answer_items is None:
        return _equal_mixed(gold, gold_items, answer, answer_items)
    named = _named(gold_items), _named(answer_items)
    if named[0] and named[1]:
        return named[0].keys() == named[1].keys() and all(
            _equal_cleaned(value, named[1][name]) for name, value in named[0].items()
        )
    if len(gold_items.values) != len(answer_items.values):
        return False
    in_order = bool(named[0] or named[1])  # names on one side only: the bare side must keep their order
    if gold_items.brackets:
        if answer_items.brackets not in ("", gold_items.brackets):
            return False
        in_order = True
    elif answer_items.brackets:
        return False
    return _pairing(list(gold_items.values), list(answer_items.values), in_order)


def _pairing(gold: list[str], answer: list[str], in_order: bool) -> bool:
    if in_order:
        return all(_equal_cleaned(a, b) for a, b in zip(gold, answer, strict=True))
    if len(gold) <= 3:  # a greedy choice could be wrong for rounded decimals; try all when that is cheap
        return any(all(map(_equal_cleaned, gold, order)) for order in permutations(answer))
    left = list(answer)
    for value in gold:
        match = next((other for other in left if _equal_cleaned(value, other)), None)
        if match is None:
            return False
        left.remove(match)
    return True


def _equal_mixed(gold: str, gold_items: Items | None, answer: str, answer_items: Items | None) -> bool:
    """A list on one side only: intervals may still equal inequalities, `x=(1,2)` its value, `{5}` the 5."""
    items = gold_items or answer_items
    value = value_of(answer if gold_items else gold)  # of the side that is no list
    if value is not None:
        return _equal_cleaned(gold, value) if gold_items else _equal_cleaned(value, answer)
    if len(items.values) == 1:
        return _equal_cleaned(*((items.values[0], answer) if gold_items else (gold, items.values[0])))
    if items.brackets or re.search(r"[<>]|\\(?:le|ge|lt|gt|ne|in)(?![A-Za-z])", gold + answer):
        return symbolically_equal(gold, answer)
    return False


def _named(items: Items) -> dict[str, str]:
    """name -> value when every item is an assignment and no name comes twice; else empty."""
    pairs = [assignment(value) for value in items.values]
    if items.brackets or None in pairs or len({name for name, _ in pairs}) < len(pairs):
        return {}
    return dict(pairs)


def _equal_single(gold: str, answer: str) -> bool:
    gold, answer = unparenthesise(gold), unparenthesise(answer)
    if not (is_equation(gold) and is_equation(answer)):
        values = [value_of(side) or side for side in (gold, answer)]
        if values != [gold, answer]:
            return _equal_cleaned(*values)
    elif gold == answer:
        return True
    return symbolically_equal(gold, answer)


def value_of(text: str) -> str | None:
    """What `x=5`, `5=x`, `f(x)=x+1`, `2+3=5` or `x \\in S` stands for; None for anything else."""
    named = assignment(text)
    return named[1] if named else chain_value(text) or member_of(text)
