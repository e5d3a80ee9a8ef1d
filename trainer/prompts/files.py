"""Stream records out of JSONL and parquet files, one at a time, with the place of every problem."""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from trainer.prompts.errors import FieldProblem, Problems, kind

BOM = b"\xef\xbb\xbf"
GOLD_COLUMNS = {"ground_truth", "test_cases", "instruction_id_list"}
CHUNK = 1 << 20  # bytes read at a time while skipping a line that is too long


@dataclass
class FileFacts:
    """What was found in one file; `columns` maps a name to the count of each JSON type."""

    name: str
    path: Path
    size: int = 0
    sha256: str = ""
    rows: int = 0
    blank_lines: int = 0
    duplicates_dropped: int = 0
    columns: dict[str, Counter[str]] = field(default_factory=dict)
    unknown_columns: set[str] = field(default_factory=set)

    @property
    def fingerprint(self) -> dict[str, Any]:
        return {"size": self.size, "rows": self.rows, "sha256": self.sha256}

    def note(self, record: dict[str, Any]) -> None:
        for name, value in record.items():
            self.columns.setdefault(name, Counter())[kind(value)] += 1


class SourceFloat(float):
    """A JSON number with a point or exponent that remembers how it was written: 1.50 stays `1.50`."""

    text: str

    def __new__(cls, text: str) -> SourceFloat:
        value = super().__new__(cls, text)
        if not math.isfinite(value):
            raise _not_finite(text)
        value.text = text
        return value


def parse_json(text: str) -> Any:
    """Strict JSON: no NaN, no repeated keys, numbers keep their text. JSONDecodeError or FieldProblem."""
    return json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse_constant, parse_float=SourceFloat)


def plain(value: Any) -> Any:
    """Without SourceFloat and, at every depth, without keys whose value is None."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [plain(item) for item in value]
    return float(value) if isinstance(value, SourceFloat) else value


def read_jsonl(facts: FileFacts, max_line_bytes: int, problems: Problems) -> Iterator[tuple[int, dict[str, Any]]]:
    """(1-based line, object) of every good line; bad lines go to `problems`."""
    with facts.path.open("rb") as stream:
        if stream.read(len(BOM)) != BOM:
            stream.seek(0)
        number = 0
        while True:
            offset = stream.tell()
            line = stream.readline(max_line_bytes + 1)
            if not line:
                return
            number += 1
            if len(line.rstrip(b"\r\n")) > max_line_bytes or (len(line) > max_line_bytes and line[-1:] != b"\n"):
                problems.add(_too_long(stream, line, max_line_bytes), facts.name, number)
            elif not line.strip():
                facts.blank_lines += 1
            else:
                try:
                    record = _decode(line, offset)
                except FieldProblem as problem:
                    facts.rows += 1
                    problems.add(problem, facts.name, number)
                    continue
                yield number, record


def _decode(line: bytes, offset: int) -> dict[str, Any]:
    try:
        text = line.rstrip(b"\r\n").decode("utf-8")
    except UnicodeDecodeError as error:
        got = f"byte 0x{line[error.start]:02x} at offset {offset + error.start}"
        raise FieldProblem("D04", None, got, "UTF-8", "Convert with iconv") from None
    try:
        record = parse_json(text)
    except json.JSONDecodeError as error:
        got = f"{error.msg} at column {error.colno}"
        raise FieldProblem("D05", None, got, "one JSON object a line", "Mend or delete the line") from None
    if not isinstance(record, dict):
        raise FieldProblem("D06", None, kind(record), "object", "Wrap the values in field names")
    return record


def _too_long(stream: BinaryIO, line: bytes, limit: int) -> FieldProblem:
    """Count the rest of the line without holding it."""
    size = len(line.rstrip(b"\r\n"))
    while line and line[-1:] != b"\n":
        line = stream.readline(CHUNK)
        size += len(line.rstrip(b"\r\n"))
    return FieldProblem("D07", None, f"{size} bytes", f"<= {limit}", "Raise the limit or split the row")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) < len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise FieldProblem("D08", None, f"key '{twice}' twice", "unique keys", "Delete one")
    return record


def _refuse_constant(text: str) -> None:
    raise _not_finite(text)


def _not_finite(text: str) -> FieldProblem:
    return FieldProblem("D09", None, text, "a finite number or a string", "Quote it")


def read_parquet(
    facts: FileFacts, prompt_key: str, reward_fn_key: str, custom_reward: bool, problems: Problems
) -> Iterator[tuple[int, dict[str, Any]]]:
    """(1-based row, plain python dict without null keys); a bad file or schema goes to `problems`."""
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(facts.path) as file:
            problem = _schema_problem(file.schema_arrow, prompt_key, reward_fn_key, custom_reward)
            if problem is not None:
                facts.rows = file.metadata.num_rows
                problems.add(problem, facts.name)
                return
            for batch in file.iter_batches(batch_size=256):
                for record in batch.to_pylist():
                    number += 1
                    yield number, plain(record)
    except (pyarrow.ArrowException, OSError) as error:
        facts.rows = max(facts.rows, 1)  # a broken file is not an empty one
        problems.add(_unusable(None, str(error)), facts.name)


def _schema_problem(schema: Any, prompt_key: str, reward_fn_key: str, custom_reward: bool) -> FieldProblem | None:
    import pyarrow.types as types

    nested = {field.name: _children(field.type) for field in schema}
    names = set(nested)
    has_gold = "ground_truth" in nested.get("reward_model", []) or names & GOLD_COLUMNS or custom_reward
    if not (names & {reward_fn_key, "tag"} and names & {prompt_key, "messages"} and has_gold):
        found = sorted(full for name in nested for full in [f"{name}.{c}" for c in nested[name]] or [name])
        expected = f"{reward_fn_key}, {prompt_key}, reward_model.ground_truth"
        return FieldProblem("D26", None, f"columns {', '.join(found)}", expected, "Rename, or set data.prompt_key")
    column = "messages" if "messages" in names else prompt_key
    dtype = schema.field(column).type
    text = types.is_string(dtype) or types.is_large_string(dtype) or types.is_null(dtype)
    if text or ((types.is_list(dtype) or types.is_large_list(dtype)) and types.is_struct(dtype.value_type)):
        return None
    return _unusable(column, f"column of type {dtype}")


def _children(dtype: Any) -> list[str]:
    import pyarrow.types as types

    return [dtype.field(i).name for i in range(dtype.num_fields)] if types.is_struct(dtype) else []


def _unusable(column: str | None, got: str) -> FieldProblem:
    return FieldProblem("D27", column, got, "list<struct<role, content>> or string", "Rewrite the file")


def fingerprint(facts: FileFacts) -> None:
    """Fill in size and SHA-256. Raises OSError."""
    facts.size = facts.path.stat().st_size
    with facts.path.open("rb") as stream:
        facts.sha256 = hashlib.file_digest(stream, "sha256").hexdigest()
