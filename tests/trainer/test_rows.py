"""Reading rows: types and both formats."""

import json
from pathlib import Path

import pytest

from tests.trainer.data_bench import DOMAINS, GOOD, MISSING, USER, good, load, message, verl, write, write_parquet
from trainer.prompts import Message
from trainer.reward import DomainSpec

DATA = Path(__file__).parents[2] / "../shared/data"


def test_ids_used_twice(tmp_path):
    a = write(tmp_path, good(id=7), good(id="8"))
    b = write(tmp_path, good(id="7", prompt="other"), name="b.jsonl")
    assert message(tmp_path, a, b) == (
        "[D13] b.jsonl:1 field 'id': got '7', first seen at a.jsonl:1; expected unique id per tag. "
        "Rename, or set data.duplicate_ids=first"
    )
    rows = load(tmp_path, a, b, duplicate_ids="first")
    assert [row.id for row in rows] == ["7", "8"] and rows[0].messages[0].content == GOOD["prompt"]
    assert rows.files["b.jsonl"].duplicates_dropped == 1
    other_tag = write(tmp_path, good(id="7", tag="deepmath_103k"), name="c.jsonl")
    assert len(load(tmp_path, a, other_tag)) == 3


def test_dropped_duplicates_do_not_count_as_samples(tmp_path):
    """The second "2" is found only by a pass that already drops the second "1"."""
    name = write(tmp_path, *(good(id=i) for i in "1121234"))
    rows = load(tmp_path, name, duplicate_ids="first", max_samples=3)
    assert [row.id for row in rows] == ["1", "2", "3"] and rows[2].origin == ("a.jsonl", 6)
    assert rows.files[name].duplicates_dropped == 3


def test_strings_stay_strings_and_numbers_keep_their_text(tmp_path):
    golds = ['"007"', '"1e3"', '"1/2"', '"2024-01-01"', '"true"', "1.50", "3", "-0.0", "1e3"]
    lines = [json.dumps(good(id=str(i), ground_truth=0)).replace('": 0}', f'": {g}}}') for i, g in enumerate(golds)]
    rows = load(tmp_path, write(tmp_path, *lines))
    assert [row.ground_truth for row in rows] == [g.strip('"') for g in golds]


def test_difficulty_in_all_its_types(tmp_path):
    values = ["4.5", 3, 0.0, "8.0+", None, "nan"]
    rows = load(tmp_path, write(tmp_path, *(good(id=str(i), difficulty=v) for i, v in enumerate(values))))
    assert [row.difficulty for row in rows] == [4.5, 3, 0, None, None, None]
    assert [row.difficulty_text for row in rows] == ["4.5", "3", "0.0", "8.0+", "", "nan"]


def test_lines_may_end_in_crlf_and_start_with_a_byte_order_mark(tmp_path):
    first = b"\xef\xbb\xbf" + json.dumps(good(note={"a": None, "b": 1.5}, source="web")).encode()
    rows = load(tmp_path, write(tmp_path, first, "", good(id="2"), end=b"\r\n"))
    assert [(row.id, row.origin) for row in rows] == [("1", ("a.jsonl", 1)), ("2", ("a.jsonl", 3))]
    assert (rows[0].extra, rows[0].source, rows[0].style) == ({"note": {"b": 1.5}}, "web", "rule")
    facts = rows.files["a.jsonl"]
    assert (facts.rows, facts.blank_lines, facts.unknown_columns) == (2, 1, {"note"})
    assert facts.columns["id"] == {"str": 2} and facts.size == (tmp_path / "a.jsonl").stat().st_size


def test_messages_win_over_prompt_and_parts_are_joined(tmp_path):
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    rows = load(tmp_path, write(tmp_path, good(messages=parts), good(id="2", messages=json.dumps(parts)), good(id="3")))
    assert [row.messages for row in rows] == [(Message("user", "ab"),)] * 2 + [(Message("user", GOOD["prompt"]),)]
    assert rows[0].extra["prompt"] == GOOD["prompt"]


