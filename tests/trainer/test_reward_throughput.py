"""How many answers two scoring processes judge in a second, and that one endless expression stalls nobody else."""

import json
import time
from pathlib import Path

import pytest

from trainer.prompts.row import Message, Row
from trainer.reward import DomainSpec, RewardManager

DATA = Path(__file__).parents[2] / "../shared/data"
COUNT, WORKERS, LIMIT_S = 2000, 2, 3.0
TOWER = r"\boxed{9^{9^{9^{9}}}!}"  # keeps the library busy until its process is killed
GOLDS = (r"\frac{1}{3}", "42", r"2\sqrt{3}", "(1,2)", "x^2+2x+1", "0.5", r"1\pm\sqrt{19}", r"\text{Evelyn}")


def tasks() -> list[Row]:
    """Reference answers of the sample files where they are at hand, else a few forms of our own."""
    golds = list(GOLDS)
    for name in ("math500_aime_60.jsonl", "deepmath_int_64.jsonl"):
        if (DATA / name).is_file():
            lines = (DATA / name).read_text(encoding="utf-8").splitlines()
            golds += [str(json.loads(line)["ground_truth"]) for line in lines]
    return [
        Row(str(i), "math_rule", "math_rule", (Message("user", "?"),), ground_truth=golds[i % len(golds)])
        for i in range(COUNT)
    ]


@pytest.mark.slow
def test_two_thousand_answers_with_and_without_an_endless_one(capsys):
    rows = tasks()
    reasoning = "We set up the equation and solve it step by step. " * 40
    texts = [
        f"{reasoning}\\boxed{{{row.ground_truth if i % 2 else rows[i - 1].ground_truth}}}" for i, row in enumerate(rows)
    ]
    with RewardManager({"math_rule": DomainSpec(timeout_s=LIMIT_S)}, num_workers=WORKERS) as manager:
        for _ in range(WORKERS):  # the libraries are loaded before the clock starts
            manager.submit(texts[1], rows[1], response_length=1).result(120)

        def seconds(endless: bool) -> tuple[float, list[float]]:
            started = time.monotonic()
            tower = manager.submit(TOWER, rows[0], response_length=1) if endless else None
            futures = [manager.submit(text, row, response_length=1) for text, row in zip(texts, rows, strict=True)]
            accs = [future.result(600).acc for future in futures]
            taken = time.monotonic() - started
            if tower is not None:
                assert tower.result(60).reason == "timeout"
            return taken, accs

        plain, accs = seconds(endless=False)
        with_tower, same = seconds(endless=True)
        metrics = manager.take_metrics()
    with capsys.disabled():
        print(f"\n{COUNT} answers, {WORKERS} workers: {plain:.1f} s ({COUNT / plain:.0f}/s); ", end="")
        print(f"with one endless expression of {LIMIT_S:g} s: {with_tower:.1f} s")
    assert accs == same and sum(accs[1::2]) == COUNT // 2, "every right answer is right, in any order and load"
    assert metrics["reward/math_rule/timeouts"] == 1
    # One of two processes is away for its limit and the start of its successor; the other one goes on.
    assert with_tower < plain + LIMIT_S + 15
