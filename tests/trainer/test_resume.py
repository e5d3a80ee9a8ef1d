"""A run that is killed and started again ends exactly like one that was left alone."""

import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.runs import Run, metrics, overrides, untimed, write_inputs

pytestmark = [pytest.mark.slow, pytest.mark.gloo, pytest.mark.timeout(900)]

PAUSE = "reward.custom_reward_function.reward_kwargs.pause=0.05"  # 16 answers, one scorer: a step lasts 0.8 s


def _final_weights(run_dir: Path) -> dict:
    return load_file(run_dir / "global_step_6" / "hf_model" / "model.safetensors")


def _assert_same_run(straight: Path, resumed: Path) -> None:
    assert untimed(metrics(resumed)) == untimed(metrics(straight))
    expected, got = _final_weights(straight), _final_weights(resumed)
    assert expected.keys() == got.keys()
    assert all(expected[name].equal(got[name]) for name in expected)


@pytest.mark.parametrize("engine", ["fsdp", "megatron"])
def test_killed_and_resumed_equals_straight(tmp_path, engine):
    inputs = write_inputs(tmp_path)
    more = ("trainer.n_gpus_per_node=2", PAUSE)
    run = Run(overrides(inputs, tmp_path / "straight", engine, *more))
    status, output = run.wait()
    assert status == 0, output
    run.wait_until_gone()

    # kill -9 of the driver in the middle of step 4; the newest checkpoint is the one of step 2
    arguments = overrides(inputs, tmp_path / "driver", engine, *more)
    run = Run(arguments)
    run.wait_for_step(tmp_path / "driver", 3)
    time.sleep(0.4)
    run.kill(run.process.pid)
    # No worker outlives its driver. Ray's agents do for a minute: they try to report to a store that died with it.
    run.wait_until_gone(but="ray::(DashboardAgent|RuntimeEnvAgent)")
    assert not (tmp_path / "driver" / "global_step_4").exists()
    status, output = Run(arguments).wait()
    assert status == 0 and "next is step 3" in output, output
    _assert_same_run(tmp_path / "straight", tmp_path / "driver")

    # kill -9 of one training rank: the driver says so once, ends, and leaves nobody behind
    arguments = overrides(inputs, tmp_path / "worker", engine, *more)
    run = Run(arguments)
    run.wait_for_step(tmp_path / "worker", 3)
    time.sleep(0.4)
    ranks = [pid for pid, command in run.processes().items() if "TrainWorker" in command]
    assert len(ranks) == 2, run.processes()
    run.kill(ranks[1])
    status, output = run.wait(timeout=90)
    assert status == 1 and output.count("the process died") == 1, output
    run.wait_until_gone()
    status, output = Run(arguments).wait()
    assert status == 0 and "next is step 3" in output, output
    _assert_same_run(tmp_path / "straight", tmp_path / "worker")

    # a checkpoint cut short by hand is detected, the previous one is used, and it says so
    shard = next(iter(sorted((tmp_path / "worker" / "global_step_6" / "actor").iterdir())))
    shard.write_bytes(shard.read_bytes()[:-100])
    status, output = Run(arguments).wait()
    assert status == 0 and "is damaged" in output and "next is step 5" in output, output
    _assert_same_run(tmp_path / "straight", tmp_path / "worker")
