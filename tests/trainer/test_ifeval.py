"""Instruction following: each of the 25 rules holds and fails where it should; strict, loose, and the scorer."""

import json
import time
from pathlib import Path

import pytest

from trainer.prompts.row import Message, Row
from trainer.reward import DomainSpec, RewardManager
from trainer.reward.ifeval import IfEval
from trainer.reward.instructions.accuracy import accuracies
from trainer.reward.instructions.table import RULES, loose_forms, parse_instructions
from trainer.reward.instructions.text import count_sentences

DATA = Path(__file__).parents[2] / "../shared/data"


def truth(*pairs: tuple[str, dict]) -> str:
    return json.dumps({"instruction_id_list": [name for name, _ in pairs], "kwargs": [given for _, given in pairs]})


def row(*pairs: tuple[str, dict]) -> Row:
    return Row("1", "ifeval", "ifeval", (Message("user", "?"),), ground_truth=truth(*pairs))


def follows(name: str, arguments: dict, answer: str, whole_words: bool = True) -> bool:
    [instruction] = parse_instructions(truth((name, arguments)))
    return instruction.follows(answer, whole_words)


AT_LEAST, LESS = "at least", "less than"
GERMAN = "Das Meer ist heute ganz ruhig, und am Strand liegen viele kleine Muscheln."
CASES = [  # id, kwargs, answers that follow, answers that do not
    ("keywords:existence", {"keywords": ["Valve", "air pump"]}, ["The air pump has a VALVE."], ["air pump, valves"]),
    ("keywords:existence", {"keywords": ["c++"]}, ["I like C++."], ["I like c."]),
    (
        "keywords:frequency",
        {"keyword": "art", "frequency": 1, "relation": AT_LEAST},
        ["start smart art"],
        ["start smart"],
    ),
    ("keywords:frequency", {"keyword": "art", "frequency": 2, "relation": LESS}, ["start smart art"], ["art, ART"]),
    ("keywords:forbidden_words", {"forbidden_words": ["bee", "tea"]}, ["I have been in a team"], ["Tea?", "a bee."]),
    (
        "keywords:letter_frequency",
        {"letter": "y", "let_frequency": 2, "let_relation": AT_LEAST},
        ["Yes, my"],
        ["my cat", "no"],
    ),
    (
        "keywords:letter_frequency",
        {"letter": "Y", "let_frequency": 2, "let_relation": LESS},
        ["my cat", "no"],
        ["Yes, my"],
    ),
    ("language:response_language", {"language": "de"}, [GERMAN], ["The sea is calm today.", "12345 !?"]),
    ("language:response_language", {"language": "zh"}, ["今天的大海非常平静，孩子们在沙滩上奔跑。"], [GERMAN]),
    (
        "length_constraints:number_sentences",
        {"num_sentences": 2, "relation": AT_LEAST},
        ["Pi is 3.14. Yes!"],
        ["Pi is 3.14."],
    ),
    ("length_constraints:number_sentences", {"num_sentences": 2, "relation": LESS}, ["Only one"], ["One. Two."]),
    ("length_constraints:number_words", {"num_words": 3, "relation": AT_LEAST}, ["one two three"], ["one two"]),
    ("length_constraints:number_words", {"num_words": 3, "relation": LESS}, ["one -- two"], ["don't go"]),
    (
        "length_constraints:number_paragraphs",
        {"num_paragraphs": 2},
        ["one\n***\ntwo", "***\none\n *** \ntwo\n***"],
        ["one\n\ntwo", "one\n***\n***\ntwo", "one *** two", "a\n***\nb\n***\nc"],
    ),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 3}, ["a\n***\nb\n***\nc"], ["a\n***\n***\nb"]),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "Weekend"},
        ["Hi.\n\nweekend plans", 'Hi.\n\n\n"Weekend," he said'],
        ["Hi.\n\nweekends", "weekend.\n\nHi", "Hi.\nweekend", "Hi.\n\nweekend\n\nBye"],
    ),
    (
        "detectable_content:number_placeholders",
        {"num_placeholders": 2},
        ["[name] lives in [place] [x]"],
        ["[name]", "[] []", "[a\nb] [c]"],
    ),
    (
        "detectable_content:postscript",
        {"postscript_marker": "P.S."},
        ["Bye\nP.S. Call me", "p.s. hm"],
        ["Bye P.S. x", "P.P.S x"],
    ),
    ("detectable_content:postscript", {"postscript_marker": "P.P.S"}, ["Bye\n  P.P.S call"], ["Bye\nP.S. x"]),
    (
        "detectable_format:number_bullet_lists",
        {"num_bullets": 2},
        ["* a\n* b", "- a\n  - b", "Hi:\n* a\n- b\n---\n"],
        ["* a", "* a\n* b\n* c", "*a*\n*b*"],
    ),
    ("detectable_format:constrained_response", {}, ["Well. My answer is maybe."], ["My answer is yes", "Yes."]),
    (
        "detectable_format:number_highlighted_sections",
        {"num_highlights": 2},
        ["*a b* and **c**", "* *x*\n* **y**", "*a* *b* *c*"],
        ["*a b*", "** ** and * *", "*a\nb* *c*", "* one **two**\n* three"],
    ),
    (
        "detectable_format:multiple_sections",
        {"section_spliter": "SECTION", "num_sections": 2},
        ["SECTION 1\na\nSECTION 2\nb", "SECTION 1 SECTION 2 SECTION 3"],
        ["SECTION 1", "SECTION one SECTION two", "SUBSECTION 1 SUBSECTION 2"],
    ),
    (
        "detectable_format:json_format",
        {},
        ['{"a": [1, 2.5e3, null]}', '```json\n{"a": 1}\n```', "```\n[]\n```\n", " 5 "],
        ['Here: {"a": 1}', "{'a': 1}", '{"a": NaN}', "```json\n{}\n``` done", "[" * 100_000],
    ),
    ("detectable_format:title", {}, ["<<A title>>\ntext", "x <<I <3 rain>> y"], ["<A>", "<<>>", "<< >>", "<<a\nb>>"]),
    (
        "combination:two_responses",
        {},
        ["one******two", "******\none\n******\ntwo"],
        ["one", "one******one", "a******b******c", "one******", "a************b"],
    ),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Say hi."}, [" Say hi. Hi!", "SAY HI. HI"], ["Hi! Say hi."]),
    (
        "startend:end_checker",
        {"end_phrase": "That is all."},
        ["So. That is all.", '"so THAT IS ALL."\n'],
        ["That is all. Bye", "all."],
    ),
    ("startend:quotation", {}, ['"a"', ' "a b"\n'], ['"', '"a', 'a"', "'a'"]),
    (
        "change_case:capital_word_frequency",
        {"capital_frequency": 2, "capital_relation": AT_LEAST},
        ["GANZ ruhig, LAUT"],
        ["GANZ ruhig", "Ganz Laut"],
    ),
    (
        "change_case:capital_word_frequency",
        {"capital_frequency": 1, "capital_relation": LESS},
        ["Ganz ruhig"],
        ["GANZ ruhig"],
    ),
    (
        "change_case:english_capital",
        {},
        ["THE SEA IS CALM TODAY AND THE SUN SHINES.", "WRITE MORE CODE", "HOW ARE YOU?"],
        ["THE SEA IS CALM today.", GERMAN.upper(), "123"],
    ),
    (
        "change_case:english_lowercase",
        {},
        ["the sea is calm today and the sun shines."],
        ["The sea is calm today.", GERMAN.lower(), "123"],
    ),
    ("punctuation:no_comma", {}, ["one and two"], ["one, two"]),
]


