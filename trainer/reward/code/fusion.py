"""Programs run by a sandbox-fusion service (github.com/bytedance/SandboxFusion) instead of this host."""

from __future__ import annotations

import json
import secrets
import time
from functools import cache
from typing import Any

import httpx

from trainer.reward.code.cases import KEPT_CHARACTERS, CaseOutcome, CaseState, judged, same_output
from trainer.reward.code.isolation import INSIDE, PACKAGES
from trainer.reward.code.limits import Limits
from trainer.reward.code.room import RoomBroken

PATH = "run_code"
WAITS_S = (1.0, 2.0, 4.0)  # before further tries
SPARE_S = 10.0  # for the service to start and to answer
MODULES = ("__init__", "kernel", "wire", "peer", "serve", "standin", "check", "remote")


class FusionClient:
    """Same rules of judging as on this host. Raises RoomBroken when the service fails, after its retries.

    `url` is that of the service or of its `run_code`.
    """

    def __init__(self, url: str, memory_limit_mb: int, limits: Limits) -> None:
        self._url = url.rstrip("/") if url.rstrip("/").endswith(f"/{PATH}") else f"{url.rstrip('/')}/{PATH}"
        self._memory_mb, self._limits = memory_limit_mb, limits
        self._client = httpx.Client()

    def run_case(self, source: str, case_type: str, case: dict[str, Any], seconds: float) -> CaseOutcome:
        """The outcome of one case within `seconds`, or the wall limit where that is less."""
        wall_s = min(self._limits.wall_s, seconds)
        if case_type == "stdin":
            state, run = self._run(source, case["stdin"], wall_s)
            if state is not None:
                return CaseOutcome(state, str(run["stderr"])[-KEPT_CHARACTERS:])
            right = same_output(run["stdout"], case["expected_stdout"])
            return CaseOutcome(CaseState.PASSED if right else CaseState.WRONG)
        nonce = secrets.token_hex(16)
        told = {"solution": source, "kind": case_type, "code": case["assert_code"], "nonce": nonce}
        state, run = self._run(driver(), json.dumps(told), wall_s)
        return _verdict(state, run, nonce)

    def _run(self, code: str, stdin: str, wall_s: float) -> tuple[CaseState | None, dict[str, Any]]:
        """(None when the program ended well, what the service says about the run)."""
        reply = self._post(
            {
                "code": code,
                "stdin": stdin,
                "language": "python",
                "run_timeout": wall_s,
                "compile_timeout": wall_s,
                "memory_limit_MB": self._memory_mb,
            },
            wall_s + SPARE_S,
        )
        run = reply.get("run_result")
        if not isinstance(run, dict) or reply.get("status") not in ("Success", "Failed"):
            raise RoomBroken(f"{self._url} says {str(reply.get('status'))[:50]}: {str(reply.get('message'))[:200]}")
        run = {"stdout": run.get("stdout") or "", "stderr": run.get("stderr") or "", **_ending(run)}
        if run["status"] == "TimeLimitExceeded":
            return CaseState.TIMEOUT, run
        if run["status"] != "Finished" or run["return_code"] != 0:
            return CaseState.CRASHED, run
        return None, run

    def _post(self, body: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        for wait_s in (*WAITS_S, None):
            try:
                response = self._client.post(self._url, json=body, timeout=timeout_s)
                trouble = f"{self._url} answered {response.status_code}: {response.text[:200]}"
                if response.status_code == 200:
                    reply = response.json()
                    if isinstance(reply, dict) and reply.get("status") != "SandboxError":
                        return reply
                elif response.status_code < 500 and response.status_code != 429:
                    break
            except (httpx.HTTPError, json.JSONDecodeError) as error:
                trouble = f"{self._url}: {type(error).__name__} {error}"
            if wait_s is not None:
                time.sleep(wait_s)
        raise RoomBroken(trouble)


@cache
def driver() -> str:
    """One program that carries our modules as text and runs inside/remote.py with them."""
    sources = {f"{PACKAGES[-1]}.inside.{name}": (INSIDE / f"{name}.py").read_text() for name in MODULES}
    sources[f"{PACKAGES[-1]}.inside"] = sources.pop(f"{PACKAGES[-1]}.inside.__init__")
    boot = (
        f"SOURCES = {sources!r}\n"
        "import importlib.abc, importlib.util, sys\n"
        "class Carried(importlib.abc.MetaPathFinder, importlib.abc.InspectLoader):\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        package = name.endswith('.inside')\n"
        "        return importlib.util.spec_from_loader(name, self, is_package=package) if name in SOURCES else None\n"
        "    def get_source(self, name):\n"
        "        return SOURCES[name]\n"
        "sys.meta_path.insert(0, Carried())\n"
        f"for name in {PACKAGES!r}:\n"
        "    sys.modules[name] = type(sys)(name)\n"
        "    sys.modules[name].__path__ = []\n"
    )
    return f"BOOT = {boot!r}\nexec(BOOT)\nfrom {PACKAGES[-1]}.inside.remote import main\nmain(BOOT)\n"


def _ending(run: dict[str, Any]) -> dict[str, Any]:
    return {"status": run.get("status"), "return_code": run.get("return_code")}


def _verdict(state: CaseState | None, run: dict[str, Any], nonce: str) -> CaseOutcome:
    """From the line that starts with the nonce: only the driver knows it, and it read it from its stdin."""
    lines = [line.removeprefix(f"{nonce} ") for line in run["stdout"].splitlines() if line.startswith(f"{nonce} ")]
    if state is not None or not lines:
        return CaseOutcome(state or CaseState.CRASHED, str(run["stderr"])[-KEPT_CHARACTERS:])
    return judged(json.loads(lines[-1]), str(run["stderr"]))
