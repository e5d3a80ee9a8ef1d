"""A rollout replica that dies costs time, not the step."""

import threading
import time

import pytest

from tests.runs import Run, metrics, overrides, untimed, write_inputs

pytestmark = [pytest.mark.gloo, pytest.mark.slow, pytest.mark.timeout(600)]

LOST = "rollout/lost_replicas"
TWO_REPLICAS = (
    "trainer.n_gpus_per_node=2",
    "data.max_response_length=64",
    "actor_rollout_ref.rollout.ignore_eos=True",
    "trainer.total_training_steps=3",
    "trainer.save_freq=-1",
    "trainer.test_freq=-1",
    "trainer.val_before_train=False",
)
SEPARATE = (
    *TWO_REPLICAS,
    "trainer.n_gpus_per_node=1",
    "trainer.v1.trainer_mode=separate_async",
    "trainer.v1.separate_async.parameter_sync_step=1",
    "actor_rollout_ref.rollout.nnodes=1",
    "actor_rollout_ref.rollout.n_gpus_per_node=2",
    "actor_rollout_ref.rollout.checkpoint_engine.backend=nccl",
)


def killed_in_generation(run: Run) -> None:
    """Kill -9 a replica while it generates (Ray names the process after the method it runs)."""
    deadline = time.monotonic() + 180
    while time.monotonic() < deadline and run.process.poll() is None:
        for pid, name in run.processes().items():
            if "RolloutWorker.generate" in name:
                run.kill(pid)
                return
        time.sleep(0.005)


@pytest.mark.parametrize("mode", ["colocated", "separate_async"])
def test_a_killed_replica_is_replaced_and_the_run_learns_the_same(tmp_path, mode):
    """Samples have random streams of their own, so what a fresh replica makes again is what was lost. Ahead of the
    updates the fresh one may hold newer weights than the lost one: the run ends well, its numbers may differ."""
    inputs = write_inputs(tmp_path)
    options = TWO_REPLICAS if mode == "colocated" else SEPARATE
    run = Run(overrides(inputs, tmp_path / "disturbed", "fsdp", *options))
    killer = threading.Thread(target=killed_in_generation, args=(run,))
    killer.start()
    status, output = run.wait()
    killer.join()
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
