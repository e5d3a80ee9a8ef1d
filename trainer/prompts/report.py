"""What is in the data, before any training: data_report.json, length_hist.csv and length_hist.png."""

from __future__ import annotations

import csv
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from trainer.prompts.cursor import PromptSource

BUCKET = 1024  # tokens per line of the length histogram


def build_report(source: PromptSource, bucket: int = BUCKET) -> dict[str, Any]:
    """What the files hold, what was dropped and why, prompt lengths, one rendered prompt per tag; JSON-able."""
    rows, lengths = source.loaded, source.lengths
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
                "size": facts.size,
                "sha256": facts.sha256,
            }
            for name, facts in rows.files.items()
        },
        "rows": len(rows),
        "rows_per_tag": dict(Counter(row.tag for row in rows)),
        "rows_per_domain": dict(Counter(row.domain for row in rows)),
        "kept": len(source),
        "filtered": {"overlong": dict(source.overlong)},
        "prompt_tokens": {
            "min": min(lengths),
            "mean": float(np.mean(lengths)),
            "p50": float(np.percentile(lengths, 50)),
            "p95": float(np.percentile(lengths, 95)),
            "max": max(lengths),
        },
        "length_histogram": {str(edge): count for edge, count in length_histogram(lengths, bucket)},
        "examples": examples,
    }


def length_histogram(lengths: list[int], bucket: int = BUCKET) -> list[tuple[int, int]]:
    """(upper edge, rows) with edge = bucket * ceil(length / bucket), empty buckets in between included."""
    counts = Counter(-(-length // bucket) for length in lengths)
    return [(place * bucket, counts[place]) for place in range(min(counts), max(counts) + 1)]


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
