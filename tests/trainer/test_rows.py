"""Reading rows: types, both formats, and the whole text of every message."""

import json
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from trainer.prompts import DataError, Message, load_rows
from trainer.reward import DomainSpec
from trainer.reward.spec import KNOWN_DOMAINS

DATA = Path(__file__).parents[2] / "../shared/data"
DOMAINS = {"math_rule": DomainSpec(tags=("deepmath_103k",)), "code_sandbox": DomainSpec(tags=("KodCode",))}
GOOD = {"id": "1", "prompt": "What is 3 + 4?", "tag": "math_rule", "ground_truth": "7"}
USER = [{"role": "user", "content": "hi"}]
MISSING = object()


def good(**changes) -> dict:
    return {key: value for key, value in {**GOOD, **changes}.items() if value is not MISSING}


def write(folder: Path, *lines: dict | str | bytes, name: str = "a.jsonl", end: bytes = b"\n") -> str:
    encoded = [
        line if isinstance(line, bytes) else (line if isinstance(line, str) else json.dumps(line)).encode()
        for line in lines
    ]
    (folder / name).write_bytes(b"".join(line + end for line in encoded))
    return name


def load(folder: Path, *names: str, **options):
    options = {"domains": DOMAINS, "scorers": KNOWN_DOMAINS, **options}
    return load_rows(list(names), dataset_dir=folder, **options)


def message(folder: Path, *names: str, **options) -> str:
    with pytest.raises(DataError) as caught:
        load(folder, *names, **options)
    return str(caught.value)


# ruff: noqa: E501  messages stand here as users see them, on one line
LINES = [  # raw line, message; the row before it is 80 bytes and a line end
    (b'{"id": "\xff"}', "[D04] a.jsonl:2: got byte 0xff at offset 89; expected UTF-8. Convert with iconv"),
    ('{"id": "1"', "[D05] a.jsonl:2: got Expecting ',' delimiter at column 11; expected one JSON object a line. Mend or delete the line"),
    ("[1]", "[D06] a.jsonl:2: got list; expected object. Wrap the values in field names"),
    ('{"a": {"tag": 1, "tag": 2}}', "[D08] a.jsonl:2: got key 'tag' twice; expected unique keys. Delete one"),
    ('{"a": NaN}', "[D09] a.jsonl:2: got NaN; expected a finite number or a string. Quote it"),
    ('{"a": -Infinity}', "[D09] a.jsonl:2: got -Infinity; expected a finite number or a string. Quote it"),
    ('{"a": 1e999}', "[D09] a.jsonl:2: got 1e999; expected a finite number or a string. Quote it"),
]  # fmt: skip


@pytest.mark.parametrize(("line", "expected"), LINES)
def test_lines_that_are_no_rows(tmp_path, line, expected):
    assert message(tmp_path, write(tmp_path, good(id="0"), line)) == expected


