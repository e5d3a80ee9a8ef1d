"""Write a small mixed RLVR set: sums, tiny functions, instructions and multiple choice, as train.jsonl and val.jsonl.

    python3 -m scripts.make_mixed_data runs/data/mixed

Every row is scored by the scorer of its tag: math_rule, code_sandbox, ifeval, crossthinkqa. Each tag has 24 training
rows and 6 that are held out.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path

PER_TAG, HELD_OUT = 30, 6
LETTERS = "ABCD"
FUNCTIONS = (
    ("double", "twice its argument", "2 * {n}"),
    ("square", "the square of its argument", "{n} ** 2"),
    ("successor", "its argument plus one", "{n} + 1"),
    ("negate", "its argument times minus one", "-({n})"),
    ("halve", "its argument divided by two, rounded down", "{n} // 2"),
)
INSTRUCTIONS = (
    ("punctuation:no_comma", {}, "Do not use a comma."),
    ("change_case:english_lowercase", {}, "Write in lower-case English only."),
    ("length_constraints:number_words", {"num_words": 20, "relation": "less than"}, "Use fewer than 20 words."),
    ("detectable_format:title", {}, "Give a title in double angular brackets, such as <<title>>."),
)


def sums(draw: random.Random) -> Iterator[dict]:
    while True:
        a, b = draw.randint(2, 99), draw.randint(2, 99)
        yield {"prompt": f"What is {a} + {b}? Put the answer into \\boxed{{}}.", "ground_truth": str(a + b)}


def functions(draw: random.Random) -> Iterator[dict]:
    while True:
        name, does, formula = draw.choice(FUNCTIONS)
        factor = draw.randint(1, 40)
        calls = [{"assert_code": f"assert {name}({n}) == {formula.format(n=n)}"} for n in (0, factor, -factor)]
        yield {
            "prompt": f"Write a Python function {name}(n) that returns {does}. Try it with {factor}.",
            "case_type": "assert",
            "test_cases": calls,
        }


def instructions(draw: random.Random) -> Iterator[dict]:
    while True:
        name, kwargs, text = draw.choice(INSTRUCTIONS)
        subject = draw.choice(("rain", "bread", "a river", "the moon", "a train", "tea", "a garden", "winter"))
        truth = {"instruction_id_list": [name], "kwargs": [kwargs]}
        yield {"prompt": f"Write {draw.randint(1, 3)} sentences about {subject}. {text}", "ground_truth": truth}


def choices(draw: random.Random) -> Iterator[dict]:
    while True:
        a, b = draw.randint(2, 20), draw.randint(2, 20)
        options = draw.sample(sorted({a + b, a + b + 1, a + b - 1, a * b + 3}), k=4) if a * b + 3 > a + b + 1 else []
        if options:
            listed = " ".join(f"({letter}) {value}" for letter, value in zip(LETTERS, options, strict=True))
            yield {
                "prompt": f"What is {a} + {b}? {listed} Answer with one letter.",
                "ground_truth": LETTERS[options.index(a + b)],
                "extra_info": {"options": [str(value) for value in options]},
            }


TAGS: dict[str, Callable[[random.Random], Iterator[dict]]] = {
    "math_rule": sums,
    "code_sandbox": functions,
    "ifeval": instructions,
    "crossthinkqa": choices,
}


def rows() -> tuple[list[dict], list[dict]]:
    """(training, held out), no prompt twice."""
    train: list[dict] = []
    held_out: list[dict] = []
    for tag, make in TAGS.items():
        found: dict[str, dict] = {}
        for row in make(random.Random(tag)):
            found.setdefault(row["prompt"], {"id": f"{len(found)}", "tag": tag, **row})
            if len(found) == PER_TAG:
                break
        held_out += list(found.values())[:HELD_OUT]
        train += list(found.values())[HELD_OUT:]
    return train, held_out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    for name, part in zip(("train", "val"), rows(), strict=True):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
        print(f"{folder / name}.jsonl: {len(part)} rows")


if __name__ == "__main__":
    main()
