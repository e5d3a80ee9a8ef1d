"""A rollout replica that dies costs time, not the step."""

import pytest

from tests.runs import DIGITS_REWARD, Run, metrics, overrides, untimed, write_inputs

pytestmark = [pytest.mark.gloo, pytest.mark.slow, pytest.mark.timeout(600)]

LOST = "rollout/lost_replicas"
# The first answer that is scored kills a replica of the same run: others are still being generated then.
KILLER = """
import os
import signal
from pathlib import Path


def kill_a_replica(flag):
    try:
        os.close(os.open(flag, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                same_run = f"RUN_ID={os.environ['RUN_ID']}".encode() in (entry / "environ").read_bytes()
                if same_run and b"RolloutWorker.generate" in (entry / "cmdline").read_bytes():
                    os.kill(int(entry.name), signal.SIGKILL)
                    return
            except OSError:
                continue
    os.unlink(flag)
"""
MAIN = """
def scored_at_some_cost(flag, **sample):
    kill_a_replica(flag)
    return compute_score(**sample)
"""
REPLICAS = (
    "data.max_response_length=48",
    "actor_rollout_ref.rollout.max_num_seqs=2",
    "trainer.total_training_steps=3",
    "trainer.save_freq=-1",
    "trainer.test_freq=-1",
    "trainer.val_before_train=False",
)
COLOCATED = (*REPLICAS, "trainer.n_gpus_per_node=2")
SEPARATE = (
    *REPLICAS,
    "trainer.v1.trainer_mode=separate_async",
    "trainer.v1.separate_async.parameter_sync_step=1",
    "actor_rollout_ref.rollout.nnodes=1",
    "actor_rollout_ref.rollout.n_gpus_per_node=2",
    "actor_rollout_ref.rollout.checkpoint_engine.backend=nccl",
)


@pytest.mark.parametrize("mode", ["colocated", "separate_async"])
def test_a_killed_replica_is_replaced_and_the_run_learns_the_same(tmp_path, mode):
    """Samples have random streams of their own, so what a fresh replica makes again is what was lost. Ahead of the
    updates the fresh one may hold newer weights than the lost one: the run ends well, its numbers may differ."""
    inputs = write_inputs(tmp_path)
    options = COLOCATED if mode == "colocated" else SEPARATE
    killer = tmp_path / "killer.py"
    killer.write_text(KILLER + DIGITS_REWARD + MAIN)
    function = "reward.custom_reward_function"
    deadly = (
        f"{function}.path={killer}",
        f"{function}.name=scored_at_some_cost",
        f"+{function}.reward_kwargs.flag={tmp_path}/killed",
    )
    run = Run(overrides(inputs, tmp_path / "disturbed", "fsdp", *options, *deadly))
    status, output = run.wait()
    assert status == 0, output
    assert "a fresh replica takes its place" in output
    run.wait_until_gone()
    rows = metrics(tmp_path / "disturbed")
    assert len(rows) == 3 and sum(float(row[LOST]) for row in rows) == 1
    if mode == "separate_async":
        assert max(float(row["training/staleness/max"]) for row in rows) <= 1
        return
    calm = Run(overrides(inputs, tmp_path / "calm", "fsdp", *options))
    status, output = calm.wait()
    assert status == 0, output
    without = [{name: value for name, value in row.items() if name != LOST} for row in untimed(rows)]
    expected = [
        {name: value for name, value in row.items() if name != LOST} for row in untimed(metrics(tmp_path / "calm"))
    ]
    assert without == expected
