"""Bad input ends with a three-part error before any worker starts, exit status 2, and leaves no run behind."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runs import REPOSITORY, overrides, write_inputs

MEGATRON = "actor_rollout_ref.actor.megatron"
ONE_SEQUENCE = "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1"


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> dict[str, Path]:
    return write_inputs(tmp_path_factory.mktemp("inputs"))


def _edit_config(folder: Path, **changes: object) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder


def _start(inputs: dict[str, Path], tmp_path: Path, *more: str) -> subprocess.CompletedProcess:
    # Ray would be found at this address only if somebody tried to start it.
    environment = {**os.environ, "RAY_ADDRESS": "127.0.0.1:1"}
    arguments = overrides(inputs, tmp_path / "run", "megatron", *more)
    return subprocess.run(
        [sys.executable, "-m", "trainer.main", *arguments],
        cwd=REPOSITORY,
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
    )


CONFIG_CASES = {
    "misspelt key": (
        ["actor_rollout_ref.rollout.temprature=1"],
        "ConfigError[key.unknown] actor_rollout_ref.rollout.temprature",
        "actor_rollout_ref.rollout.temperature=1",
    ),
    "misspelt key with a plus": (["+data.max_promt_length=7"], "ConfigError[key.unknown]", "data.max_prompt_length=7"),
    "mini-batch not divisible": (
        ["trainer.n_gpus_per_node=3"],
        "ConfigError[batch.mini_dp] actor_rollout_ref.actor.ppo_mini_batch_size",
        "do this:",
    ),
    "TP not dividing heads": (
        ["trainer.n_gpus_per_node=3", f"{MEGATRON}.tensor_model_parallel_size=3"],
        "ConfigError[par.heads]",
        "tensor_model_parallel_size=",
    ),
    "missing model path": (["actor_rollout_ref.model.path=/no/such/model"], "ConfigError[model.path]", "do this:"),
    "missing data file": (["data.train_files=/no/such/file.jsonl"], "/no/such/file.jsonl", "do this:"),
    "unknown engine": (["model_engine=deepspeed"], "deepspeed", "fsdp"),
}


@pytest.mark.parametrize("case", CONFIG_CASES)
def test_configuration(inputs, tmp_path, case):
    more, got, fix = CONFIG_CASES[case]
    run = _start(inputs, tmp_path, *more)
    assert run.returncode == 2, run.stderr
    assert got in run.stderr and fix in run.stderr, run.stderr
    for part in ("got:", "expected:", "do this:"):
        assert part in run.stderr, run.stderr
    assert "Traceback" not in run.stderr
    assert not (tmp_path / "run").exists()


def test_unsupported_architecture_names_the_supported_ones(inputs, tmp_path):
    other = write_inputs(tmp_path)
    _edit_config(other["model"], architectures=["MambaForCausalLM"], model_type="mamba")
    run = _start(other, tmp_path)
    assert run.returncode == 2, run.stderr
    assert "MambaForCausalLM" in run.stderr and "Qwen3ForCausalLM" in run.stderr, run.stderr


@pytest.mark.parametrize(
    "content,parts",
    [
        ("", ["[D03]", "0 rows", "at least 1"]),
        (
            json.dumps({"id": 1, "tag": "math_rule", "prompt": "2+2?"}) + "\n",
            ["[D19]", ":1 field 'ground_truth'", "missing"],
        ),
        ('{"id": 1, "tag": "math_rule", "prompt": "2+2?", "ground_truth": "4"', ["[D05]", ":1"]),
    ],
    ids=["empty file", "row without ground_truth", "cut last line"],
)
def test_data(inputs, tmp_path, content, parts):
    bad = tmp_path / "bad.jsonl"
    bad.write_text(content)
    more = [f"data.train_files={bad}", "reward.custom_reward_function.path=null"]
    run = _start(inputs, tmp_path, *more)
    assert run.returncode == 2, run.stderr
    for part in parts:
        assert part in run.stderr, run.stderr
    assert "Traceback" not in run.stderr
    assert not (tmp_path / "run").exists()


def test_more_ranks_than_cores_is_a_warning(inputs, tmp_path):
    run = _start(inputs, tmp_path, "trainer.n_gpus_per_node=8", ONE_SEQUENCE, "--dry-run")
    assert run.returncode == 0, run.stderr
    assert "cores" in run.stderr, run.stderr
