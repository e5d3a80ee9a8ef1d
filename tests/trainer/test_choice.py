"""Multiple choice: which letter an answer commits itself to, and what it is worth."""

import json
from pathlib import Path

import pytest

from trainer.prompts.row import Message, Row
from trainer.reward.choice import Choice, last_mention, repetition

DATA = Path(__file__).parents[2] / "../shared/data"
GASES = ["oxygen", "chlorine", "hydrogen", "nitrogen", "argon"]


def row(gold: str = "E", options: list[str] | None = None) -> Row:
    extra = {} if options is None else {"extra_info": {"options": options}}
    return Row("1", "choice", "choice", (Message("user", "?"),), ground_truth=gold, extra=extra)


@pytest.mark.parametrize("form", ["E", "(E)", "E.", "E)", "E: argon", r"\text{E}", "**E**"])
def test_every_letter_form_counts_in_a_box_and_behind_a_marker(form):
    assert last_mention(rf"So \boxed{{{form}}} it is.") == ("E", True)
    assert last_mention(f"Well, the answer is {form}") == ("E", False)
    assert last_mention(f"**Answer:** {form}\nThat was easy.") == ("E", False)
    assert last_mention(rf"\boxed{{{form.replace('E', 'e')}}}") == ("E", True)


@pytest.mark.parametrize(
    ("answer", "mention"),
    [
        (r"\boxed{x^2+1} and so. Answer: D", ("D", False)),
        (r"\boxed{C}, no, wait: \boxed{E}", ("E", True)),
        (r"\boxed{C}. The answer is E.", ("E", False)),
        (r"The answer is E. \boxed{C}", ("C", True)),
        (r"The answer is $\boxed{E}$.", ("E", True)),
        (r"\boxed{C} and then \boxed{42}", ("C", True)),
        (r"\boxed{\boxed{E}}", ("E", True)),
        (r"\boxed E", ("E", True)),
        (r"\boxed{E", None),
        (r"\boxed{}", None),
        (r"\boxed{A or B}", None),
        ("I think A or B", None),
        ("A stone falls.", None),
        ("The answer is e.g. seven", None),
        ("E", ("E", False)),
        ("(E) argon", ("E", False)),
        ("e", None),
        ("a) is wrong", None),
        ("E\nbecause it is noble", None),
        ("", None),
    ],
)
def test_the_last_mention_wins(answer, mention):
    assert last_mention(answer) == mention


@pytest.mark.parametrize(
    ("answer", "letter"),
    [
        (r"\boxed{Hydrogen}", "C"),
        (r"\boxed{\text{hydrogen}}", "C"),
        ("The answer is hydrogen.", "C"),
        (r"\boxed{helium}", None),
        (r"\boxed{B: hydrogen}", "B"),
        ("It must be hydrogen.", None),
    ],
)
def test_option_text_counts_where_a_letter_would(answer, letter):
    mention = last_mention(answer, GASES)
    assert (mention.letter if mention else None) == letter
    assert letter == "B" or last_mention(answer) is None, "without options only letters count"


def test_option_text_that_two_options_share_or_that_looks_like_a_letter():
    assert last_mention(r"\boxed{same}", ["same", "Same", "other"]) is None
    assert last_mention(r"\boxed{E. coli}", ["virus", "E. coli"]) == ("B", True)
    assert last_mention(r"\boxed{A}", ["B", "A", "AB"]) == ("A", True), "one letter is a letter, not a blood group"


@pytest.mark.parametrize(
    ("reward_type", "scores"),
    [("binary", (1, 1, 0, 0)), ("loose", (1, 1, -1, -1)), ("soft", (1, 0.5, -0.5, -1)), ("strict", (1, -1, -1, -1))],
)
def test_reward_types(reward_type, scores):
    texts = (r"\boxed{E}", "Answer: E", r"\boxed{D}", "Answer: D", "no idea at all, sorry", "<think>hm")
    results = [Choice(reward_type)(text, row()) for text in texts]
    assert [result.score for result in results] == [*scores, scores[3], scores[3]]
    assert [result.acc for result in results] == [1, 1, 0, 0, 0, 0]
    assert [result.pred for result in results] == ["E", "E", "D", "D", None, None]
    assert [result.reason for result in results] == [
        *("correct", "correct", "wrong", "wrong", "no_answer", "think_unclosed"),
    ]


def test_a_letter_beyond_the_options_is_wrong():
    assert Choice()(r"\boxed{E}", row("E", GASES)).acc == 1
    assert Choice()(r"\boxed{E}", row("E", GASES[:4])).acc == 0
    assert Choice()(r"\boxed{E}", row("B", GASES[:4])).pred == "E"


def test_only_what_follows_the_thinking_counts():
    assert Choice()(r"<think>\boxed{D}</think>\boxed{E}", row()).acc == 1
    assert Choice()(r"so \boxed{E}", row(), think_open=True).reason == "think_unclosed"


def test_repetition():
    assert repetition("one two") == 0 and repetition("one two three four") == 0
    assert repetition("a b c a b c a b c") == pytest.approx(1 - 3 / 7)
    text = "a b c A B C a b c\nAnswer: E"  # 9 groups, of which abc, bca, cab, bc+answer, c+answer+e are unlike
    assert Choice(repetition_penalty=True)(text, row()).score == pytest.approx(1 - 0.5 * (1 - 5 / 9))
    assert Choice()(text, row()).score == 1
    assert Choice(repetition_penalty=True)(text, row()).acc == 1


def test_sample_rows():
    if not DATA.is_dir():
        pytest.skip("the sample data is not beside this checkout")
    for line in (DATA / "crossthinkqa_8.jsonl").read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        options, gold = record["extra_info"]["options"], record["ground_truth"]
        task = row(gold, options)
        assert Choice()(rf"\boxed{{{gold}}}", task).acc == 1, record["id"]
        assert Choice()(rf"\boxed{{{options[ord(gold) - ord('A')]}}}", task).acc == 1, record["id"]
        for other in "ABCDEFGHIJ".replace(gold, ""):
            assert Choice()(rf"\boxed{{{other}}}", task).acc == 0, record["id"]
