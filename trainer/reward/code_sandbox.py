"""Programs against test cases. Runs in scoring processes (see reward/pool.py), one case at a time in each.

Test code and solution code never share a process: the verdict is made where no solution can reach.
"""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from trainer.prompts.row import Row
from trainer.reward.code.cases import CaseOutcome, CaseState, run_case
from trainer.reward.code.extract import extract_program
from trainer.reward.code.limits import Limits
from trainer.reward.code.room import RoomBroken
from trainer.reward.code.selftest import choose
from trainer.reward.result import RewardResult
from trainer.reward.spec import SPARE_S
from trainer.reward.text import answer_part

RunCase = Callable[[str, str, dict[str, Any], float], CaseOutcome]


class CodeSandbox:
    """Scores 1 or 0, or with mode=fraction the share of cases passed. Reasons: correct, partial, wrong, crash,
    timeout, memory_limit, output_limit, no_code, think_unclosed; sandbox_broken with `failed`.

    mode          strict: stop at the first case that does not pass; fraction: run all of them
    isolation     auto, bwrap, unshare, rlimit (see code/selftest.py); unused with a `url`
    url           a sandbox-fusion service that runs the programs instead of this host
    memory_limit_mb, max_concurrent   of that service
    limits        fields of Limits
    """

    def __init__(
        self,
        mode: str = "strict",
        isolation: str = "auto",
        url: str | None = None,
        memory_limit_mb: int = 1024,
        max_concurrent: int = 64,
        **limits: float,
    ) -> None:
        """ValueError when this host cannot run programs in isolation."""
        self._strict = mode == "strict"
        self._limits = Limits(**limits)
        self._run: RunCase
        if url is not None:
            from trainer.reward.code.fusion import FusionClient  # its HTTP client is for those who use it

            self._run = FusionClient(url, memory_limit_mb, self._limits).run_case
        else:
            if importlib.util.find_spec("pytest") is None:
                raise ValueError("got no package pytest; expected it for `pytest` cases; pip install 'pytest>=8.3'")
            self._run = partial(run_case, choose(isolation, self._limits), self._limits)

    def __call__(self, text: str, row: Row, think_open: bool = False) -> RewardResult:
        judged = answer_part(text, think_open)
        if judged is None:
            return RewardResult(0.0, 0.0, None, "think_unclosed")
        source = extract_program(judged)
        if source is None:
            return RewardResult(0.0, 0.0, None, "no_code")
        try:
            outcomes = self._outcomes(source, row)
        except RoomBroken as error:
            return RewardResult(0.0, None, None, "sandbox_broken", {"error": str(error)}, failed=True)
        return self._result(outcomes, len(row.cases))

    def _outcomes(self, source: str, row: Row) -> list[CaseOutcome]:
        """One per case that was run; the rest of a row that is out of time was not."""
        deadline = time.monotonic() + self._limits.row_s
        outcomes: list[CaseOutcome] = []
        for case in row.cases:
            left = deadline - time.monotonic()
            outcome = self._run(source, row.case_type, case, left) if left > 0 else CaseOutcome(CaseState.TIMEOUT)
            outcomes.append(outcome)
            if left <= 0 or (self._strict and outcome.state is not CaseState.PASSED):
                break
        return outcomes

    def _result(self, outcomes: list[CaseOutcome], total: int) -> RewardResult:
        passed = sum(outcome.state is CaseState.PASSED for outcome in outcomes)
        extra: dict[str, Any] = {"passed": passed, "cases": total}
        if passed == total:
            return RewardResult(1.0, 1.0, None, "correct", extra)
        first = next(outcome for outcome in outcomes if outcome.state is not CaseState.PASSED)
        extra["detail"] = first.detail
        if self._strict or passed == 0:
            return RewardResult(0.0, 0.0, None, first.state.value, extra)
        return RewardResult(passed / total, passed / total, None, "partial", extra | {"first": first.state.value})


def check_start(options: Mapping[str, Any], timeout_s: float) -> None:
    """ValueError for settings or a host that cannot work; runs two small programs."""
    row_s = options.get("row_s", Limits.row_s)
    if timeout_s <= row_s:
        raise ValueError(
            f"got rewards.code_sandbox.timeout_s={timeout_s:g} with reward.code_sandbox.row_s={row_s:g}; expected more "
            f"than a row may take, or its process is killed; set rewards.code_sandbox.timeout_s={row_s + SPARE_S:g}"
        )
    CodeSandbox(**options)


def processes(wanted: int, options: Mapping[str, Any]) -> int:
    """How many rows may run at a time: programs that share cores would run into their time limits."""
    if options.get("url") is not None:
        return min(wanted, options["max_concurrent"])
    return min(wanted, len(os.sched_getaffinity(0)))
