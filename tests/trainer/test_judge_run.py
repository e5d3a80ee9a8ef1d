"""Whole runs with a judge: it answers, it refuses, it goes away, and a served model of vLLM is one too."""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from tests.runs import Run, metrics, overrides, write_inputs
from tests.trainer.judge_server import MODEL, JudgeServer, error, reply
from tests.vllm_process import needs_vllm

pytestmark = [pytest.mark.gloo, pytest.mark.slow, pytest.mark.timeout(500)]


def judge_rows(folder: Path) -> None:
    """In the place of the inputs' rows: questions that only a judge can mark."""
    for name, count in (("train", 12), ("val", 4)):
        rows = [{"id": i, "tag": "llm_judge", "prompt": f"{name} {i}?", "ground_truth": "yes"} for i in range(count)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def judged_run(folder: Path, base: str, model: str, *more: str) -> Run:
    inputs = write_inputs(folder)
    judge_rows(folder)
    settings = f"rewards={{llm_judge:{{api_base:'{base}',model:'{model}',max_retries:2,timeout_s:20}}}}"
    arguments = [text for text in overrides(inputs, folder / "run", "fsdp") if "custom_reward_function" not in text]
    brief = ("trainer.total_training_steps=3", "trainer.test_freq=-1", "trainer.val_before_train=False")
    return Run([*arguments, *brief, settings, *more])


def test_a_judge_marks_and_what_it_cannot_mark_is_left_out(tmp_path):
    """Every tenth request is refused: those samples are masked and counted, the run goes on."""
    seen = []

    def behave(body: dict) -> tuple:
        seen.append(body)
        if len(seen) % 10 == 0:
            return error(400, "too odd")
        return reply("VERDICT: YES" if len(seen) % 3 else "VERDICT: NO")

    server = JudgeServer(behave)
    try:
        run = judged_run(tmp_path, server.base, MODEL, "reward.max_failed_frac=0.5")
        status, output = run.wait()
    finally:
        server.close()
    assert status == 0, output
    rows = metrics(tmp_path / "run")
    failed = sum(float(row["reward/llm_judge/failed"]) for row in rows)
    assert len(rows) == 3 and failed > 0
    assert sum(float(row["reward/failed"]) for row in rows) == failed
    assert all(float(row["actor/samples_used"]) == 16 - float(row["reward/failed"]) for row in rows)
    assert all(0 < float(row["reward/llm_judge/mean"]) < 1 for row in rows)


def test_a_judge_that_goes_away_ends_the_run_with_a_checkpoint_to_go_on_from(tmp_path):
    server, served = None, []

    def behave(body: dict) -> tuple:
        served.append(body)
        # The first step's 32 samples, then nothing works any more.
        return reply("VERDICT: YES" if len(served) % 2 else "VERDICT: NO") if len(served) <= 32 else error(503)

    server = JudgeServer(behave)
    try:
        run = judged_run(tmp_path, server.base, MODEL, "rewards.llm_judge.max_down_s=5", "data.train_batch_size=8")
        status, output = run.wait()
        assert status == 3 and "it goes on from" in output, output
        assert (tmp_path / "run" / "global_step_1" / "COMPLETE").exists()
        server.behave = lambda body: reply(
            "VERDICT: YES" if len(body["messages"][-1]["content"]) % 2 else "VERDICT: NO"
        )
        again = Run(run.process.args[3:])
        status, output = again.wait()
        assert status == 0 and "next is step 2" in output, output
    finally:
        server.close()
    assert [row["training/global_step"] for row in metrics(tmp_path / "run")] == ["1", "2", "3"]


@needs_vllm[0]
@needs_vllm[1]
def test_a_served_tiny_model_is_a_judge(tmp_path):
    """A random model gives no verdict: its replies come, are counted as unparsed, and the samples are left out."""
    inputs = write_inputs(tmp_path / "judge", head_dim=32, max_position_embeddings=2048)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = subprocess.Popen(
        [
            *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(inputs["model"])),
            *("--served-model-name", "tiny", "--port", str(port), "--host", "127.0.0.1", "--enforce-eager"),
            *("--dtype", "float32", "--max-model-len", "2048", "--kv-cache-memory-bytes", str(2**28)),
        ],
        env=os.environ | {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    base = f"http://127.0.0.1:{port}/v1"
    try:
        deadline = time.monotonic() + 180
        while not _answers(f"{base}/models"):
            assert server.poll() is None, server.stderr.read()[-3000:]
            assert time.monotonic() < deadline, "the served model did not come up"
            time.sleep(0.5)
        limits = ("rewards.llm_judge.max_tokens=8", "reward.max_failed_frac=1.0", "trainer.total_training_steps=1")
        run = judged_run(tmp_path, base, "tiny", *limits)
        status, output = run.wait()
    finally:
        server.terminate()
        server.wait(30)
    assert status == 0, output
    (row,) = metrics(tmp_path / "run")
    assert float(row["reward/llm_judge/unparsed"]) > 0 and float(row["reward/failed"]) == 16
    assert "actor/optimizer_steps" not in row and float(row["mask/final_mask_sum_eq_0"]) == 1


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as response:
            return response.status == 200
    except OSError:
        return False