def test_tags_find_their_domain(tmp_path):
    tags = ["math_rule", "deepmath_103k", "openai/gsm8k", "aime2031"]
    rows = load(
        tmp_path, write(tmp_path, *(good(id=t, tag=t) for t in tags), good(id="d", tag="odd", domain="math_rule"))
    )
    assert {row.domain for row in rows} == {"math_rule"} and [row.tag for row in rows] == [*tags, "odd"]
    with pytest.raises(ValueError, match=r"got tag 'x' in rewards\.a\.tag_included and rewards\.b\.tag_included"):
        load(tmp_path, "a.jsonl", domains={"a": DomainSpec(tags=("x",)), "b": DomainSpec(tags=("x",))})


def test_an_own_reward_function_needs_neither_domain_nor_reference(tmp_path):
    name = write(tmp_path, good(tag="mine", ground_truth=MISSING), good(id="2", tag="KodCode", ground_truth="x"))
    rows = load(tmp_path, name, custom_reward=True, scorers=())
    assert [(row.domain, row.ground_truth) for row in rows] == [("custom", None), ("code_sandbox", "x")]


def test_missing_ids_may_be_lines_and_samples_may_be_limited(tmp_path):
    name = write(tmp_path, *(good(id=MISSING) for _ in range(4)))
    assert [row.id for row in load(tmp_path, name, missing_id="line")] == [f"a.jsonl:{i}" for i in (1, 2, 3, 4)]
    assert len(load(tmp_path, name, missing_id="line", max_samples=3)) == 3


def test_parquet_rows_of_the_verl_form(tmp_path):
    rows = load(
        tmp_path,
        write_parquet(tmp_path, [verl(), verl(extra_info={"index": 9.0, "difficulty": "4+", "note": {"k": 1}})]),
    )
    assert [row.id for row in rows] == ["0", "9"]
    first, second = rows
    assert (first.tag, first.domain, first.ground_truth, first.ability) == ("openai/gsm8k", "math_rule", "7", "math")
    assert first.messages == (Message("user", "3 + 4?"),) and first.origin == ("a.parquet", 1)
    assert first.extra == {"extra_info": {"index": 0, "split": "train"}}  # keys of other rows leave no None behind
    assert (second.difficulty, second.difficulty_text) == (None, "4+")
    bare = [verl(extra_info=MISSING), verl(extra_info=MISSING)]
    assert [row.id for row in load(tmp_path, write_parquet(tmp_path, bare))] == ["1", "2"]


def test_another_prompt_column(tmp_path):
    name = write_parquet(tmp_path, [verl(question="x", prompt=USER)])
    assert load(tmp_path, name, prompt_key="question")[0].messages == (Message("user", "x"),)


def test_parquet_list_and_json_string_give_equal_rows(tmp_path):
    conversation = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Wie groß ist π?"}]
    as_list = good(messages=conversation, prompt=MISSING)
    as_text = good(messages=json.dumps(conversation), prompt=MISSING)
    write(tmp_path, as_list, name="list.jsonl")
    write(tmp_path, as_text, name="text.jsonl")
    write_parquet(tmp_path, [as_list], "list.parquet")
    write_parquet(tmp_path, [as_text], "text.parquet")
    write_parquet(tmp_path, [verl(prompt=conversation)], "verl.parquet")
    loaded = [
        load(tmp_path, n)[0] for n in ("list.jsonl", "text.jsonl", "list.parquet", "text.parquet", "verl.parquet")
    ]
    assert {row.messages for row in loaded} == {tuple(Message(**m) for m in conversation)}
    assert len({(row.id, row.tag, row.ground_truth) for row in loaded[:4]}) == 1


def test_every_sample_file_loads_alone_and_mixed():
    if not DATA.is_dir():
        pytest.skip("the sample data is not beside this checkout")
    domains = {
        **DOMAINS,
        "math_rule": DomainSpec(tags=("deepmath_103k", "MATH-500")),
        "llm_judge": DomainSpec(tags=("RLVR",)),
    }
    names = sorted(path.name for path in DATA.glob("*.jsonl"))
    alone = [load(DATA, name, domains=domains) for name in names]
    mixed = load(DATA, *names, domains=domains)
    assert list(mixed) == [row for rows in alone for row in rows] and len(mixed) == 164
    assert {row.domain for row in mixed} == {"math_rule", "code_sandbox", "ifeval", "crossthinkqa", "llm_judge"}
    assert mixed.files["math500_aime_60.jsonl"].columns["difficulty"] == {"float": 60}
    code = [row for row in mixed if row.domain == "code_sandbox"]
    assert {row.case_type for row in code} == {"pytest", "assert", "stdin"} and all(row.cases for row in code)
