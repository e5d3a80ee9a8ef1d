"""Token ids of many rows: from several processes, and from the cache of an earlier start."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.trainer.prompt_bench import ENCODER, TOKENIZER, rows_of, source
from trainer.prompts import DataError, Message, PromptEncoder, Row, encoding
from trainer.prompts.encoding import encode_rows
from trainer.prompts.errors import FieldProblem

BAD = Row("T", "t", "math_rule", (Message("user", "q"), Message("tool", "x")), "7", origin=("a.jsonl", 9))


@pytest.mark.slow  # each process imports transformers
@pytest.mark.gloo
def test_several_processes_give_the_same_ids_and_problems_in_order(monkeypatch):
    monkeypatch.setattr(encoding, "CHUNK", 2)
    rows = [Row(str(i), "t", "math_rule", (Message("user", "q" * i),)) for i in range(5)] + [BAD]
    *ids, problem = encode_rows(rows, ENCODER, workers=2)
    assert ids == [ENCODER.encode(row.messages) for row in rows[:5]]
    assert isinstance(problem, FieldProblem) and (problem.code, problem.got) == ("D31", "no tools here")
    with pytest.raises(DataError, match=r"^\[D31\] a\.jsonl:9 field 'messages': got no tools here; "):
        source(rows, workers=2)


class Counting(PromptEncoder):
    """Counts what really went through the tokenizer."""

    calls = 0

    def encode(self, messages, tag=""):
        self.calls += 1
        return super().encode(messages, tag)


def read(cache: Path, rows: list[Row], **options) -> tuple[list, int]:
    encoder = Counting(TOKENIZER, **options)
    return list(encode_rows(rows, encoder, cache_dir=cache)), encoder.calls


def test_ids_are_kept_under_a_key_of_rows_tokenizer_and_template(tmp_path):
    rows = [Row(str(i), "t", "math_rule", (Message("user", "q" * (3 - i)),)) for i in range(3)]
    first, calls = read(tmp_path / "cache", rows)
    assert calls == 3 and first == [ENCODER.encode(row.messages) for row in rows]
    assert read(tmp_path / "cache", rows) == (first, 0)
    assert read(tmp_path / "cache", rows[::-1])[1] == 3
    assert read(tmp_path / "cache", rows, default_system="d")[1] == 3
    assert read(tmp_path / "cache", [replace(row, tag="other") for row in rows])[1] == 3
    assert len(list((tmp_path / "cache").iterdir())) == 4


def test_a_damaged_file_is_written_again_and_rows_with_problems_are_not_kept(tmp_path, caplog):
    read(tmp_path, rows_of(2))
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:100])
    assert read(tmp_path, rows_of(2))[1] == 2 and "is damaged" in caplog.text
    with np.load(path) as stored:
        assert stored["lengths"].tolist() == [5, 5]
    path.unlink()
    read(tmp_path, [BAD])
    assert list(tmp_path.iterdir()) == []


def test_prompts_come_from_the_cache(tmp_path, monkeypatch):
    expected = source(rows_of(4), cache_dir=tmp_path).next(4)
    monkeypatch.setattr(PromptEncoder, "encode", lambda *_: pytest.fail("tokenised again"))
    assert source(rows_of(4), cache_dir=tmp_path).next(4) == expected