TRUTH = "non-empty answer text (LaTeX or plain)"
CODE = {"tag": "KodCode", "case_type": "stdin", "test_cases": [{"stdin": "1", "expected_stdout": "2"}]}
IFEVAL = {"tag": "ifeval", "ground_truth": {"instruction_id_list": ["a", "b", "c"], "kwargs": [{}, {}]}}
FIELDS = [  # changed fields, message
    (dict(tag=MISSING), "[D10] {} field 'tag': got missing; expected string. Add the field"),
    (dict(tag=None), "[D10] {} field 'tag': got null; expected string. Add the field"),
    (dict(tag="  "), "[D10] {} field 'tag': got blank; expected string. Add the field"),
    (dict(tag=3), "[D10] {} field 'tag': got int; expected string. Add the field"),
    (dict(tag="kodcod"), "[D11] {} field 'tag': got 'kodcod'; expected one of KodCode, code_sandbox, deepmath_103k, math_rule (nearest: KodCode). Fix the tag or add it to rewards.<domain>.tag_included"),
    (dict(tag="zzz"), "[D11] {} field 'tag': got 'zzz'; expected one of KodCode, code_sandbox, deepmath_103k, math_rule. Fix the tag or add it to rewards.<domain>.tag_included"),
    (dict(domain="math"), "[D11] {} field 'domain': got 'math'; expected one of choice, code_sandbox, crossthinkqa, ifeval, llm_judge, math_rule (nearest: math_rule). Fix the domain or add it to rewards.<domain>.tag_included"),
    (dict(id=MISSING), "[D12] {} field 'id': got missing; expected string or int. Add ids or set data.missing_id=line"),
    (dict(id=1.5), "[D12] {} field 'id': got float; expected string or int. Add ids or set data.missing_id=line"),
    (dict(id=True), "[D12] {} field 'id': got bool; expected string or int. Add ids or set data.missing_id=line"),
    (dict(messages="[{role"), "[D14] {} field 'messages': got Expecting property name enclosed in double quotes at column 3; expected JSON list of {{role, content}}. Write the list itself"),
    (dict(messages={"role": "user"}), "[D15] {} field 'messages': got dict; expected non-empty list. Wrap in [ ]"),
    (dict(messages=[]), "[D15] {} field 'messages': got empty list; expected non-empty list. Wrap in [ ]"),
    (dict(messages=[*USER, {"role": "bot", "content": "x"}]), "[D16] {} field 'messages': got role 'bot' in item 2; expected system, user, assistant, tool. Rename"),
    (dict(messages=[{"role": "user"}]), "[D16] {} field 'messages': got item 1 without 'content'; expected {{role, content}}. Complete the message"),
    (dict(messages=[{"content": "x"}]), "[D16] {} field 'messages': got item 1 without 'role'; expected {{role, content}}. Complete the message"),
    (dict(messages=["hi"]), "[D16] {} field 'messages': got str as item 1; expected {{role, content}}. Write an object"),
    (dict(messages=[{"role": "user", "content": 3}]), "[D16] {} field 'messages': got content of type int in item 1; expected a string or a list of {{type: text, text}}. Write the content as text"),
    (dict(messages=[*USER, {"role": "assistant", "content": "x"}]), "[D17] {} field 'messages': got assistant; expected user or tool last. Drop the stored answer"),
    (dict(messages=[{"role": "system", "content": "x"}]), "[D17] {} field 'messages': got no user message; expected user or tool last. Add the question as a user message"),
    (dict(prompt=" "), "[D18] {} field 'messages or prompt': got neither; expected one of both. Add it"),
    (dict(ground_truth=MISSING), f"[D19] {{}} field 'ground_truth': got missing; expected {TRUTH}. Add it"),
    (dict(ground_truth=""), f"[D19] {{}} field 'ground_truth': got blank; expected {TRUTH}. Add it"),
    (dict(ground_truth=["7"]), "[D20] {} field 'ground_truth': got list; expected string or number. Write the answer as text"),
    (dict(ground_truth=True), "[D20] {} field 'ground_truth': got bool; expected string or number. Write the answer as text"),
    (dict(CODE, test_cases=[{"stdin": "1", "expected_stdout": "2"}, {"stdin": ""}]), "[D21] {} field 'test_cases': got item 2 without 'expected_stdout'; expected {{stdin, expected_stdout}}. Complete the case"),
    (dict(CODE, test_cases=MISSING), "[D21] {} field 'test_cases': got missing; expected non-empty list. Complete the case"),
    (dict(CODE, test_cases="[]"), "[D21] {} field 'test_cases': got empty list; expected non-empty list. Complete the case"),
    (dict(CODE, case_type="assert"), "[D21] {} field 'test_cases': got item 1 without 'assert_code'; expected {{assert_code}}. Complete the case"),
    (dict(CODE, case_type="text"), "[D22] {} field 'case_type': got 'text'; expected pytest, assert, stdin. Change or convert the row"),
    (dict(reward_model={"style": "fuzzy"}), "[D22] {} field 'reward_model.style': got 'fuzzy'; expected rule, model. Change or convert the row"),
    (dict(reward_model={"style": "model"}), "[D22] {} field 'reward_model.style': got 'model' in domain math_rule; expected rule, or a row of llm_judge. Change or convert the row"),
    (dict(tag="choice", ground_truth="Paris"), "[D23] {} field 'ground_truth': got 'Paris'; expected one letter A-J. Map the option to its letter"),
    (dict(IFEVAL), "[D24] {} field 'ground_truth': got 3 ids, 2 kwargs; expected equal length. Add {{}} for ids without arguments"),
    (dict(tag="ifeval", ground_truth="{}"), "[D19] {} field 'ground_truth': got no instructions; expected {{instruction_id_list, kwargs}}. Add it"),
    (dict(difficulty=[1]), "[D25] {} field 'difficulty': got list; expected string, int or float. Change it"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "expected"), FIELDS)
def test_fields_out_of_order(tmp_path, changes, expected):
    name = write(tmp_path, good(id="0"), "", good(**changes))
    assert message(tmp_path, name) == expected.format("a.jsonl:3")


def test_files_out_of_order(tmp_path):
    assert message(tmp_path, "none.jsonl") == (
        f"[D01] none.jsonl: got No such file or directory; expected a readable .jsonl or .parquet file under "
        f"data.dataset_dir={tmp_path}. Check data.train_files"
    )
    assert message(tmp_path, "a.jsonl,b.jsonl", files_key="data.val_files") == (
        "[D01] a.jsonl,b.jsonl: got names joined by commas; expected a list. Write data.val_files=[a.jsonl,b.jsonl]"
    )
    write(tmp_path, GOOD, name="a.csv")
    assert message(tmp_path, "a.csv") == "[D02] a.csv: got .csv; expected .jsonl or .parquet. Convert the file"
    assert message(tmp_path, ".") == "[D02] .: got a folder; expected .jsonl or .parquet. Name the files in it"
    empty = "[D03] {}: got 0 rows; expected at least 1. Fill the file or remove it from the list"
    assert message(tmp_path, write(tmp_path, name="e.jsonl")) == empty.format("e.jsonl")
    assert message(tmp_path, write(tmp_path, "", " ", name="b.jsonl")) == empty.format("b.jsonl")
    pq.write_table(pa.Table.from_pylist([GOOD]).slice(0, 0), tmp_path / "e.parquet")
    assert message(tmp_path, "e.parquet") == empty.format("e.parquet")


