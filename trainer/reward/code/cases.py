"""One case of a row: run the program in a room, decide from outside."""

from __future__ import annotations

import json
import os
import time
from contextlib import ExitStack
from dataclasses import dataclass
from enum import Enum
from typing import Any

from trainer.reward.code.inside.peer import ENDED
from trainer.reward.code.isolation import Isolation
from trainer.reward.code.limits import Limits
from trainer.reward.code.room import Over, Pipe, Room, in_memory, watch

SOURCE = "solution.py"
KEPT_CHARACTERS = 400  # of an error text, for dumps


class CaseState(Enum):
    """How a case ended; only PASSED counts."""

    PASSED = "correct"
    WRONG = "wrong"
    CRASHED = "crash"
    TIMEOUT = "timeout"
    MEMORY = "memory_limit"
    OUTPUT = "output_limit"


@dataclass(frozen=True)
class CaseOutcome:
    state: CaseState
    detail: str = ""


def run_case(
    isolation: Isolation, limits: Limits, source: str, case_type: str, case: dict[str, Any], seconds: float
) -> CaseOutcome:
    """The outcome within `seconds` of wall time. RoomBroken when the sandbox failed, not the program."""
    deadline = time.monotonic() + min(limits.wall_s, seconds)
    if case_type == "stdin":
        return _run_program(isolation, limits, source, case["stdin"], case["expected_stdout"], deadline)
    return _run_test(isolation, limits, source, case_type, case["assert_code"], deadline)


def same_output(printed: str, expected: str) -> bool:
    """Equal but for blanks at the end of lines and empty lines at the end."""
    return _lines(printed) == _lines(expected)


def _lines(text: str) -> list[str]:
    lines = [line.rstrip() for line in text.split("\n")]
    while lines and not lines[-1]:
        lines.pop()
    return lines


def _run_program(
    isolation: Isolation, limits: Limits, source: str, stdin: str, expected: str, deadline: float
) -> CaseOutcome:
    size = limits.output_bytes(expected)
    pipes = Pipe(size), Pipe(size)
    text = in_memory(stdin.encode("utf-8", "surrogatepass"))
    command = isolation.program("program", SOURCE)
    try:
        with Room(isolation, limits, command, files={SOURCE: source}, stdin=text, pipes=pipes) as room:
            room.wait_ready()
            over = watch(room, (), deadline)
            code = room.process.poll()
            printed, error = (bytes(pipe.content).decode("utf-8", "replace") for pipe in pipes)
    finally:
        os.close(text)
    if over is not None:
        return CaseOutcome(CaseState(over.value), error[-KEPT_CHARACTERS:])
    if code != 0:
        return CaseOutcome(CaseState.CRASHED, error[-KEPT_CHARACTERS:])
    return CaseOutcome(CaseState.PASSED if same_output(printed, expected) else CaseState.WRONG)


def _run_test(isolation: Isolation, limits: Limits, source: str, kind: str, code: str, deadline: float) -> CaseOutcome:
    """The test in one room, the solution in another, two pipes between them, the verdict only from the first."""
    verdict = Pipe(1 << 16)
    tests = in_memory(json.dumps({"kind": kind, "code": code}).encode())
    calls, answers = os.pipe(), os.pipe()
    opened = [tests, *calls, *answers]
    errors = Pipe(limits.output_kb << 10), Pipe(limits.output_kb << 10)
    solution_command = isolation.program("serve", SOURCE, calls[0], answers[1])
    check_command = isolation.program("check", answers[0], calls[1], tests, verdict.writer)
    try:
        with ExitStack() as rooms:
            solution = rooms.enter_context(
                Room(
                    *(isolation, limits, solution_command),
                    files={SOURCE: source},
                    pipes=errors,
                    descriptors=(calls[0], answers[1]),
                )
            )
            # The checking side runs under the same limits: what it compares comes from the solution.
            held = (answers[0], calls[1], tests, verdict.writer)
            checker = rooms.enter_context(Room(isolation, limits, check_command, descriptors=held))
            _close(opened)
            verdict.close_writer()
            solution.wait_ready()
            checker.wait_ready()
            over = watch(checker, (solution,), deadline)
            verdict.read()
    finally:
        _close(opened)
        verdict.close()
    return _judge(over, bytes(verdict.content), bytes(errors[-1].content).decode("utf-8", "replace"))


def _judge(over: Over | None, verdict: bytes, error: str) -> CaseOutcome:
    if over is not None:
        return CaseOutcome(CaseState(over.value), error[-KEPT_CHARACTERS:])
    if not verdict:  # the checking process ended without a word: killed by what it had to compare
        return CaseOutcome(CaseState.CRASHED, error[-KEPT_CHARACTERS:])
    return judged(json.loads(verdict), error)


def judged(told: dict[str, Any], error: str) -> CaseOutcome:
    """From what the checking process says and what the solution's process wrote to stderr."""
    if told["passed"] is True:
        return CaseOutcome(CaseState.PASSED)
    crashed = bool(error) or told["detail"] == ENDED
    return CaseOutcome(CaseState.CRASHED if crashed else CaseState.WRONG, (error or told["detail"])[-KEPT_CHARACTERS:])


def _close(descriptors: list[int]) -> None:
    while descriptors:
        os.close(descriptors.pop())
