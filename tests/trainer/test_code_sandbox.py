"""Honest programs are scored right, whatever crosses between them and their tests."""

import ast
import os
import shlex
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from tests.trainer.sandbox_bench import code_row, fenced, left_behind, needs, sample_rows, traces
from trainer.reward import DomainSpec, RewardManager
from trainer.reward.code.cases import same_output
from trainer.reward.code.extract import extract_program
from trainer.reward.code.limits import Limits
from trainer.reward.code.selftest import choose
from trainer.reward.code_sandbox import CodeSandbox, check_start, processes

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def sandbox() -> CodeSandbox:
    needs("unshare")
    return CodeSandbox(isolation="unshare")


def score(sandbox: CodeSandbox, source: str, *tests: str, kind: str = "assert") -> tuple[float, str]:
    cases = [{"assert_code": textwrap.dedent(test)} for test in tests]
    result = sandbox(fenced(textwrap.dedent(source)), code_row(kind, *cases))
    return result.score, result.extra.get("detail", "")


def output(sandbox: CodeSandbox, source: str, stdin: str, expected: str) -> str:
    case = {"stdin": stdin, "expected_stdout": expected}
    return sandbox(fenced(textwrap.dedent(source)), code_row("stdin", case)).reason


class NothingReturned(ast.NodeTransformer):
    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        node.body = [ast.Return(ast.Constant(None))]
        return node


def spoiled(source: str) -> str:
    """A program that does something else: its functions do nothing, or it prints one more line."""
    tree = ast.parse(source)
    if any(isinstance(node, ast.FunctionDef) for node in ast.walk(tree)):
        return ast.unparse(ast.fix_missing_locations(NothingReturned().visit(tree)))
    return f"{source}\nprint('and more')"


def test_reference_solutions_score_one_and_spoiled_ones_zero(sandbox):
    for row, source in sample_rows():
        assert sandbox(fenced(source), row).score == 1
        assert sandbox(fenced(spoiled(source)), row).score == 0


@pytest.mark.parametrize("kind", ["bwrap", "rlimit"])
def test_other_isolations_score_the_same(kind):
    needs(kind)
    sandbox, before = CodeSandbox(isolation=kind), traces()
    for row, source in sample_rows()[3:9:2]:
        assert sandbox(fenced(source), row).score == 1
        assert sandbox(fenced(spoiled(source)), row).score == 0
    assert (
        output(
            sandbox,
            "import os\nif os.fork() == 0:\n    os.setsid()\n    os.fork()\n    import time\n"
            "    time.sleep(99)\nprint(9)",
            "",
            "9",
        )
        == "correct"
    )
    assert left_behind(before) == []


def test_objects_of_named_classes_live_in_the_solution(sandbox):
    source = """
        class Node:
            def __init__(self, value, next=None):
                self.value, self.next = value, next
        class Vector:
            zero = 0
            def __init__(self, *xs): self.xs = list(xs)
            def __add__(self, other): return Vector(*(a + b for a, b in zip(self.xs, other.xs)))
            def __rmul__(self, k): return Vector(*(k * x for x in self.xs))
            def __eq__(self, other): return self.xs == other.xs
            def __hash__(self): return hash(tuple(self.xs))
            def __len__(self): return len(self.xs)
            def __getitem__(self, i): return self.xs[i]
            def __setitem__(self, i, x): self.xs[i] = x
            def __iter__(self): return iter(self.xs)
            def __contains__(self, x): return x in self.xs
            def __repr__(self): return f"Vector{tuple(self.xs)}"
            def __bool__(self): return any(self.xs)
            def __enter__(self): return self
            def __exit__(self, kind, error, trace): self.xs = []; return kind is KeyError
            @property
            def first(self): return self.xs[0]
            @classmethod
            def ones(cls, n): return cls(*[1] * n)
            @staticmethod
            def twice(x): return 2 * x
        class Sub(Vector):
            pass
        def reverse(node):
            last = None
            while node:
                node.next, last, node = last, node, node.next
            return last
    """
    tests = """
        from solution import Node, Vector, Sub, reverse
        a, b = Vector(1, 2), Vector(3, 4)
        assert a + b == Vector(4, 6) and 2 * a == Vector(2, 4) and a != b and not a == [1, 2]
        assert len(a) == 2 and a[1] == 2 and list(b) == [3, 4] and 3 in b and not Vector(0)
        assert repr(a) == str(a) == f"{a}" == "Vector(1, 2)" and {a: 5}[Vector(1, 2)] == 5
        assert a.first == 1 and Vector.ones(3) == Vector(1, 1, 1) and Vector.twice(4) == 8 and Vector.zero == 0
        assert isinstance(a, Vector) and isinstance(Sub(1), Vector) and not isinstance(Node(1), Vector)
        a[0] = 7
        a.extra = [1]
        assert a[0] == 7 and a.extra == [1] and not hasattr(a, 'nothing')
        with Vector(1) as c:
            assert c is not a
            raise KeyError
        assert len(c) == 0
        chain = Node(1, Node(2, Node(3)))
        first, node = chain, reverse(chain)
        assert node.value == 3 and node.next.next is first and first.next is None
    """
    assert score(sandbox, source, tests) == (1, "")


