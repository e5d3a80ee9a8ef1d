"""A whole run whose rollout is vLLM: it agrees with the trainer in every step, and its routes are replayed (R3)."""

from __future__ import annotations

import pytest

from tests.engines.vllm_bench import CHANGES
from tests.runs import Run, metrics, overrides, write_inputs
from tests.vllm_process import needs_vllm

pytestmark = [*needs_vllm, pytest.mark.gloo, pytest.mark.slow, pytest.mark.timeout(600)]


def test_a_run_replays_the_routes_of_vllm(tmp_path):
    inputs, run_dir = write_inputs(tmp_path, "qwen3_moe", **CHANGES["qwen3_moe"]), tmp_path / "run"
    run = Run(
        overrides(
            inputs,
            run_dir,
            "megatron",
            "actor_rollout_ref.rollout.name=vllm",
            "actor_rollout_ref.actor.router_replay.mode=R3",
            "trainer.n_gpus_per_node=1",
            "trainer.total_training_steps=2",
            "trainer.save_freq=-1",
            "trainer.test_freq=-1",
            "trainer.val_before_train=False",
            # At this rate weights hardly move: live routing would choose nearly all that is replayed.
            "actor_rollout_ref.actor.optim.lr=1e-6",
        )
    )
    status, output = run.wait(timeout=500)
    assert status == 0, output
    run.wait_until_gone()
    rows = [row for row in metrics(run_dir) if row["actor/optimizer_steps"]]
    assert len(rows) == 2
    for row in rows:
        assert float(row["training/rollout_probs_diff_max"]) < 1e-5
        assert float(row["routing/overlap_ratio"]) > 0.999
        tokens = float(row["perf/total_num_tokens"])
        assert float(row["routing/replayed_rows"]) == tokens - 16  # all but the last of 16 samples
        assert row["routing/invalid_samples"] == "0" and float(row["routing/invalid_ratio"]) == 0
