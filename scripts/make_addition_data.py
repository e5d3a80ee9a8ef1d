"""Write the quickstart task: sums of two numbers from 2 to 20 as train.jsonl and val.jsonl.

    python scripts/make_addition_data.py runs/data/addition

All 361 pairs are used once: 64 are held out for validation, the other 297 train.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

HELD_OUT = 64


def rows() -> list[dict[str, str]]:
    return [
        {
            "id": f"{a}+{b}",
            "tag": "addition",
            "prompt": f"What is {a} + {b}? Answer with only the number.",
            "ground_truth": str(a + b),
        }
        for a in range(2, 21)
        for b in range(2, 21)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    shuffled = rows()
    random.Random(0).shuffle(shuffled)
    for name, part in (("val", shuffled[:HELD_OUT]), ("train", shuffled[HELD_OUT:])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
        print(f"{folder / name}.jsonl: {len(part)} rows")


if __name__ == "__main__":
    main()
