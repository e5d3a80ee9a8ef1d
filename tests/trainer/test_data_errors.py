"""Every data error, the whole text of each."""

import json
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.trainer.data_bench import GOOD, MISSING, USER, good, load, message, verl, write, write_parquet
from tests.trainer.prompt_bench import rows_of, source
from trainer.prompts import DataError, Message, Row

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


def empty_parquet(folder: Path) -> str:
    pq.write_table(pa.Table.from_pylist([GOOD]).slice(0, 0), folder / "e.parquet")
    return "e.parquet"


def broken_parquet(folder: Path) -> str:
    (folder / "b.parquet").write_bytes(b"PAR1 no parquet at all")
    return "b.parquet"


FILES = {  # name -> (files written into a folder, options, message)
    "missing": (lambda folder: "none.jsonl", {}, "[D01] none.jsonl: got No such file or directory; expected a readable .jsonl or .parquet file under data.dataset_dir={folder}. Check data.train_files"),
    "joined by commas": (lambda folder: "a.jsonl,b.jsonl", {"files_key": "data.val_files"}, "[D01] a.jsonl,b.jsonl: got names joined by commas; expected a list. Write data.val_files=[a.jsonl,b.jsonl]"),
    "suffix": (lambda folder: write(folder, GOOD, name="a.csv"), {}, "[D02] a.csv: got .csv; expected .jsonl or .parquet. Convert the file"),
    "folder": (lambda folder: ".", {}, "[D02] .: got a folder; expected .jsonl or .parquet. Name the files in it"),
    "0 bytes": (lambda folder: write(folder), {}, "[D03] a.jsonl: got 0 rows; expected at least 1. Fill the file or remove it from the list"),
    "blank lines only": (lambda folder: write(folder, "", " "), {}, "[D03] a.jsonl: got 0 rows; expected at least 1. Fill the file or remove it from the list"),
    "parquet without rows": (empty_parquet, {}, "[D03] e.parquet: got 0 rows; expected at least 1. Fill the file or remove it from the list"),
    "cut last line": (lambda folder: write(folder, '{"id": "1", "tag": "mat', end=b""), {}, "[D05] a.jsonl:1: got Unterminated string starting at at column 20; expected one JSON object a line. Mend or delete the line"),
    "long line": (lambda folder: write(folder, good(id="0"), b"x" * 33_554_440), {}, "[D07] a.jsonl:2: got 33554440 bytes; expected <= 16777216. Raise the limit or split the row"),
    "id twice": (lambda folder: write(folder, good(id=7), good(id="8"), good(id="7", prompt="other")), {}, "[D13] a.jsonl:3 field 'id': got '7', first seen at a.jsonl:1; expected unique id per tag. Rename, or set data.duplicate_ids=first"),
    "null in a parquet column": (lambda folder: write_parquet(folder, [verl(), verl(data_source=None, extra_info={"index": 1})]), {}, "[D10] a.parquet:2 field 'data_source': got missing; expected string. Add the field"),
    "columns": (lambda folder: write_parquet(folder, [verl(data_source=MISSING, reward_model={"style": "rule"}, extra_info=MISSING)]), {}, "[D26] a.parquet: got columns ability, prompt, reward_model.style; expected data_source, prompt, reward_model.ground_truth. Rename, or set data.prompt_key"),
    "column type": (lambda folder: write_parquet(folder, [verl(prompt=3)]), {}, "[D27] a.parquet field 'prompt': got column of type int64; expected list<struct<role, content>> or string. Rewrite the file"),
    "broken parquet": (broken_parquet, {}, "[D27] b.parquet: got Parquet magic bytes not found in footer. Either the file is corrupted or this...; expected list<struct<role, content>> or string. Rewrite the file"),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_files_out_of_order(tmp_path, name):
    make, options, expected = FILES[name]
    assert message(tmp_path, make(tmp_path), **options) == expected.format(folder=tmp_path)


def mixed(math: int = 3, code: int = 3) -> list[Row]:
    domains = ["math_rule"] * math + ["code_sandbox"] * code
    return [
        Row(str(i), domain, domain, (Message("user", "q"),), "7", origin=("a.jsonl", i + 1))
        for i, domain in enumerate(domains)
    ]


SHARES = "expected sum 1 within 1e-6 over exactly the domains present. Fix data.domain_interleave_probs"
LONG = Row("L", "t", "math_rule", (Message("user", "x" * 554),), "7", origin=("a.jsonl", 3))
TOOL = Row("T", "t", "math_rule", (Message("user", "q"), Message("tool", "x")), "7", origin=("a.jsonl", 3))
PROMPTS = {  # name -> (rows, options of PromptSource, message)
    "sum": (mixed(), dict(domain_shares={"math_rule": 0.5, "code_sandbox": 0.4}), f"[D28] a.jsonl: got sum 0.9; {SHARES}"),
    "domain without rows": (mixed(code=0), dict(domain_shares={"math_rule": 0.5, "code_sandbox": 0.5}), f"[D28] a.jsonl: got domain 'code_sandbox' has no rows; {SHARES}"),
    "rows without share": (mixed(), dict(domain_shares={"math_rule": 1}), f"[D28] a.jsonl: got rows of 'code_sandbox' without a probability; {SHARES}"),
    "no share": (mixed(), dict(domain_shares={"math_rule": 1, "code_sandbox": "half"}), f"[D28] a.jsonl: got 'half' for 'code_sandbox'; {SHARES}"),
    "negative": (mixed(), dict(domain_shares={"math_rule": 1.5, "code_sandbox": -0.5}), f"[D28] a.jsonl: got -0.5 for 'code_sandbox'; {SHARES}"),
    "too long": ([*rows_of(2), LONG], dict(max_prompt_length=512), "[D29] a.jsonl:3: got 558 tokens; expected <= 512 (data.max_prompt_length). Filter, truncate or raise the limit"),
    "too few": (rows_of(3), dict(batch_size=4), "[D30] a.jsonl: got 3 rows, train_batch_size 4, 0 steps; expected at least 4. Add data or lower the batch"),
    "template": ([*rows_of(2), TOOL], {}, "[D31] a.jsonl:3 field 'messages': got no tools here; expected a renderable conversation. Choose data.template"),
    "nothing left": (rows_of(812, "x" * 99), dict(filter_overlong=True), "[D32] a.jsonl: got kept 0 of 812 (overlong 812); expected at least one batch. Raise data.max_prompt_length"),
}  # fmt: skip


@pytest.mark.parametrize("name", PROMPTS)
def test_prompts_out_of_order(name):
    rows, options, expected = PROMPTS[name]
    with pytest.raises(DataError) as caught:
        source(rows, **options)
    assert str(caught.value) == expected


def test_every_code_has_its_message_here():
    messages = [expected for table in (LINES, FIELDS) for *_, expected in table]
    messages += [expected for table in (FILES, PROMPTS) for *_, expected in table.values()]
    assert {text[1:4] for text in messages} == {f"D{number:02}" for number in range(1, 33)}


def test_a_line_that_is_too_long_is_counted_and_skipped(tmp_path):
    name = write(tmp_path, good(id="0"), b"x" * 3_000_000, good(id="2", tag="zz"))
    first, second = message(tmp_path, name, max_line_bytes=100).splitlines()
    assert first == "[D07] a.jsonl:2: got 3000000 bytes; expected <= 100. Raise the limit or split the row"
    assert second.startswith("[D11] a.jsonl:3 ")
    exact = len(json.dumps(good()))
    assert len(load(tmp_path, write(tmp_path, good()), max_line_bytes=exact)) == 1
    assert "D07" in message(tmp_path, "a.jsonl", max_line_bytes=exact - 1)


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


def test_problems_of_several_sets_of_files_are_one_error():
    first, second = DataError(["a", "b"], 5), DataError(["c", "d"], 2)
    assert str(DataError.joined([first, second], 3)) == "a\nb\nc\n... and 4 more (data.max_reported_errors)"


LARGE = """
import resource, sys
from trainer.prompts import DataError, load_rows
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    load_rows(["big.jsonl"], dataset_dir=sys.argv[1], domains={})
except DataError as error:
    print(error, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024, sep="|")
"""


@pytest.mark.parametrize(
    ("lines", "line_bytes"),
    [
        (40, 1_000_000),
        pytest.param(1_000_000, 1_000, marks=pytest.mark.slow),  # 1 GB: about a minute
    ],
)
def test_a_bad_last_line_of_a_large_file_is_found_in_little_memory(tmp_path, lines, line_bytes):
    row = json.dumps(good(id=0)).replace('"id": 0', '"id": %d, "note": "%s"')
    note = "x" * (line_bytes - len(row))
    with (tmp_path / "big.jsonl").open("w") as stream:
        stream.writelines(row % (i, note) + "\n" for i in range(lines))
        stream.write("oops\n")
    size = (tmp_path / "big.jsonl").stat().st_size // 2**20
    command = [sys.executable, "-c", LARGE, str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    text, grown = run.stdout.strip().split("|")
    expected = "expected one JSON object a line. Mend or delete the line"
    assert text == f"[D05] big.jsonl:{lines + 1}: got Expecting value at column 1; {expected}", run.stderr
    assert int(grown) < max(20, size // 10), f"{grown} MiB for a file of {size}"