def test_a_line_that_is_too_long_is_counted_and_skipped(tmp_path):
    name = write(tmp_path, good(id="0"), b"x" * 3_000_000, good(id="2", tag="zz"))
    first, second = message(tmp_path, name, max_line_bytes=100).splitlines()
    assert first == "[D07] a.jsonl:2: got 3000000 bytes; expected <= 100. Raise the limit or split the row"
    assert second.startswith("[D11] a.jsonl:3 ")
    exact = len(json.dumps(good()))
    assert len(load(tmp_path, write(tmp_path, good()), max_line_bytes=exact)) == 1
    assert "D07" in message(tmp_path, "a.jsonl", max_line_bytes=exact - 1)


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


def test_domains_without_scorer_are_named_once_per_tag(tmp_path):
    name = write(tmp_path, good(id="m"), *(good(id=str(i), **CODE) for i in range(3)))
    assert message(tmp_path, name, scorers=("math_rule",)) == (
        "[D33] a.jsonl field 'tag': got 'KodCode' of domain code_sandbox, which has no scorer; expected a domain with "
        "a scorer: math_rule. Remove these rows or set reward.custom_reward_function.path"
    )


def test_all_problems_are_reported_together_up_to_the_limit(tmp_path):
    a = write(tmp_path, *(good(id=str(i), tag=None, difficulty=[]) for i in range(3)))
    b = write(tmp_path, "[]", name="b.jsonl")
    lines = message(tmp_path, a, b, "gone.jsonl").splitlines()
    assert [line.split()[0] for line in lines] == ["[D10]", "[D25]"] * 3 + ["[D06]", "[D01]"]
    cut = message(tmp_path, a, b, max_reported_errors=2).splitlines()
    assert cut == [*lines[:2], "... and 5 more (data.max_reported_errors)"]


def test_a_long_value_is_cut(tmp_path):
    text = message(tmp_path, write(tmp_path, good(tag="x" * 200)))
    assert f"got '{'x' * 76}...; expected" in text


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


def verl(**changes) -> dict:
    row = {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": "3 + 4?"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "7"},
        "extra_info": {"index": 0, "split": "train"},
    }
    return {key: value for key, value in {**row, **changes}.items() if value is not MISSING}


def write_parquet(folder: Path, rows: list[dict], name: str = "a.parquet") -> str:
    pq.write_table(pa.Table.from_pylist(rows), folder / name)
    return name


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


def test_parquet_out_of_order(tmp_path):
    name = write_parquet(tmp_path, [verl(data_source=MISSING, reward_model={"style": "rule"}, extra_info=MISSING)])
    assert message(tmp_path, name) == (
        "[D26] a.parquet: got columns ability, prompt, reward_model.style; expected data_source, prompt, "
        "reward_model.ground_truth. Rename, or set data.prompt_key"
    )
    assert (
        load(tmp_path, write_parquet(tmp_path, [verl(question="x", prompt=USER)]), prompt_key="question")[0]
        .messages[0]
        .content
        == "x"
    )
    unusable = "expected list<struct<role, content>> or string. Rewrite the file"
    name = write_parquet(tmp_path, [verl(prompt=3)])
    assert message(tmp_path, name) == f"[D27] a.parquet field 'prompt': got column of type int64; {unusable}"
    (tmp_path / "b.parquet").write_bytes(b"PAR1 no parquet at all")
    broken = message(tmp_path, "b.parquet")
    assert broken.startswith("[D27] b.parquet: got ") and broken.endswith(f"; {unusable}") and "Parquet" in broken
    name = write_parquet(tmp_path, [verl(), verl(data_source=None, extra_info={"index": 1})])
    assert (
        message(tmp_path, name) == "[D10] a.parquet:2 field 'data_source': got missing; expected string. Add the field"
    )


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


def test_a_bad_last_line_of_a_large_file_is_found_in_little_memory(tmp_path):
    big = json.dumps(good(id="{}", note="x" * 1_000_000)).replace('"{}"', "%d")
    with (tmp_path / "big.jsonl").open("w") as stream:
        for i in range(150):
            stream.write(big % i + "\n")
        stream.write("oops\n")
    code = f"""
import resource
from trainer.prompts import DataError, load_rows
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    load_rows(["big.jsonl"], dataset_dir={str(tmp_path)!r}, domains={{}})
except DataError as error:
    print(error, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024, sep="|")
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[2])
    text, grown = run.stdout.strip().split("|")
    assert text.startswith("[D05] big.jsonl:151: got Expecting value at column 1"), run.stderr
    assert int(grown) < 60  # MiB, for a file of 143
