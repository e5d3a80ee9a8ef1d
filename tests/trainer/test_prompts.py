"""Prompts: one rendering, length rules, and a cursor that resumes exactly."""

import csv
import itertools
import json
import logging
from collections import Counter
from pathlib import Path

import matplotlib.image
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.trainer.prompt_bench import rows_of, source, uids
from trainer.prompts import (
    DataError,
    Message,
    PromptSource,
    Row,
    load_rows,
    write_report,
)
from trainer.prompts.cursor import truncate
from trainer.prompts.report import length_histogram, padding_waste, report_text


def test_truncation_of_twelve_ids_to_eight():
    ids = tuple(range(12))
    assert truncate(ids, 8, "left") == (4, 5, 6, 7, 8, 9, 10, 11)
    assert truncate(ids, 8, "right") == (0, 1, 2, 3, 4, 5, 6, 7)
    assert truncate(ids, 8, "middle") == (0, 1, 2, 3, 8, 9, 10, 11)
    assert truncate(ids, 7, "middle") == (0, 1, 2, 8, 9, 10, 11)
    assert truncate(ids, 12, "error") == ids


def test_prompts_that_are_too_long():
    rows = [*rows_of(2), Row("L", "t", "math_rule", (Message("user", "x" * 61),), "7", origin=("a.jsonl", 3))]
    with pytest.raises(DataError, match="got 65 tokens"):
        source(rows)
    assert len(source(rows, max_prompt_length=65)) == 3  # exactly at the limit stays
    filtered = source(rows, filter_overlong=True)
    assert (len(filtered), filtered.overlong) == (2, {"t": 1})
    assert source(rows, truncation="left").lengths == [5, 5, 64]


def test_equal_content_gives_equal_ids_in_every_format(tmp_path):
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Wie groß ist π?"}]
    row = {"id": "1", "tag": "math_rule", "ground_truth": "3"}
    forms = {"list": {**row, "messages": turns}, "text": {**row, "messages": json.dumps(turns)}}
    for name, form in forms.items():
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(form) + "\n", encoding="utf-8")
        pq.write_table(pa.Table.from_pylist([form]), tmp_path / f"{name}.parquet")
    ids = {
        source(load_rows([f"{name}.{suffix}"], dataset_dir=tmp_path, domains={}), batch_size=1)
        .next_batch()[0]
        .token_ids
        for name, suffix in itertools.product(forms, ("jsonl", "parquet"))
    }
    assert len(ids) == 1


def test_batches_are_full_and_the_tail_is_carried_over():
    prompts = source(rows_of(5))
    batches = [prompts.next_batch() for _ in range(5)]
    assert [len(batch) for batch in batches] == [2] * 5
    seen = [item for batch in batches for item in batch]
    for epoch in (0, 1):
        of_epoch = seen[5 * epoch : 5 * epoch + 5]
        assert Counter(item.row.id for item in of_epoch) == Counter("01234")
        assert {item.uid.rsplit("#")[-1] for item in of_epoch} == {str(epoch)}
    assert len({item.uid for item in seen}) == 10
    assert (prompts.epoch, prompts.consumed, prompts.batches_in(2)) == (1, 10, 5)


def test_the_order_depends_on_seed_and_epoch_only():
    one, two, other = source(rows_of(20)), source(rows_of(20), batch_size=4), source(rows_of(20), seed=2)
    first = [item.uid for _ in range(20) for item in one.next_batch()]
    assert first == [item.uid for _ in range(10) for item in two.next_batch()]
    assert first != [item.uid for _ in range(20) for item in other.next_batch()]
    ids = [uid.split("#")[1] for uid in first]
    assert ids[:20] != ids[20:] and sorted(ids[:20]) == sorted(ids[20:])
    plain = source(rows_of(4), shuffle=False)
    assert uids([plain.next_batch(), plain.next_batch()]) == [["t#0#0", "t#1#0"], ["t#2#0", "t#3#0"]]


def test_the_order_of_an_epoch_never_changes_between_releases():
    prompts = source(rows_of(8), seed=42)
    assert [item.row.id for _ in range(4) for item in prompts.next_batch()] == list("54271603")


