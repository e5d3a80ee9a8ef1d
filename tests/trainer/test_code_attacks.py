"""Every attack scores 0 within its limits and leaves nothing behind; the same attacks fool a careless checker."""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.trainer.attacks import ATTACKS, Attack
from tests.trainer.sandbox_bench import SHORT, Host, code_row, fenced, left_behind, needs, open_host, traces
from trainer.reward.code.isolation import Isolation
from trainer.reward.code_sandbox import CodeSandbox


@pytest.fixture(scope="module")
def host():
    with open_host() as host:
        yield host


@pytest.fixture(scope="module")
def sandbox() -> CodeSandbox:
    needs("unshare")
    return CodeSandbox(isolation="unshare", **SHORT)


def assert_fails(sandbox: CodeSandbox, attack: Attack, host: Host, seconds: float) -> None:
    before, started = traces(), time.monotonic()
    kind, cases = attack.cases
    result = sandbox(host.fill(attack.answer), code_row(kind, *cases))
    assert (result.score, result.acc, result.failed) == (0.0, 0.0, False), result
    assert time.monotonic() - started < seconds * len(cases) + 5
    assert left_behind(before) == []
    assert host.is_untouched() and host.port_is_free()


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: f"{attack.number}-{attack.name}")
def test_an_attack_scores_nothing_and_leaves_nothing(sandbox, host, attack):
    assert_fails(sandbox, attack, host, SHORT["wall_s"])


def test_every_line_of_the_list_has_an_attack():
    assert {attack.number for attack in ATTACKS} >= set(range(1, 35))
