"""A small OpenAI-compatible server on this machine whose replies a test decides."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MODEL = "judge-7b"
Answer = tuple[int, dict[str, str], Any]  # status, headers, body


def reply(text: str | None, finish: str = "stop") -> Answer:
    message = {"role": "assistant", "content": text}
    return 200, {}, {"choices": [{"index": 0, "message": message, "finish_reason": finish}]}


def error(status: int, text: str = "no", **headers: str) -> Answer:
    return status, {name.replace("_", "-"): value for name, value in headers.items()}, {"error": text}


class _Http(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128  # the usual 5 makes some of many clients wait a second to be heard


class JudgeServer:
    """`behave` turns a chat request into an answer; `requests` keeps what came, `peak` the most at a time."""

    def __init__(self, behave: Callable[[dict[str, Any]], Answer], port: int = 0) -> None:
        self.behave, self.models = behave, [MODEL]
        self.requests: list[dict[str, Any]] = []
        self.keys: set[str | None] = set()
        self.piece, self.pause = 1 << 20, 0.0  # bytes written at a time and seconds after each write
        self.probes = self.peak = self._now = 0
        self._lock = threading.Lock()
        self._http = _Http(("127.0.0.1", port), self._handler())
        self.port = self._http.server_address[1]
        self.base = f"http://127.0.0.1:{self.port}/v1"
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    def answer_chat(self, body: dict[str, Any]) -> Answer:
        with self._lock:
            self.requests.append(body)
            self._now += 1
            self.peak = max(self.peak, self._now)
        try:
            return self.behave(body)
        finally:
            with self._lock:
                self._now -= 1

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                server.probes += 1
                self._send(200, {}, {"data": [{"id": name} for name in server.models]})

            def do_POST(self) -> None:
                server.keys.add(self.headers.get("Authorization"))
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                self._send(*server.answer_chat(body))

            def _send(self, status: int, headers: dict[str, str], body: Any) -> None:
                data = body if isinstance(body, bytes) else json.dumps(body).encode()
                self.send_response(status)
                for name, value in {**headers, "Content-Length": str(len(data))}.items():
                    self.send_header(name, value)
                self.end_headers()
                for start in range(0, len(data), server.piece):
                    self.wfile.write(data[start : start + server.piece])
                    time.sleep(server.pause)

            def log_message(self, *arguments: Any) -> None:
                """Quiet."""

        return Handler


@contextmanager
def serving(behave: Callable[[dict[str, Any]], Answer], port: int = 0) -> Iterator[JudgeServer]:
    server = JudgeServer(behave, port)
    try:
        yield server
    finally:
        server.close()


def script(*answers: Answer) -> Callable[[dict[str, Any]], Answer]:
    """One answer after the other, the last one for ever."""
    left = list(answers)
    lock = threading.Lock()

    def behave(_: dict[str, Any]) -> Answer:
        with lock:
            return left.pop(0) if len(left) > 1 else left[0]

    return behave


def slow(seconds: float, answer: Answer) -> Callable[[dict[str, Any]], Answer]:
    def behave(_: dict[str, Any]) -> Answer:
        time.sleep(seconds)
        return answer

    return behave
