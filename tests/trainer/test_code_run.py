"""A whole run on code rows: the sandbox is tried out at the start and scores in processes of its own."""

import json

import pytest

from tests.runs import Run, metrics, overrides, write_inputs
from tests.trainer.sandbox_bench import needs

pytestmark = [pytest.mark.gloo, pytest.mark.slow, pytest.mark.timeout(400)]


def test_a_run_on_code_rows(tmp_path):
    needs("unshare")
    inputs, run_dir = write_inputs(tmp_path), tmp_path / "run"
    case = {"stdin": "1\n", "expected_stdout": "1\n"}
    for name in ("train", "val"):
        # codecontests belongs to code_sandbox without a word in the configuration
        rows = [
            {"id": i, "tag": "codecontests", "prompt": f"{name} {i}?", "case_type": "stdin", "test_cases": [case]}
            for i in range(4)
        ]
        inputs[name].write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = ("reward.code_sandbox.isolation=unshare", "reward.code_sandbox.mode=fraction", "trainer.save_freq=-1")
    asked = overrides(inputs, run_dir, "fsdp", "trainer.total_training_steps=1", *settings)
    asked = [item for item in asked if "custom_reward_function" not in item and "save_contents" not in item]
    run = Run([*asked, f"trainer.rollout_data_dir={run_dir}/rollouts"])
    status, output = run.wait()
    assert status == 0, output
    run.wait_until_gone()
    row = metrics(run_dir)[-1]
    assert float(row["reward/code_sandbox/failed"]) == 0 and float(row["reward/code_sandbox/latency_max"]) > 0
    samples = [json.loads(line) for line in (run_dir / "rollouts" / "1.jsonl").read_text().splitlines()]
    assert len(samples) == 16 and {sample["reason"] for sample in samples} <= {"no_code", "crash", "wrong"}
