"""What is in the data, before any training: data_report.json, length_hist.csv and length_hist.png."""

from __future__ import annotations

import csv
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from trainer.prompts.cursor import PromptSource
from trainer.prompts.rows import RowList

BUCKET = 1024  # tokens per histogram bar


def build_report(rows: RowList, source: PromptSource, bucket: int = BUCKET) -> dict[str, Any]:
    """The schema report as a JSON-able dict."""
    examples: dict[str, str] = {}
    for row in source.rows:
        if row.tag not in examples:
            examples[row.tag] = source.encoder.render(source.encoder.encode(row.messages))
    return {
        "files": {
            name: {
                "rows": facts.rows,
                "blank_lines": facts.blank_lines,
                "duplicates_dropped": facts.duplicates_dropped,
                "columns": {column: dict(types) for column, types in facts.columns.items()},
                "unknown_columns": sorted(facts.unknown_columns),
                **facts.fingerprint,
            }
            for name, facts in rows.files.items()
        },
        "rows_per_tag": dict(Counter(row.tag for row in rows)),
        "rows_per_domain": dict(Counter(row.domain for row in rows)),
        "kept": len(source),
        "filtered": {"overlong": dict(source.overlong)},
        "prompt_tokens": _statistics(source.lengths),
        "length_histogram": {str(edge): count for edge, count in length_histogram(source.lengths, bucket)},
        "examples": examples,
    }


def _statistics(lengths: list[int]) -> dict[str, float]:
    return {
        "min": min(lengths),
        "mean": float(np.mean(lengths)),
        "p50": float(np.percentile(lengths, 50)),
        "p95": float(np.percentile(lengths, 95)),
        "max": max(lengths),
    }


def length_histogram(lengths: list[int], bucket: int = BUCKET) -> list[tuple[int, int]]:
    """(upper edge, rows) with edge = bucket * ceil(length / bucket), gaps included."""
    counts = Counter(-(-length // bucket) for length in lengths)
    return [(place * bucket, counts[place]) for place in range(min(counts), max(counts) + 1)]


def write_report(run_dir: str | Path, rows: RowList, source: PromptSource, bucket: int = BUCKET) -> dict[str, Any]:
    """Write the three files into `run_dir` and return the report."""
    folder = Path(run_dir)
    folder.mkdir(parents=True, exist_ok=True)
    report = build_report(rows, source, bucket)
    (folder / "data_report.json").write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    histogram = length_histogram(source.lengths, bucket)
    with (folder / "length_hist.csv").open("w", newline="", encoding="utf-8") as stream:
        csv.writer(stream).writerows([("up_to_tokens", "rows"), *histogram])
    _plot(source.lengths, folder / "length_hist.png")
    return report


def _plot(lengths: list[int], path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.hist(lengths, bins=min(40, max(5, len(set(lengths)))), color="#4c72b0", edgecolor="white")
    axes.set(xlabel="prompt tokens", ylabel="rows", title=f"Prompt lengths ({len(lengths)} rows)")
    figure.savefig(path, dpi=120)