def test_arguments_are_written_back_and_keep_their_identity(sandbox):
    source = """
        def fill(rows, counts, seen, raw):
            rows.sort()
            rows[0].append(9)
            counts["x"] = rows
            seen.clear()
            raw.extend(b"!")
            return rows
        def keep(x): return x
    """
    tests = """
        rows, counts, seen, raw = [[3], [1]], {}, {1, 2}, bytearray(b"a")
        one, three = rows[1], rows[0]
        assert fill(rows, counts, seen=seen, raw=raw) is rows
        assert rows == [[1, 9], [3]] and rows[0] is one and rows[1] is three
        assert counts["x"] is rows and seen == set() and raw == b"a!"
        loop = [1]
        loop.append(loop)
        assert keep(loop) is loop and keep((1, 2.5, 2j, "é", b"b", None, True, range(3), frozenset([1]))) \\
            == (1, 2.5, 2j, "é", b"b", None, True, range(3), frozenset([1]))
        assert keep(10**300) == 10**300 and keep(-1) == -1 and repr(keep(float("nan"))) == "nan"
    """
    assert score(sandbox, source, tests) == (1, "")


def test_subclasses_of_plain_data_lose_their_class(sandbox):
    source = """
        from collections import Counter, OrderedDict, namedtuple, deque
        from enum import IntEnum
        P = namedtuple("P", "x y")
        class Level(IntEnum):
            LOW = 1
        def f(): return [Counter("aab"), P(1, 2), OrderedDict(a=1), Level.LOW, {1: 2}.keys(), (i for i in range(3))]
    """
    plain = "[{'a': 2, 'b': 1}, (1, 2), {'a': 1}, 1, [1], [0, 1, 2]]"
    test = f"found = f()\nassert found == {plain} and [type(x) for x in found] == [dict, tuple, dict, int, list, list]"
    assert score(sandbox, source, test) == (1, "")


def test_functions_of_the_test_are_called_back(sandbox):
    source = """
        def apply(f, xs): return [f(x) for x in xs]
        def retry(f):
            try:
                return f()
            except ValueError as error:
                return str(error)
        def double(x): return 2 * x
    """
    tests = """
        calls = []
        def note(x):
            calls.append(x)
            return double(x) + len(calls)
        assert apply(note, [1, 2]) == [3, 6] and calls == [1, 2]
        assert apply(double, [1]) == [2] and apply(str, [1]) == ["1"]
        def bad():
            raise ValueError("again")
        assert retry(bad) == "again"
    """
    assert score(sandbox, source, tests) == (1, "")


def test_exceptions_and_printed_text_cross(sandbox):
    source = """
        import sys
        class Empty(LookupError):
            pass
        class VeryEmpty(Empty):
            pass
        def pop(x):
            print("popping", x)
            print("warned", file=sys.stderr)
            raise VeryEmpty("nothing", 3)
        def key(): return {}["k"]
        def late():
            yield 1
            raise OSError(2, "gone")
    """
    tests = """
        import pytest
        from solution import Empty, VeryEmpty, pop, key, late
        def test_own(capsys):
            with pytest.raises(Empty, match="nothing") as info:
                pop(5)
            assert info.type is VeryEmpty and info.value.args == ("nothing", 3) and isinstance(info.value, LookupError)
            out = capsys.readouterr()
            assert out.out == "popping 5\\n" and out.err == "warned\\n"
        def test_built_in():
            with pytest.raises(KeyError) as info:
                key()
            assert str(info.value) == "'k'"
            with pytest.raises(FileNotFoundError):
                late()
            with pytest.raises(TypeError):
                key(1)
    """
    assert score(sandbox, source, tests, kind="pytest") == (1, "")


