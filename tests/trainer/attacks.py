"""Programs that try to be scored right without being right; they stand in attacks.txt.

There each begins with `#### number | cases | name`. The number is its line in the list of test_code_attacks.py.
`@NAME@` stands for something of the host that the test provides (sandbox_bench.py). Each real answer is wrong or
missing, so any score but 0 is a way through.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

Cases = tuple[str, tuple[dict[str, str], ...]]


def tests(kind: str, *codes: str) -> Cases:
    return kind, tuple({"assert_code": code} for code in codes)


def programs(*texts: tuple[str, str]) -> Cases:
    return "stdin", tuple({"stdin": stdin, "expected_stdout": expected} for stdin, expected in texts)


IMPORTS = "import pytest\nfrom solution import square\n"
THREE = "def test_three():\n    assert square(3) == 9\ndef test_five():\n    assert square(-5) == 25\n"
CASES: dict[str, Cases] = {
    "assert": tests("assert", "assert square(3) == 9", "assert square(-5) == 25"),
    "pytest": tests(
        "pytest", f"{IMPORTS}{THREE}def test_text():\n    with pytest.raises(TypeError):\n        square('x')\n"
    ),
    "raises": tests("pytest", f"{IMPORTS}def test_text():\n    with pytest.raises(Exception):\n        square('x')\n"),
    "stdin": programs(("3\n", "9\n"), ("-5\n", "25\n")),
    "silent": programs(("3\n", ""), ("", "\n")),
    "abs": tests("assert", "assert abs(square(3) - 9) < 1e-9"),
    "star": tests(
        "assert",
        "import math\nfrom solution import *\nassert all([math.isclose(square(3), 9), isinstance(square(3), int)])",
    ),
    "alias": tests("assert", "import math as maths\nfrom solution import *\nassert maths.isclose(square(3), 9)"),
    "anything": tests("assert", "try:\n    square(3)\nexcept BaseException:\n    pass\nelse:\n    assert False"),
    "same": tests(
        "assert",
        "from solution import Same, square\nassert square(3) == 9",
        "assert Same(1) == 9",
        "assert not Same(1) != 9",
    ),
    "guard": tests(
        "assert", "from solution import Guard\nwith Guard() as g:\n    assert g.square(3) == 9\n    assert False"
    ),
    "number": tests(
        "assert",
        "from solution import Number\nassert Number(3).squared() == 9",
        "from solution import Number\nassert 9 == Number(3).squared()",
        "from solution import Number\nassert Number(3).squared() in (9, 10)",
    ),
}


@dataclass(frozen=True)
class Attack:
    number: int
    name: str
    cases: Cases
    answer: str


def read_attacks() -> tuple[Attack, ...]:
    text = (Path(__file__).parent / "attacks.txt").read_text(encoding="utf-8")
    sections = re.split(r"^#### (\d+) \| ([\w+]+) \| (.+)\n", text, flags=re.MULTILINE)[1:]
    found, harvest = [], ""
    for number, cases, name, source in zip(*(sections[part::4] for part in range(4)), strict=True):
        kind, _, form = cases.partition("+")
        if kind == "harvest":
            harvest = source
        else:
            code = (harvest if form == "harvest" else "") + source.strip("\n")
            answer = code if form == "plain" else f"Here it is.\n```python\n{code}\n```"
            found.append(Attack(int(number), name, CASES[kind], answer))
    return tuple(found)


ATTACKS = read_attacks()