def test_uids_do_not_collide():
    rows = [
        Row("b#c", "a", "math_rule", (Message("user", "q"),)),
        Row("c", "a#b", "math_rule", (Message("user", "q"),)),
    ]
    assert len({item.uid for item in source(rows).next_batch()}) == 2


@pytest.mark.parametrize(("count", "saved_after"), [(8, 0), (8, 1), (8, 4), (7, 3), (7, 4), (7, 9)])
def test_resuming_equals_an_unbroken_run(count, saved_after):
    whole = source(rows_of(count))
    expected = uids([whole.next_batch() for _ in range(saved_after + 8)])[saved_after:]
    broken = source(rows_of(count))
    for _ in range(saved_after):
        broken.next_batch()
    state = json.loads(json.dumps(broken.state_dict()))
    resumed = source(rows_of(count))
    resumed.load_state_dict(state)
    assert (resumed.epoch, resumed.consumed) == (broken.epoch, broken.consumed)
    assert uids([resumed.next_batch() for _ in range(8)]) == expected


def test_saved_at_the_end_of_an_epoch_the_next_one_follows():
    prompts = source(rows_of(8))
    for _ in range(4):
        prompts.next_batch()
    resumed = source(rows_of(8))
    resumed.load_state_dict(prompts.state_dict())
    rest = [item.uid for _ in range(4) for item in resumed.next_batch()]
    assert sorted(rest) == [f"t#{i}#1" for i in range(8)] and resumed.epoch == 1