def test_names_are_visible_without_an_import_and_main_does_not_run(sandbox):
    source = """
        LIMIT = {"a": [1]}
        _hidden = 1
        def sum(xs): return "mine"
        def f(): return LIMIT
        if __name__ == "__main__":
            raise SystemExit(5)
    """
    tests = (
        "assert f() == LIMIT == {'a': [1]}\nassert sum([1, 2]) == 3\nassert '_hidden' not in globals()",
        "from solution import sum\nimport solution\nassert sum([1, 2]) == 'mine' == solution.sum([])",
        "LIMIT = 3\nassert LIMIT == 3",
    )
    assert score(sandbox, source, *tests) == (1, "")


@pytest.mark.parametrize(
    ("test", "right"),
    [
        ("def test_a():\n    assert f() == 1", 1),
        ("def test_a():\n    assert f() == 1\ndef test_b():\n    assert f() == 2", 0),
        ("def check_a():\n    assert f() == 1", 0),
        ("import pytest\n@pytest.mark.skip\ndef test_a():\n    pass", 0),
        ("import unittest\nclass T(unittest.TestCase):\n    def test_a(self):\n        self.assertEqual(f(), 1)", 1),
        ("assert f() == 2\ndef test_a():\n    pass", 0),
    ],
)
def test_pytest_cases_pass_when_all_collected_tests_passed(sandbox, test, right):
    assert score(sandbox, "def f():\n    return 1", test, kind="pytest")[0] == right


def test_programs_are_judged_by_output_and_exit_status(sandbox):
    assert output(sandbox, "print(input()[::-1])", "abc\n", "cba") == "correct"
    assert output(sandbox, "print(input())\nexit()", "abc", "abc  \n\n") == "correct"
    assert output(sandbox, "print(input())\nraise SystemExit(1)", "abc", "abc") == "crash"
    assert output(sandbox, "print(1)", "", "2") == "wrong"
    assert (
        output(sandbox, "def f():\n    import math\n    return math.pi > N\nN = 3\nprint(f())", "", "True") == "correct"
    )
    assert output(sandbox, "import numpy\nprint(numpy.arange(3).sum())", "", "3") == "correct"


def test_a_right_program_may_try_something_forbidden(sandbox):
    source = """
        import os, socket
        for attempt in (lambda: open("/etc/passwd"), lambda: socket.create_connection(("127.0.0.1", 22), 1),
                        lambda: os.kill(1, 9), lambda: open("/x", "w"), lambda: os.setuid(0)):
            try:
                attempt()
            except OSError:
                pass
        open("mine.txt", "w").write("9")
        print(open("/tmp/mine.txt").read(), os.getcwd(), sorted(os.environ))
    """
    names = ["HOME", "LANG", "MALLOC_ARENA_MAX", "MKL_NUM_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"]
    assert output(sandbox, source, "", f"9 /tmp {[*names, 'PATH', 'PYTHONHASHSEED']}") == "correct"


def test_output_is_compared_without_trailing_blanks():
    assert same_output("a \nb\n\n", "a\nb") and same_output("", "\n\n")
    assert not same_output(" a", "a") and not same_output("a\n\nb", "a\nb") and not same_output("a", "a\nb")


def test_modes():
    needs("unshare")
    row = code_row("assert", *({"assert_code": f"assert f({i}) == {i}"} for i in (1, 7, 2, 8)))
    text = fenced("def f(x):\n    return min(x, 5)")
    part, strict = (CodeSandbox(mode=mode, isolation="unshare")(text, row) for mode in ("fraction", "strict"))
    assert (part.score, part.acc, part.reason, part.extra["passed"]) == (0.5, 0.5, "partial", 2)
    assert (strict.score, strict.acc, strict.reason, strict.extra["passed"]) == (0.0, 0.0, "wrong", 1)


def test_a_row_has_a_limit_of_its_own():
    needs("unshare")
    sandbox, started = CodeSandbox(mode="fraction", isolation="unshare", row_s=2.0), time.monotonic()
    cases = [{"stdin": "", "expected_stdout": ""} for _ in range(50)]
    result = sandbox(fenced("import time\ntime.sleep(0.7)"), code_row("stdin", *cases))
    assert time.monotonic() - started < 6
    assert 0 < result.score < 0.1 and result.extra["first"] == "timeout"


ANSWERS = [
    ("```python\na\n```\n```py\nb\n```\n```\nc\n```", "b"),
    ("```\na\n```\n```\nb\n```\n```js\nc\n```", "b"),
    ("x = 1\nprint(x)", "x = 1\nprint(x)"),
    ("I would print x.", None),
    ("```js\nc\n```", None),
    ("  ```Python3 title\n  if x:\n      y\n  ```", "if x:\n    y"),
    ("~~~~python\na = '''\n```\n~~~\n'''\n~~~~", "a = '''\n```\n~~~\n'''"),
    ("```python\nunclosed = 1", "unclosed = 1"),
    ("```python\n\n```", None),
    ("", None),
]