@pytest.mark.parametrize(("name", "arguments", "good", "bad"), CASES)
def test_every_rule_holds_and_fails(name, arguments, good, bad):
    assert [answer for answer in good if not follows(name, arguments, answer)] == []
    assert [answer for answer in bad if follows(name, arguments, answer)] == []
    assert not follows(name, arguments, "") and not follows(name, arguments, " \n")


def test_all_25_rules_are_covered():
    assert len(RULES) == 25 and {name for name, *_ in CASES} == set(RULES)


def test_substring_matching_is_literal_and_spares_forbidden_words():
    counted = ("keywords:frequency", {"keyword": "art", "frequency": 3, "relation": AT_LEAST})
    assert follows(*counted, "start smart art", whole_words=False) and not follows(*counted, "start smart art")
    assert follows("keywords:existence", {"keywords": ["a.b"]}, "xa.bx", whole_words=False)
    assert not follows("keywords:existence", {"keywords": ["a.b"]}, "xacbx", whole_words=False)
    assert follows("keywords:forbidden_words", {"forbidden_words": ["bee"]}, "been", whole_words=False)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("", 0),
        ("...", 0),
        ("no full stop", 1),
        ("Pi is 3.14. See example.com. Good.", 3),
        ("Mr. Smith met Dr. J. Doe. They talked.", 2),
        ("Use salt, e.g. on ice, i.e. outside. Done!", 2),
        ("Wait... what?! Yes!", 3),
        ("1. first item.\n2. second item.", 2),
        ("It was in 1999.\nNext.", 2),
        ("No. 5 won. He said no. Then he left.", 3),
        ("Cats, dogs, etc. are pets. I like cats, dogs, etc. They are nice.", 3),
        ("We came at 5 p.m. and left.", 1),
        ("A heading\n\nOne line.", 2),
        ('He said "stop." Then he left. (Really.) Yes.', 4),
        ("It was not I. So what.", 2),
        ("one. two. three.", 3),
        ("你好。再见！", 2),
    ],
)
def test_sentences(text, count):
    assert count_sentences(text) == count


