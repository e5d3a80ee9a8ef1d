"""Rows on disk for tests: one good row, files of them, and the message that bad ones end in."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from trainer.prompts import DataError, load_rows
from trainer.reward import DomainSpec
from trainer.reward.spec import KNOWN_DOMAINS

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