@pytest.mark.parametrize(("answer", "program"), ANSWERS)
def test_the_program_of_an_answer(answer, program):
    assert extract_program(answer) == program


def test_answers_without_a_program(sandbox):
    row = code_row("stdin", {"stdin": "", "expected_stdout": "1"})
    assert sandbox("<think>```python\nprint(1)\n```", row).reason == "think_unclosed"
    assert sandbox("<think>```python\nprint(1)\n```</think>None.", row).reason == "no_code"
    assert sandbox("<think>no</think>```python\nprint(1)\n```", row).score == 1


def test_the_manager_scores_code_rows():
    needs("unshare")
    before = traces()
    row = code_row("assert", {"assert_code": "assert f() == 1"})
    spec = DomainSpec(timeout_s=80, score_map=(-1, 1), options={"isolation": "unshare"})
    with RewardManager({"code_sandbox": spec}, num_workers=1) as manager:
        texts = [fenced("def f():\n    return 1"), fenced("def f():\n    return 2")]
        futures = [manager.submit(text, row, response_length=1) for text in texts]
        assert [(f.result(60).score, f.result(60).acc) for f in futures] == [(1, 1), (-1, 0)]
    assert left_behind(before) == []


@pytest.mark.parametrize("kind", ["unshare", "bwrap"])
def test_nothing_outlives_a_killed_scoring_process(kind):
    needs(kind)
    before = traces()
    code = f"""
        from tests.trainer.sandbox_bench import code_row, fenced
        from trainer.reward.code_sandbox import CodeSandbox
        sandbox = CodeSandbox(isolation={kind!r})
        print("ready", flush=True)
        sandbox(fenced("while True: pass"), code_row("stdin", {{"stdin": "", "expected_stdout": ""}}))
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT) as scorer:
        assert scorer.stdout.readline() == b"ready\n"
        time.sleep(1.0)
        assert len(traces() - before) >= 3
        scorer.send_signal(signal.SIGKILL)
    assert left_behind(before) == []


def in_user_namespace(code: str, prepare: str = "true") -> str:
    """Run as user 1000 of a namespace of its own, where nothing is allowed that root could do."""
    enter = ["unshare", "--user", "--map-user=1000", "--map-group=1000"]
    if subprocess.run([*enter, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("no user namespaces here")
    script = f"{prepare} && exec {shlex.join([sys.executable, '-c', code])}"
    done = subprocess.run([*enter, "sh", "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60)
    return done.stdout + done.stderr


TROUBLE = """
import os
from trainer.reward.code.limits import Limits
from trainer.reward.code.selftest import find_trouble
print(os.getuid(), find_trouble("unshare", Limits()))
"""


def test_namespaces_without_root():
    assert in_user_namespace(TROUBLE) == "1000 None\n"


def test_the_start_says_what_is_missing():
    forbid = "unshare --user --map-root-user sh -c 'echo 0 > /proc/sys/user/max_user_namespaces; exec \"$@\"' sh"
    said = in_user_namespace(TROUBLE, f"{forbid} true")  # the probe itself must work
    assert said == "1000 None\n"
    code = textwrap.dedent(TROUBLE).replace('print(os.getuid(), find_trouble("unshare", Limits()))', CHOOSE)
    run = subprocess.run(
        [*shlex.split(forbid), "setpriv", "--bounding-set=-all", "--inh-caps=-all", sys.executable, "-c", code],
        **{"cwd": ROOT, "capture_output": True, "text": True, "timeout": 60},
    )
    assert "isolation=auto, which does not work here" in run.stdout, run
    assert "No space left" in run.stdout and "name reward.code_sandbox.isolation=rlimit" in run.stdout


CHOOSE = """
from trainer.reward.code.selftest import choose
try:
    print(choose("auto", Limits()))
except ValueError as error:
    print(error)
"""


def test_settings_and_hosts_that_cannot_work(monkeypatch):
    with pytest.raises(ValueError, match=r"timeout_s=60 with reward\.code_sandbox\.row_s=60; expected more"):
        check_start({"isolation": "unshare"}, 60.0)
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(ValueError, match=r"isolation=bwrap, which does not work here \(bwrap: no command bwrap\)"):
        choose("bwrap", Limits())


def test_no_more_rows_at_a_time_than_cores():
    cores = len(os.sched_getaffinity(0))
    assert processes(1000, {}) == cores and processes(1, {}) == 1
    assert processes(1000, {"url": "http://x", "max_concurrent": 64}) == 64
