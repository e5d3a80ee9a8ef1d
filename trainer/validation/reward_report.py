"""Does the reward say anything? Scores of sampled answers, before a long run depends on them.

    python3 -m trainer.validation.reward_report rollouts/4.jsonl --out DIR      the same report of a dump

Training with groups learns from differences within a group: a reward that hardly varies, or never within a group,
cannot teach. Right and wrong are read from `acc` (from the score where a scorer gives none), as everywhere.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import numpy as np

if TYPE_CHECKING:
    from trainer.rollout.scored import Scored

BINS = 20
SHOWN = 5  # best and worst samples of each tag
GROUPS = ("all_0", "all_1", "mixed", "same")  # `same`: all equal, neither 0 nor 1


@dataclass(frozen=True)
class ReportSample:
    """One scored answer; answers with the same `uid` are a group. `reason` is the scorer's word (`timeout`)."""

    uid: str
    tag: str
    score: float
    acc: float | None = None
    text: str = ""
    prompt: str = ""
    reason: str = ""
    failed: bool = False


def from_scored(scored: Iterable[Scored]) -> list[ReportSample]:
    """The samples of rooms 2 and 3."""
    return [
        ReportSample(
            uid=each.item.uid,
            tag=each.item.row.tag,
            score=each.result.score,
            acc=each.result.acc,
            text=each.text,
            prompt=each.item.row.messages[-1].content,
            reason=each.result.reason,
            failed=each.result.failed,
        )
        for each in scored
    ]


def build_report(samples: Sequence[ReportSample]) -> dict[str, Any]:
    """Tag -> numbers, JSON-able; see `_of_tag`. ValueError when there are no samples."""
    if not samples:
        raise ValueError(
            "got no samples for the reward report; expected at least one scored answer; raise reward.report.prompts, "
            "or take a dump with rows"
        )
    tags: dict[str, list[ReportSample]] = {}
    for sample in samples:
        tags.setdefault(sample.tag, []).append(sample)
    return {tag: _of_tag(of_tag) for tag, of_tag in sorted(tags.items())}


def _of_tag(samples: Sequence[ReportSample]) -> dict[str, Any]:
    """`count` scored samples with mean, population std, min and max of their scores; `groups` and what share of them
    is all 0, all 1, mixed, or the same at another value; shares of failed samples and of time-outs; the five best
    and worst samples. Failed samples are in no other number; with nothing scored the numbers are null."""
    scored = [sample for sample in samples if not sample.failed]
    scores = np.array([sample.score for sample in scored], dtype=np.float64)
    groups: dict[str, list[float]] = {}
    for sample in scored:
        groups.setdefault(sample.uid, []).append(sample.score if sample.acc is None else sample.acc)
    kinds = [_kind(values) for values in groups.values()]
    ranked = sorted(scored, key=lambda sample: -sample.score)
    statistics = {"mean": np.mean, "std": np.std, "min": np.min, "max": np.max}
    return {
        "count": len(scored),
        **{name: float(of(scores)) if len(scores) else None for name, of in statistics.items()},
        "groups": len(groups),
        "group_shares": {kind: kinds.count(kind) / len(kinds) if kinds else None for kind in GROUPS},
        "failed": sum(sample.failed for sample in samples) / len(samples),
        "timeouts": sum(sample.reason == "timeout" for sample in samples) / len(samples),
        "best": [_shown(sample) for sample in ranked[:SHOWN]],
        "worst": [_shown(sample) for sample in ranked[::-1][:SHOWN]],
    }


def _kind(values: Sequence[float]) -> str:
    if min(values) != max(values):
        return "mixed"
    return {0.0: "all_0", 1.0: "all_1"}.get(values[0], "same")


def _shown(sample: ReportSample) -> dict[str, Any]:
    return {name: vars(sample)[name] for name in ("uid", "score", "acc", "reason", "prompt", "text")}


def no_signal(report: dict[str, Any], min_std: float) -> list[str]:
    """One warning for each tag that cannot teach: nothing scored, scores that hardly vary, or no mixed group."""
    warnings = []
    for tag, numbers in report.items():
        why = []
        if numbers["count"] == 0:
            why.append("no answer could be scored")
        elif numbers["std"] < min_std:
            why.append(f"standard deviation {numbers['std']:.3g} of {numbers['count']} scores, below {min_std:g}")
        if numbers["count"] and numbers["group_shares"]["mixed"] == 0:
            why.append(f"none of {numbers['groups']} groups is mixed")
        if why:
            warnings.append(f"no signal: {tag}: {' and '.join(why)}; {_advice(numbers)}")
    return warnings