def test_a_long_run_of_full_stops_takes_no_time():
    started = time.monotonic()
    assert count_sentences("." * 60_000 + "x") == 1
    assert time.monotonic() - started < 3


def test_results_keep_the_order_of_the_list_also_when_an_id_comes_twice():
    twice = [
        ("length_constraints:number_words", {"num_words": n, "relation": r}) for n, r in ((10, AT_LEAST), (21, LESS))
    ]
    result = IfEval()("five words are in this", row(*twice))
    assert result.extra["strict"] == [0, 1]
    assert (result.score, result.acc, result.reason) == (0, 0, "not_followed")
    assert IfEval(reward="fraction")("five words are in this", row(*twice)).score == 0.5


def test_loose_passes_when_one_of_eight_forms_does():
    assert loose_forms("a\n*b*\nc") == ["a\n*b*\nc", "a\nb\nc", "*b*\nc", "b\nc", "a\n*b*", "a\nb", "*b*", "b"]
    quoted = row(("startend:quotation", {}), ("punctuation:no_comma", {}))
    result = IfEval()('Sure, here it is:\n*"Good morning"*\nAnything else?', quoted)
    assert (result.extra["strict"], result.extra["loose"], result.score) == ([0, 0], [1, 1], 0)
    emptied = IfEval()("one, two", row(("punctuation:no_comma", {})))
    assert emptied.extra["loose"] == [0], "a form without any text follows nothing"


def test_nulls_are_dropped_and_whole_floats_are_numbers():
    [instruction] = parse_instructions(
        truth(("length_constraints:number_paragraphs", {"num_paragraphs": 2.0, "relation": None, "letter": None}))
    )
    assert dict(instruction.arguments) == {"num_paragraphs": 2} and type(instruction.arguments["num_paragraphs"]) is int
    assert parse_instructions(truth(("punctuation:no_comma", None)))[0].arguments == {}


@pytest.mark.parametrize(
    ("pair", "message"),
    [
        (("punctuation:no_dots", {}), "got instruction 'punctuation:no_dots'; expected one of change_case:capital"),
        (("keywords:existence", {"keywords": None}), "got keywords:existence without keywords; expected keywords"),
        (
            ("length_constraints:number_words", {"num_words": 3, "relation": "at most"}),
            "with relation 'at most'; expected less than or at least; correct the row",
        ),
    ],
)
def test_a_row_that_cannot_be_checked_is_named(pair, message):
    with pytest.raises(ValueError, match=message):
        parse_instructions(truth(pair))


def test_sample_rows_fail_at_exactly_the_listed_places():
    if not DATA.is_dir():
        pytest.skip("the sample data is not beside this checkout")
    score = IfEval()
    for line in (DATA / "ifeval_12.jsonl").read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        task = Row(record["id"], "ifeval", "ifeval", (Message("user", "?"),), ground_truth=record["ground_truth"])
        good, bad = (score(record["extra_info"][key], task) for key in ("good", "bad"))
        assert (good.acc, bad.acc) == (1, 0), record["id"]
        failed = [place for place, kept in enumerate(bad.extra["strict"]) if not kept]
        assert failed == record["extra_info"]["bad_fails"], record["id"]


def test_thinking_is_left_out():
    task = row(("punctuation:no_comma", {}))
    assert IfEval()("<think>a, b</think>c", task).reason == "followed"
    assert IfEval()("<think>a b", task).reason == "think_unclosed"
    assert IfEval()("a b", task, think_open=True).acc == 0
    assert IfEval()("<think>a</think> ", task).reason == "no_answer"


def test_accuracies_count_prompts_and_instructions():
    extras = [{"strict": [1, 1], "loose": [1, 1]}, {"strict": [0], "loose": [1]}, {"other": 1}]
    assert accuracies(extras) == {
        "prompt_strict": 0.5,
        "instruction_strict": pytest.approx(2 / 3),
        "prompt_loose": 1.0,
        "instruction_loose": 1.0,
    }
    assert accuracies([]) == {}


def test_in_scoring_processes_with_its_metrics():
    task = row(("punctuation:no_comma", {}), ("startend:quotation", {}))
    domains = {"ifeval": DomainSpec(options={"reward": "fraction"}, score_map=(-1, 1))}
    with RewardManager(domains, num_workers=1) as manager:
        futures = [manager.submit(text, task, response_length=1) for text in ("a b", '"a b"')]
        half, whole = (future.result(60) for future in futures)
        metrics = manager.take_metrics()
        assert "reward/ifeval/prompt_strict" not in manager.take_metrics()
    assert (half.score, half.acc, whole.score, whole.acc) == (0, 0.5, 1, 1)
    assert (metrics["reward/ifeval/prompt_strict"], metrics["reward/ifeval/instruction_strict"]) == (0.5, 0.75)
    assert metrics["reward/ifeval/prompt_loose"] == 0.5
