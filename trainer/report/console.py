"""What a person sees: a live line for the phase under way, one table row per step, a closing summary."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console as RichConsole
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

# (heading, metric, format) of the per-step table
COLUMNS = (
    ("step", "training/global_step", "{:.0f}"),
    ("reward", "reward/mean", "{:.3f}"),
    ("val", "val_correct/all/mean", "{:.3f}"),
    ("loss", "train/loss", "{:+.4f}"),
    ("grad", "actor/grad_norm", "{:.3f}"),
    ("entropy", "actor/entropy", "{:.3f}"),
    ("kl loss", "actor/kl_loss", "{:.4f}"),
    ("clip", "actor/pg_clipfrac", "{:.3f}"),
    ("Δprob", "training/rollout_probs_diff_mean", "{:.4f}"),
    ("len", "response_length/mean", "{:.1f}"),
    ("tok/s", "perf/throughput", "{:.0f}"),
    ("gen s", "timing_s/gen", "{:.1f}"),
    ("update s", "timing_s/update_actor", "{:.1f}"),
    ("step s", "timing_s/step", "{:.1f}"),
)
WIDTH = 8


class Console:
    """`enabled=False` keeps everything silent except the summary and messages."""

    def __init__(self, enabled: bool) -> None:
        self._rich = RichConsole()
        self._enabled = enabled
        self._rows = 0

    def say(self, text: str) -> None:
        self._rich.print(text, highlight=False, markup=False, soft_wrap=True)

    @contextmanager
    def phase(
        self, name: str, timings: dict[str, float], key: str, total: int | None = None
    ) -> Iterator[Callable[[], None]]:
        """Show the phase while it runs and record its seconds under `timing_s/<key>`; yields `advance()`."""
        progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            *((BarColumn(), MofNCompleteColumn()) if total else ()),
            TimeElapsedColumn(),
            console=self._rich,
            transient=True,
            disable=not (self._enabled and self._rich.is_terminal),
        )
        start = time.perf_counter()
        with progress:
            task = progress.add_task(name, total=total)
            try:
                yield lambda: progress.advance(task)
            finally:
                seconds = time.perf_counter() - start
                timings[f"timing_s/{key}"] = timings.get(f"timing_s/{key}", 0.0) + seconds

    def step(self, row: dict[str, float]) -> None:
        if not self._enabled:
            return
        if self._rows % 20 == 0:
            self.say(" ".join(f"{heading:>{WIDTH}}" for heading, _, _ in COLUMNS))
        self._rows += 1
        cells = [form.format(row[name]) if name in row else "" for _, name, form in COLUMNS]
        self.say(" ".join(f"{cell:>{WIDTH}}" for cell in cells))

    def samples(self, title: str, columns: list[str], rows: list[list[str]]) -> None:
        if not self._enabled:
            return
        table = Table(title=title, show_lines=True)
        for column in columns:
            table.add_column(column, overflow="fold")
        for row in rows:
            table.add_row(*map(Text, row))  # Text: what a model writes is no markup
        self._rich.print(table)

    def summary(self, title: str, lines: list[str]) -> None:
        self._rich.print(Panel(Text("\n".join(lines)), title=title, expand=False))
