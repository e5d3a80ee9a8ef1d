"""Whole runs of a tiny mixture of experts with routing replay: the routes of the rollout (R3), and those of the
log-prob pass (R2)."""

import pytest

from tests.runs import Run, metrics, overrides, write_inputs

pytestmark = [pytest.mark.gloo, pytest.mark.slow, pytest.mark.timeout(400)]

MODE = "actor_rollout_ref.actor.router_replay.mode"
# At this rate weights hardly move: live routing would choose nearly all that is replayed.
STILL = "actor_rollout_ref.actor.optim.lr=1e-6"
TWO_STEPS = ("trainer.total_training_steps=2", "trainer.save_freq=-1", "trainer.test_freq=-1")
RUNS = {
    "R3": ("megatron", "trainer.n_gpus_per_node=2", "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2"),
    "R2": ("fsdp", "actor_rollout_ref.actor.ppo_epochs=2"),
}


@pytest.mark.parametrize("mode", RUNS)
def test_a_run_replays_every_route_it_has(tmp_path, mode):
    inputs, run_dir = write_inputs(tmp_path, "qwen3_moe"), tmp_path / "run"
    engine, *more = RUNS[mode]
    run = Run(overrides(inputs, run_dir, engine, f"{MODE}={mode}", *TWO_STEPS, STILL, *more))
    status, output = run.wait()
    assert status == 0, output
    run.wait_until_gone()
    rows = [row for row in metrics(run_dir) if row["actor/optimizer_steps"]]
    assert len(rows) == 2
    for row in rows:
        assert float(row["training/rollout_probs_diff_max"]) < 1e-5
        assert float(row["routing/overlap_ratio"]) > 0.999
        tokens, epochs = float(row["perf/total_num_tokens"]), 2 if mode == "R2" else 1
        assert float(row["routing/replayed_rows"]) == epochs * (tokens - 16)  # all but the last of 16 samples
        if mode == "R3":
            assert row["routing/invalid_samples"] == "0" and float(row["routing/invalid_ratio"]) == 0
        else:
            assert "routing/invalid_samples" not in row
