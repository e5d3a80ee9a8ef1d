"""A service with the sandbox-fusion protocol instead of this host: same verdicts, and failures are no verdicts."""

import contextlib
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from tests.trainer.attacks import ATTACKS
from tests.trainer.sandbox_bench import code_row, fenced, sample_rows
from trainer.reward import DomainSpec, RewardManager
from trainer.reward.code import fusion
from trainer.reward.code.cases import CaseState
from trainer.reward.code.limits import Limits
from trainer.reward.code.room import RoomBroken
from trainer.reward.code_sandbox import CodeSandbox

OK = {"status": "Success", "message": "", "compile_result": None}
ROW = code_row("stdin", {"stdin": "3\n", "expected_stdout": "9\n"})
SQUARE = fenced("print(int(input()) ** 2)")


def run_code(request: dict[str, Any], folder: str) -> tuple[int, Any]:
    """What the service does with a Python program, without its walls."""
    command = [sys.executable, "-c", request["code"]]
    try:
        done = subprocess.run(
            command,
            **{"input": request["stdin"], "capture_output": True, "text": True, "cwd": folder},
            timeout=request["run_timeout"],
        )
    except subprocess.TimeoutExpired:
        run = {"status": "TimeLimitExceeded", "return_code": None, "stdout": "", "stderr": ""}
        return 200, {**OK, "status": "Failed", "run_result": run}
    run = {"status": "Finished", "return_code": done.returncode, "stdout": done.stdout, "stderr": done.stderr}
    return 200, {**OK, "status": "Failed" if done.returncode else "Success", "run_result": run}


@contextlib.contextmanager
def serve(answer: Callable[[dict[str, Any]], tuple[int, Any]]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """(address, list of requests so far) of a server on this host."""
    requests: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            requests.append({**request, "path": self.path})
            status, reply = answer(request)
            body = reply if isinstance(reply, bytes) else json.dumps(reply).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", requests
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(fusion, "WAITS_S", (0.0, 0.0))


def test_the_service_gives_the_verdicts_of_this_host(tmp_path):
    with serve(lambda request: run_code(request, str(tmp_path))) as (url, requests):
        sandbox = CodeSandbox(url=f"{url}/run_code", memory_limit_mb=77, wall_s=9.0)
        for row, source in sample_rows()[::2]:
            assert sandbox(fenced(source), row).score == 1
            if row.case_type != "stdin":
                assert sandbox(fenced(source.replace("return", "return None and ")), row).score == 0
        assert sandbox(fenced("print(8)"), ROW).reason == "wrong"
        assert sandbox(fenced("print(9)\n1 / 0"), ROW).reason == "crash"
    assert {request["path"] for request in requests} == {"/run_code"}
    sent = {(r["language"], r["memory_limit_MB"], r["run_timeout"]) for r in requests}
    assert sent == {("python", 77, 9.0)}


def test_time_limits_of_the_service(tmp_path):
    with serve(lambda request: run_code(request, str(tmp_path))) as (url, _):
        sandbox = CodeSandbox(url=url, wall_s=1.0)
        assert sandbox(fenced("while True: pass"), ROW).reason == "timeout"


@pytest.mark.parametrize("number", [1, 2, 3, 4, 6, 8, 9, 10, 11, 15, 35, 36, 37])
def test_attacks_on_the_verdict_fail_there_too(tmp_path, number):
    """Those that need no walls: the service has its own."""
    chosen = [attack for attack in ATTACKS if attack.number == number and attack.cases[0] != "stdin"]
    with serve(lambda request: run_code(request, str(tmp_path))) as (url, _):
        sandbox = CodeSandbox(url=url, wall_s=8.0)
        for attack in chosen[:1]:
            kind, cases = attack.cases
            result = sandbox(attack.answer, code_row(kind, *cases))
            assert (result.score, result.acc, result.failed) == (0.0, 0.0, False), attack.name


BROKEN = {
    "server error": (500, b"busy"),
    "too many": (429, b"slow down"),
    "its own error": (200, {**OK, "status": "SandboxError", "message": "no room"}),
    "no JSON": (200, b"<html>"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_failing_service_is_asked_again_and_then_the_sample_fails(quick, name):
    with serve(lambda request: BROKEN[name]) as (url, requests):
        result = CodeSandbox(url=url)(SQUARE, ROW)
    assert len(requests) == 3
    assert (result.score, result.acc, result.failed, result.reason) == (0.0, None, True, "sandbox_broken")
    assert url in result.extra["error"]


def test_a_service_that_recovers_gives_its_verdict(quick, tmp_path):
    answers = iter([(503, b""), (200, {**OK, "status": "SandboxError"})])
    with serve(lambda request: next(answers, None) or run_code(request, str(tmp_path))) as (url, requests):
        assert CodeSandbox(url=url)(SQUARE, ROW).score == 1
    assert len(requests) == 3


def test_a_refusal_is_not_repeated(quick):
    with serve(lambda request: (422, b"no such language")) as (url, requests):
        result = CodeSandbox(url=url)(SQUARE, ROW)
    assert result.failed and "answered 422: no such language" in result.extra["error"] and len(requests) == 1


def test_a_service_that_is_not_there_fails_like_a_broken_room(quick, monkeypatch):
    remote = CodeSandbox(url="http://127.0.0.1:9")(SQUARE, ROW)

    def broken(*arguments):
        raise RoomBroken("no namespaces")

    local = CodeSandbox(url="http://127.0.0.1:9")
    monkeypatch.setattr(local, "_run", broken)
    here = local(SQUARE, ROW)
    assert (remote.score, remote.acc, remote.failed, remote.reason) == (here.score, here.acc, here.failed, here.reason)


def test_a_verdict_needs_the_secret_of_the_request():
    run = {"status": "Finished", "return_code": 0, "stdout": 'abc {"passed": true, "detail": ""}\n', "stderr": ""}
    with serve(lambda request: (200, {**OK, "run_result": run})) as (url, _):
        client = fusion.FusionClient(url, 64, Limits())
        outcome = client.run_case("", "assert", {"assert_code": "assert f() == 1"}, 10.0)
    assert outcome.state is CaseState.CRASHED


def test_the_manager_uses_the_service(tmp_path):
    with serve(lambda request: run_code(request, str(tmp_path))) as (url, requests):
        spec = DomainSpec(timeout_s=80, options={"url": url, "max_concurrent": 3, "memory_limit_mb": 64})
        with RewardManager({"code_sandbox": spec}, num_workers=2) as manager:
            assert manager.submit(SQUARE, ROW, response_length=1).result(60).score == 1
    assert len(requests) == 1
