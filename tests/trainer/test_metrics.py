import csv
import json
import math
from pathlib import Path

from engines.metric import Metric, merge, over_optimizer_steps
from trainer.report.metrics import LEADING_COLUMNS, CsvLog, MetricLog


def _read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_every_row_has_the_same_columns_also_when_one_appears_later(tmp_path):
    log = CsvLog(tmp_path / "metrics.csv", 0)
    log.write({"training/global_step": 0, "val_correct/all/mean": 0.25})
    log.write({"training/global_step": 1, "b": 1e-7, "a": 3.0})
    log.write({"training/global_step": 2, "a": 4.0})
    rows = _read(tmp_path / "metrics.csv")
    assert [list(row) for row in rows] == [[*LEADING_COLUMNS, "b", "a"]] * 3
    assert rows[1]["b"] == "1e-07" and rows[1]["a"] == "3" and rows[1]["val_correct/all/mean"] == ""
    assert log.column("val_correct/all/mean") == [(0, 0.25)]


def test_a_resumed_log_drops_the_rows_that_will_be_written_again(tmp_path):
    log = CsvLog(tmp_path / "metrics.csv", 0)
    for step in range(5):
        log.write({"training/global_step": step, "x": float(step)})
    log = CsvLog(tmp_path / "metrics.csv", 2)
    assert log.steps == {0, 1, 2}
    log.write({"training/global_step": 3, "x": 33.0})
    assert [row["x"] for row in _read(tmp_path / "metrics.csv")] == ["0", "1", "2", "33"]


def test_aliases_tensorboard_jsonl_and_the_curve(tmp_path):
    log = MetricLog(tmp_path, ("console", "tensorboard", "jsonl"), 0)
    for step in (1, 2):
        row = log.write({"training/global_step": step, "critic/score/mean": 0.5 * step, "actor/loss": 0.1})
    log.close()
    assert row["reward/mean"] == 1.0 and row["train/loss"] == 0.1
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["reward/mean"] for line in lines] == [0.5, 1.0]
    assert list((tmp_path / "tensorboard").glob("events*"))
    assert log.plot().stat().st_size > 5000


def test_a_resumed_jsonl_has_every_step_once_and_is_valid_json(tmp_path):
    for resume_step, steps in ((0, (0, 1, 2, 3)), (2, (3, 4))):
        log = MetricLog(tmp_path, ("jsonl",), resume_step)
        for step in steps:
            log.write({"training/global_step": step, "x": math.nan})
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["training/global_step"] for row in rows] == [0, 1, 2, 3, 4] and rows[0]["x"] is None


def test_metrics_merge_by_their_own_kind():
    ranks = [
        {"p": Metric("partial", 0.25), "m": Metric("mean", 6.0, 3), "x": Metric("max", 1.0), "c": Metric("count", 1)},
        {"p": Metric("partial", 0.5), "m": Metric("mean", 2.0, 1), "x": Metric("max", 7.0), "c": Metric("count", 2)},
        {"m": Metric("mean", 0.0, 0)},
    ]
    merged = merge(ranks)
    assert {name: metric.value for name, metric in merged.items()} == {"p": 0.75, "m": 2.0, "x": 7.0, "c": 3}
    steps = over_optimizer_steps([merged, {"p": Metric("partial", 0.25), "c": Metric("count", 1)}])
    assert steps["p"].value == 0.5 and steps["c"].value == 4