def write_rows(path: Path, count: int, gold: str = "7") -> None:
    lines = [{"id": i, "tag": "math_rule", "prompt": "q", "ground_truth": gold} for i in range(count)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def test_changed_files_are_refused_or_restart_the_epoch(tmp_path, caplog):
    def read() -> PromptSource:
        return source(load_rows(["a.jsonl"], dataset_dir=tmp_path, domains={}))

    write_rows(tmp_path / "a.jsonl", 5)
    before = read()
    for _ in range(3):
        before.next_batch()
    state = before.state_dict()
    read().load_state_dict(state)
    write_rows(tmp_path / "a.jsonl", 5, gold="8")
    after = read()
    with pytest.raises(ValueError) as caught:
        after.load_state_dict(state)
    text = str(caught.value)
    old, new = state["files"]["a.jsonl"]["sha256"][:12], after.state_dict()["files"]["a.jsonl"]["sha256"][:12]
    assert old != new
    assert f"got data file a.jsonl with 330 bytes, 5 rows, sha256 {new}; expected 330 bytes, 5 rows, " in text
    assert f"sha256 {old} as in the checkpoint" in text
    assert "data.allow_changed_files=true" in text
    with caplog.at_level(logging.WARNING):
        after.load_state_dict(state, allow_changed_files=True)
    assert "epoch 1 starts again" in caplog.text
    assert {item.uid.rsplit("#")[-1] for _ in range(2) for item in after.next_batch()} == {"1"}
    assert after.consumed == 6 + 4


@pytest.mark.parametrize(
    "change", [dict(seed=2), dict(shuffle=False), dict(max_prompt_length=63), dict(filter_overlong=True)]
)
def test_changed_settings_are_refused_but_another_batch_size_is_not(change):
    state = source(rows_of(5)).state_dict()
    source(rows_of(5), batch_size=3).load_state_dict(state)
    with pytest.raises(ValueError, match="got data settings"):
        source(rows_of(5), **change).load_state_dict(state)


def test_validation_sees_every_row_once_and_the_same_uids_each_time():
    prompts = source(rows_of(5), shuffle=False)
    batches = list(prompts.validation_batches(2))
    assert [len(batch) for batch in batches] == [2, 2, 1]
    assert [item.row.id for batch in batches for item in batch] == list("01234")
    prompts.next_batch()
    assert uids(list(prompts.validation_batches(2))) == uids(batches)
    shuffled = [item.row.id for batch in source(rows_of(5), seed=3).validation_batches(5) for item in batch]
    assert sorted(shuffled) == list("01234") != shuffled


def test_length_histogram_buckets():
    assert length_histogram([800, 1024, 1025, 2048, 2049], 1024) == [(1024, 2), (2048, 2), (3072, 1)]
    assert length_histogram([1, 2049], 1024) == [(1024, 1), (2048, 0), (3072, 1)]
    assert padding_waste([800, 1024, 1025, 2048, 2049], 1024) == pytest.approx(1 - 6946 / 9216)
    assert padding_waste([4, 8], 4) == 0


def test_the_report_and_its_picture(tmp_path):
    write_rows(tmp_path / "a.jsonl", 4)
    long = {"id": "x", "tag": "math_rule", "prompt": "q" * 90, "ground_truth": 1.5, "difficulty": "3", "hue": None}
    with (tmp_path / "a.jsonl").open("a") as stream:
        stream.write("\n" + json.dumps(long) + "\n")
    prompts = source(load_rows(["a.jsonl"], dataset_dir=tmp_path, domains={}), filter_overlong=True)
    report = write_report(tmp_path / "run", prompts, prompts, bucket=4)["train"]
    assert json.loads((tmp_path / "run/data_report.json").read_text("utf-8"))["validation"] == report
    facts = report["files"]["a.jsonl"]
    assert (facts["rows"], facts["blank_lines"], facts["unknown_columns"]) == (5, 1, ["hue"])
    assert facts["columns"]["ground_truth"] == {"str": 4, "float": 1} and facts["columns"]["hue"] == {"null": 1}
    assert (report["rows_per_tag"], report["kept"], report["filtered"]) == (
        {"math_rule": 5},
        4,
        {"overlong": {"math_rule": 1}},
    )
    assert (facts["rows_per_tag"], facts["rows_per_domain"]) == ({"math_rule": 5}, {"math_rule": 5})
    assert report["length_histogram"] == {"8": 4} and report["padding_waste"] == 1 - 5 / 8
    assert report["prompt_tokens"] == {"min": 5, "mean": 5, "p50": 5, "p95": 5, "max": 5}
    assert report["examples"] == {"math_rule": "<s><|user|>q<|end|><|assistant|>"}
    with (tmp_path / "run/length_hist.csv").open() as stream:
        table = list(csv.reader(stream))
    assert table == [["part", "up_to_tokens", "rows"], ["train", "8", "4"], ["validation", "8", "4"]]
    pixels = matplotlib.image.imread(tmp_path / "run/length_hist.png")
    assert pixels.shape[0] > 200 and pixels[..., :3].std() > 0.05


def test_the_report_in_words(tmp_path):
    write_rows(tmp_path / "a.jsonl", 3)
    with (tmp_path / "a.jsonl").open("a") as stream:
        stream.write(
            "\n" + json.dumps({"id": "x", "tag": "math_rule", "prompt": "q" * 90, "ground_truth": 1.5, "hue": 1})
        )
    size = (tmp_path / "a.jsonl").stat().st_size
    rows = load_rows(["a.jsonl"], dataset_dir=tmp_path, domains={})
    cut = write_report(tmp_path, source(rows, truncation="right"), bucket=32)
    assert cut["train"]["truncated"] == {"math_rule": 1}
    filtered = write_report(tmp_path, source(rows, filter_overlong=True), bucket=32)
    assert (
        report_text(filtered)
        == f"""\
train data: 4 rows, 3 kept
  a.jsonl: 4 rows, 1 blank lines; {size} bytes
    id: int 3, str 1
    tag: str 4
    prompt: str 4
    ground_truth: str 3, float 1
    hue: int 1   (not a known column: kept in extra)
    by tag: math_rule 4; by domain: math_rule 4
  overlong: math_rule 1
  prompt tokens: min 5, mean 5, p50 5, p95 5, max 5
    up to 32 tokens: 3 rows
    padded to these edges, 0.8438 of all tokens would be padding
  a prompt of math_rule:
    | <s><|user|>q<|end|><|assistant|>"""
    )
