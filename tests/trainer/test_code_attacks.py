"""Every attack scores 0 within its limits and leaves nothing behind; the same attacks fool a careless checker.

The list: 1 exits while loading, 2 raises SystemExit, 3 exits after a right case, 4 exit hooks, 5 other built-ins,
6 patched test runners, 7 planted configuration, 8 equal to everything, 9 lies about itself, 10 frames, 11 garbage
collector, 12 files and processes of others, 13 the trainer's data, 14 writes outside, 15 forged reports, 16 signals,
17 fork bomb and endless loop, 18 sleeps, 19 memory, 20 output, 21 disk, 22 ignored signals, 23 daemon, 24 thread that
never ends, 25 network, 26 environment, 27 more input, 28 no stdout, 29 recursion, 30 broken memory, 31 unpickling,
32 endless answers, 33 raises for empty output, 34 no program; from 35 on: abuse of the conversation itself.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.trainer.attacks import ATTACKS, Attack
from tests.trainer.sandbox_bench import SHORT, Host, code_row, fenced, left_behind, needs, open_host, traces
from trainer.reward import DomainSpec, RewardManager
from trainer.reward.code.extract import extract_program
from trainer.reward.code_sandbox import CodeSandbox

REASONS = {
    "fork bomb": "timeout",
    "sleeps": "timeout",
    "right, but a thread never ends": "timeout",
    "many processes with a little each": "memory_limit",
    "memory that is shared or in files without a name": "memory_limit",
    "a gigabyte to stdout": "output_limit",
    "a gigabyte to stderr": "output_limit",
    "raises where nothing is expected": "crash",
    "exit where an exception is expected": "crash",
    "no code block": "no_code",
}
FOOLED = (1, 2, 6, 8, 10, 11, 15)  # harmless to this host: they are run on it without any walls


def name_of(attack: Attack) -> str:
    return f"{attack.number}-{attack.name}"


@pytest.fixture(scope="module")
def host():
    with open_host() as host:
        yield host


@pytest.fixture(scope="module")
def sandbox() -> CodeSandbox:
    needs("unshare")
    return CodeSandbox(isolation="unshare", **SHORT)


@pytest.fixture(scope="module")
def every_case() -> CodeSandbox:
    needs("unshare")
    return CodeSandbox(mode="fraction", isolation="unshare", **SHORT)


def assert_fails(sandbox: CodeSandbox, attack: Attack, host: Host, wall_s: float) -> None:
    before, started = traces(), time.monotonic()
    kind, cases = attack.cases
    result = sandbox(host.fill(attack.answer), code_row(kind, *cases))
    assert (result.score, result.acc, result.failed) == (0.0, 0.0, False), result
    # On a busy machine the wall clock may end what another limit would have.
    assert result.reason in (REASONS.get(attack.name, result.reason), "timeout")
    assert time.monotonic() - started < wall_s * len(cases) + 5
    assert left_behind(before) == []
    assert host.is_untouched() and host.port_is_free()


@pytest.mark.parametrize("attack", ATTACKS, ids=name_of)
def test_an_attack_scores_nothing_and_leaves_nothing(sandbox, every_case, host, attack):
    _, cases = attack.cases
    assert_fails(every_case if len(cases) > 2 else sandbox, attack, host, SHORT["wall_s"])


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["unshare", "bwrap"])
def test_attacks_under_the_limits_of_a_run(host, kind):
    needs(kind)
    sandbox = CodeSandbox(isolation=kind)
    for attack in ATTACKS:
        assert_fails(sandbox, attack, host, 10.0)


def test_every_line_of_the_list_has_an_attack():
    assert set(REASONS) <= {attack.name for attack in ATTACKS}
    assert {attack.number for attack in ATTACKS} >= set(range(1, 35))


def careless(attack: Attack, folder: Path) -> bool:
    """A checker that runs solution and tests in one process, and believes its exit status or its report."""
    kind, cases = attack.cases
    (folder / "solution.py").write_text(extract_program(attack.answer))
    if kind == "pytest":
        (folder / "test_it.py").write_text(cases[0]["assert_code"])
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_it.py"]
    else:
        codes = [case["assert_code"] for case in cases]
        (folder / "check.py").write_text(
            f"import json\nfrom solution import *\nfor code in {codes!r}:\n"
            "    try:\n        exec(code)\n    except AssertionError:\n"
            "        print(json.dumps({'passed': False, 'detail': code}))\n        raise SystemExit(1)\n"
        )
        command = [sys.executable, "check.py"]
    done = subprocess.run(command, cwd=folder, capture_output=True, timeout=60)
    return done.returncode == 0 or done.stdout.startswith(json.dumps({"passed": True, "detail": ""}).encode())


@pytest.mark.parametrize("number", FOOLED)
def test_the_attacks_do_fool_a_careless_checker(number, tmp_path):
    chosen = [attack for attack in ATTACKS if attack.number == number and attack.cases[0] != "stdin"]
    assert any(careless(attack, tmp_path) for attack in chosen)


SQUARE = fenced("def square(x):\n    return x * x")
PROGRAM = fenced("print(int(input()) ** 2)")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_200_honest_solutions_beside_50_attacks(host, capsys):
    """None is lost, and the median takes at most twice as long as without attacks."""
    needs("unshare")
    chosen = [a for a in ATTACKS if a.number in (16, 17, 18, 19, 20, 21, 22, 23, 24, 27, 29, 32)]
    attacks = [chosen[i % len(chosen)] for i in range(50)]
    honest = [
        (SQUARE, code_row("assert", {"assert_code": "assert square(3) == 9"}))
        if i % 2
        else (PROGRAM, code_row("stdin", {"stdin": "3\n", "expected_stdout": "9\n"}))
        for i in range(200)
    ]
    limits = {"isolation": "unshare", "wall_s": 4.0, "cpu_s": 3.0}
    medians, before = [], traces()
    for bad in ([], attacks):
        started = time.monotonic()
        with RewardManager({"code_sandbox": DomainSpec(timeout_s=90, options=limits)}, num_workers=8) as manager:
            futures, wrong = [], []
            for i, (text, row) in enumerate(honest):
                futures.append(manager.submit(text, row, response_length=1))
                if i % 4 == 0 and bad:
                    attack = bad[i // 4]
                    kind, cases = attack.cases
                    wrong.append(manager.submit(host.fill(attack.answer), code_row(kind, *cases), response_length=1))
            results = [future.result(600) for future in futures]
            assert [future.result(600).score for future in wrong] == [0.0] * len(bad)
        assert [result.reason for result in results] == ["correct"] * 200
        medians.append(statistics.median(result.seconds for result in results))
        with capsys.disabled():
            print(f"\n{len(bad)} attacks: honest median {medians[-1]:.3f} s, {time.monotonic() - started:.0f} s in all")
    assert medians[1] <= 2 * medians[0]
    assert left_behind(before) == []


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_fifty_runs_leave_processes_descriptors_and_memory_as_they_were(sandbox):
    row = code_row("stdin", {"stdin": "3\n", "expected_stdout": "9\n"})
    sandbox(PROGRAM, row)
    before, descriptors, memory = traces(), os.listdir("/proc/self/fd"), resident_bytes()
    for _ in range(50):
        assert sandbox(PROGRAM, row).score == 1
    assert left_behind(before) == []
    assert len(os.listdir("/proc/self/fd")) == len(descriptors)
    assert resident_bytes() - memory < 4 << 20
