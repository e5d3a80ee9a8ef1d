"""What is in the data, before any training: data_report.json, length_hist.csv and length_hist.png."""

from __future__ import annotations

import csv
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from trainer.prompts.cursor import PromptSource
from trainer.prompts.files import FileFacts
from trainer.prompts.row import Row

BUCKET = 1024  # tokens per line of the length histogram


def build_report(source: PromptSource, bucket: int = BUCKET) -> dict[str, Any]:
    """What the files hold, what was dropped and why, prompt lengths, one rendered prompt per tag; JSON-able."""
    rows, lengths = source.loaded, source.lengths
    histogram = length_histogram(lengths, bucket)
    return {
        "files": {name: _of_file(facts, rows) for name, facts in rows.files.items()},
        "rows": len(rows),
        "rows_per_tag": dict(Counter(row.tag for row in rows)),
        "rows_per_domain": dict(Counter(row.domain for row in rows)),
        "kept": len(source),
        "filtered": {"overlong": dict(source.overlong)},
        "truncated": {tag: count for tag, count in source.truncated.items() if count},
        "prompt_tokens": {
            "min": min(lengths),
            "mean": float(np.mean(lengths)),
            "p50": float(np.percentile(lengths, 50)),
            "p95": float(np.percentile(lengths, 95)),
            "max": max(lengths),
        },
        "length_histogram": {str(edge): count for edge, count in histogram},
        "padding_waste": padding_waste(lengths, bucket),
        "examples": {tag: source.encoder.render(ids) for tag, ids in source.examples().items()},
    }


def _of_file(facts: FileFacts, rows: list[Row]) -> dict[str, Any]:
    of_file = [row for row in rows if row.origin[0] == facts.name]
    return {
        "rows": facts.rows,
        "blank_lines": facts.blank_lines,
        "duplicates_dropped": facts.duplicates_dropped,
        "columns": {column: dict(types) for column, types in facts.columns.items()},
        "unknown_columns": sorted(facts.unknown_columns),
        "rows_per_tag": dict(Counter(row.tag for row in of_file)),
        "rows_per_domain": dict(Counter(row.domain for row in of_file)),
        "size": facts.size,
        "sha256": facts.sha256,
    }


def length_histogram(lengths: list[int], bucket: int = BUCKET) -> list[tuple[int, int]]:
    """(upper edge, rows) with edge = bucket * ceil(length / bucket), empty buckets in between included."""
    counts = Counter(-(-length // bucket) for length in lengths)
    return [(place * bucket, counts[place]) for place in range(min(counts), max(counts) + 1)]


def padding_waste(lengths: list[int], bucket: int = BUCKET) -> float:
    """Share of padding if every prompt were padded to the edge of its bucket.

    800, 1024, 1025, 2048 and 2049 tokens in buckets of 1024: 1 - 6946 / 9216 = 0.2463.
    """
    return 1 - sum(lengths) / sum(edge * rows for edge, rows in length_histogram(lengths, bucket))


def report_text(report: dict[str, dict[str, Any]]) -> str:
    """The report for people: one paragraph per set of files."""
    return "\n".join(line for part, of_part in report.items() for line in _lines(part, of_part))


def _lines(part: str, report: dict[str, Any]) -> Iterator[str]:
    yield f"{part} data: {report['rows']} rows, {report['kept']} kept"
    for name, facts in report["files"].items():
        dropped = f", {facts['duplicates_dropped']} duplicates dropped" if facts["duplicates_dropped"] else ""
        yield f"  {name}: {facts['rows']} rows, {facts['blank_lines']} blank lines{dropped}; {facts['size']} bytes"
        for column, types in facts["columns"].items():
            unknown = "   (not a known column: kept in extra)" if column in facts["unknown_columns"] else ""
            yield f"    {column}: {_counts(types)}{unknown}"
        yield f"    by tag: {_counts(facts['rows_per_tag'])}; by domain: {_counts(facts['rows_per_domain'])}"
    for reason, per_tag in {**report["filtered"], "truncated": report["truncated"]}.items():
        if per_tag:
            yield f"  {reason}: {_counts(per_tag)}"
    yield "  prompt tokens: " + ", ".join(f"{name} {value:g}" for name, value in report["prompt_tokens"].items())
    for edge, count in report["length_histogram"].items():
        yield f"    up to {edge} tokens: {count} rows"
    yield f"    padded to these edges, {report['padding_waste']:.4f} of all tokens would be padding"
    for tag, text in report["examples"].items():
        yield f"  a prompt of {tag}:"
        yield from (f"    | {line}" for line in text.split("\n"))


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items())


def write_report(
    run_dir: str | Path, train: PromptSource, validation: PromptSource | None = None, bucket: int = BUCKET
) -> dict[str, Any]:
    """Write the three files into `run_dir` and return the report, one part per set of files."""
    folder = Path(run_dir)
    folder.mkdir(parents=True, exist_ok=True)
    sources = {"train": train} | ({} if validation is None else {"validation": validation})
    report = {part: build_report(source, bucket) for part, source in sources.items()}
    (folder / "data_report.json").write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    with (folder / "length_hist.csv").open("w", newline="", encoding="utf-8") as stream:
        table = csv.writer(stream)
        table.writerow(("part", "up_to_tokens", "rows"))
        for part, source in sources.items():
            table.writerows((part, *line) for line in length_histogram(source.lengths, bucket))
    _plot({part: source.lengths for part, source in sources.items()}, folder / "length_hist.png")
    return report


def _plot(lengths: dict[str, list[int]], path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.hist(list(lengths.values()), bins=30, label=[f"{part} ({len(of)} rows)" for part, of in lengths.items()])
    axes.set(xlabel="prompt tokens", ylabel="rows", title="Prompt lengths")
    axes.legend(frameon=False)
    figure.savefig(path, dpi=120)