def _advice(numbers: dict[str, Any]) -> str:
    if numbers["count"] == 0:
        return "mend the scorer"
    shares = numbers["group_shares"]
    if shares["all_1"] == 1:
        return "the data is too easy: take harder rows"
    if shares["all_0"] == 1:
        return (
            "the data is too hard or the scorer reads no answer: look at the samples, take easier rows, another "
            "reward, or more samples per prompt (rollout.n)"
        )
    return "take other data, another reward, or more samples per prompt (rollout.n)"


def write_reward_report(
    folder: Path, samples: Sequence[ReportSample], *, min_std: float = 0.05
) -> tuple[dict[str, Any], list[str]]:
    """Write reward_report.json and one reward_hist_<tag>.png per tag; returns (report, warnings).

    In file names every character of a tag outside letters, digits and `_.-~` is percent-encoded.
    """
    report = build_report(samples)
    warnings = no_signal(report, min_std)
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / ".reward_report.json.partial"
    content = {"min_std": min_std, "warnings": warnings, "tags": report}
    partial.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    os.replace(partial, folder / "reward_report.json")
    for tag in report:
        scores = [sample.score for sample in samples if sample.tag == tag and not sample.failed]
        if scores:
            _plot(tag, scores, folder / f"reward_hist_{quote(tag, safe='')}.png")
    return report, warnings


def _plot(tag: str, scores: list[float], path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    mean, std = float(np.mean(scores)), float(np.std(scores))
    figure = Figure(figsize=(6, 3.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.hist(scores, bins=BINS, color="tab:blue", alpha=0.8)
    axes.axvline(mean, color="tab:red", label=f"mean {mean:.3f}")
    for place, label in ((mean - std, f"mean ± std {std:.3f}"), (mean + std, None)):
        axes.axvline(place, color="tab:red", linestyle="--", label=label)
    axes.set(xlabel="score", ylabel="answers", title=f"Scores of {len(scores)} answers, {tag}")
    axes.legend(frameon=False)
    figure.savefig(path, dpi=120)


def refuse_flat(warnings: Sequence[str]) -> None:
    """`reward.report.on_flat=error`: ValueError when there is any warning."""
    if warnings:
        raise ValueError(
            "got a reward without signal:\n  " + "\n  ".join(warnings) + "\nexpected scores that differ within a "
            "group; follow the advice above, or set reward.report.on_flat=warn to train all the same"
        )


def read_dump(path: Path) -> list[ReportSample]:
    """The samples of a JSON-lines dump of training (trainer.rollout_data_dir) or validation
    (trainer.validation_data_dir). ValueError for a line that is none."""
    samples = []
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            try:
                row = json.loads(line)
                samples.append(_from_row(row))
            except (json.JSONDecodeError, KeyError, TypeError) as error:
                raise ValueError(
                    f"got {path}:{number} ({error}); expected a sample of trainer.rollout_data_dir or "
                    "trainer.validation_data_dir, with uid, tag, score and answer; pass such a file"
                ) from error
    return samples


def _from_row(row: dict[str, Any]) -> ReportSample:
    return ReportSample(
        uid=row["uid"],
        tag=row["tag"],
        score=float(row["score"]),
        acc=row.get("acc"),
        text=row["answer"],
        prompt=row.get("prompt", ""),
        reason=row.get("reason", ""),
        failed=row.get("failed", False),
    )


def report_lines(report: dict[str, Any]) -> Iterable[str]:
    """The numbers for people, one line per tag."""
    for tag, numbers in report.items():
        if numbers["count"] == 0:
            yield f"{tag}: no answer could be scored"
            continue
        shares = ", ".join(f"{kind.replace('_', ' ')} {numbers['group_shares'][kind]:.2f}" for kind in GROUPS)
        yield (
            f"{tag}: {numbers['count']} answers, score {numbers['mean']:.3f} ± {numbers['std']:.3f} in "
            f"[{numbers['min']:g}, {numbers['max']:g}]; {numbers['groups']} groups: {shares}; "
            f"failed {numbers['failed']:.2f}, timed out {numbers['timeouts']:.2f}"
        )


def main(argv: list[str] | None = None) -> int:
    """Exit status 0 with signal, 1 without, 2 for a file that is no dump."""
    parser = argparse.ArgumentParser(description="Reward report of a rollout dump.")
    parser.add_argument("dump", type=Path)
    parser.add_argument("--out", type=Path, default=Path("."), help="folder of reward_report.json and the pictures")
    parser.add_argument("--min-std", type=float, default=0.05)
    arguments = parser.parse_args(argv)
    try:
        report, warnings = write_reward_report(arguments.out, read_dump(arguments.dump), min_std=arguments.min_std)
    except (OSError, ValueError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.write("".join(f"{line}\n" for line in [*report_lines(report), *warnings]))
    return 1 if warnings else 0


if __name__ == "__main__":
    sys.exit(main())
