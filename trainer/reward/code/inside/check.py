"""The checking process of `assert` and `pytest` cases: runs the test and alone says whether it passed."""

from __future__ import annotations

import ast
import json
import os
import sys
import traceback
from typing import Any

from trainer.reward.code.inside.peer import Peer
from trainer.reward.code.inside.standin import PROTECTED, StandIn

RECURSION = 10_000  # decoding nested values, below a deep stack of the test runner
TEST_NAME = "test_solution_case"


class Case:
    """One test with its stand-in of the solution. `trouble` is why it cannot have passed, whatever it did."""

    def __init__(self, code: str, reader: int, writer: int) -> None:
        self.trouble = ""
        self._code = code
        tree = ast.parse(code)
        self._standin = StandIn(names_in(tree))
        self._standin.peer = Peer(reader, writer, self._standin, self._note)
        self._hidden = PROTECTED | imported(tree)

    def run(self, kind: str) -> None:
        """AssertionError or whatever the test raised; returns when all of it passed."""
        solution = self._standin.module()
        public = {k: v for k, v in vars(solution).items() if not k.startswith("_") and k not in self._hidden}
        solution.__dict__["__all__"] = sorted(public)
        sys.modules["solution"] = solution
        module = type(sys)(TEST_NAME)
        module.__file__ = os.path.abspath(f"{TEST_NAME}.py")
        sys.modules[TEST_NAME] = module
        vars(module).update(public)
        exec(compile(self._code, module.__file__, "exec"), vars(module))
        if kind == "pytest":
            run_pytest(module.__file__, self._code)

    def _note(self, text: str) -> None:
        self.trouble = self.trouble or text


def names_in(tree: ast.AST) -> frozenset[str]:
    """Every name that a test mentions: variables, attributes and what it imports."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.ImportFrom):
            found.update(alias.name for alias in node.names)
    return frozenset(found)


def imported(tree: ast.AST) -> frozenset[str]:
    """Names that a test imports from elsewhere than the solution: those stay what the test means by them."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import) or (isinstance(node, ast.ImportFrom) and node.module != "solution"):
            found.update((alias.asname or alias.name).split(".")[0] for alias in node.names)
    return frozenset(found)


class Counter:
    """pytest plug-in: counts tests whose every phase passed."""

    def __init__(self) -> None:
        self.collected = self.passed = self.other = 0

    def pytest_collection_finish(self, session: Any) -> None:
        self.collected = len(session.items)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.outcome != "passed":
            self.other += 1
        elif report.when == "call":
            self.passed += 1


def run_pytest(path: str, code: str) -> None:
    """AssertionError unless at least one test was collected and all of them passed."""
    import pytest  # half of the time of a case: `assert` cases do without

    with open(path, "w", encoding="utf-8") as file:
        file.write(code)  # pytest wants a file to exist; the module that it takes is the one in sys.modules
    counter = Counter()
    options = ["-q", "--assert=plain", "--noconftest", "-c", os.devnull, f"--rootdir={os.getcwd()}"]
    options += ["-p", "no:cacheprovider", "-p", "no:faulthandler", "-p", "no:junitxml", path]
    status = pytest.main(options, plugins=[counter])
    if not (status == 0 and counter.collected and counter.passed == counter.collected and not counter.other):
        raise AssertionError(f"{counter.passed} of {counter.collected} tests passed")


def judge(kind: str, code: str, reader: int, writer: int) -> dict[str, Any]:
    """Run a test against the solution behind the pipes: {"passed": bool, "detail": text}."""
    sys.setrecursionlimit(RECURSION)
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    trouble = detail = ""
    passed = False
    try:
        case = Case(code, reader, writer)
        try:
            case.run(kind)
        finally:
            trouble = case.trouble
        passed = not trouble
    except BaseException as error:  # SystemExit and the like: anything but the end of the test is a failure
        detail = "".join(traceback.format_exception_only(error))
    return {"passed": passed, "detail": (trouble or detail)[-1000:]}


def main(reader: int, writer: int, tests: int, verdict: int) -> None:
    """Read {"kind", "code"} from `tests`, write what `judge` says to `verdict`."""
    with os.fdopen(tests, encoding="utf-8") as file:
        wanted = json.load(file)
    os.write(verdict, json.dumps(judge(wanted["kind"], wanted["code"], reader, writer)).encode())
    os._exit(0)
