"""Whole runs: what they write, and that the training engine does not change what is learned."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.runs import Run, metrics, overrides, untimed, write_inputs

pytestmark = [pytest.mark.gloo, pytest.mark.timeout(400)]

MEGATRON = "actor_rollout_ref.actor.megatron"
FIRST_STAGE = f"+{MEGATRON}.override_transformer_config.num_layers_in_first_pipeline_stage=1"
EVERYTHING = (
    "trainer.n_gpus_per_node=2",
    f"{MEGATRON}.pipeline_model_parallel_size=2",
    FIRST_STAGE,
    "actor_rollout_ref.hybrid_engine=False",
    "actor_rollout_ref.rollout.nnodes=1",
    "actor_rollout_ref.rollout.n_gpus_per_node=1",
    "actor_rollout_ref.actor.use_kl_loss=True",
    "actor_rollout_ref.actor.kl_loss_coef=0.1",
    "actor_rollout_ref.actor.entropy_coeff=0.01",
    "actor_rollout_ref.actor.ppo_epochs=2",
    "actor_rollout_ref.actor.clip_ratio_high=0.28",
    "actor_rollout_ref.rollout.temperature=0.8",
    "actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.verify_every=1",
    "actor_rollout_ref.rollout.val_kwargs.n=2",
    "actor_rollout_ref.rollout.val_kwargs.temperature=1.0",
    "trainer.total_training_steps=2",
    "trainer.logger=[console,tensorboard,jsonl]",
    "trainer.log_val_generations=2",
)


def test_a_run_with_everything_writes_what_it_promises(tmp_path):
    """Megatron PP2 with a reference model, KL and entropy terms, two epochs, and a rollout on its own device."""
    inputs, run_dir = write_inputs(tmp_path), tmp_path / "run"
    dumps = (f"trainer.rollout_data_dir={run_dir}/rollouts", f"trainer.validation_data_dir={run_dir}/validation")
    run = Run(overrides(inputs, run_dir, "megatron", *EVERYTHING, *dumps))
    status, output = run.wait()
    assert status == 0, output
    run.wait_until_gone()

    rows = metrics(run_dir)
    assert [row["training/global_step"] for row in rows] == ["0", "1", "2"]
    for row in rows[1:]:
        assert float(row["training/rollout_probs_diff_max"]) < 1e-5
        assert row["actor/optimizer_steps"] == "4" and row["actor/nonfinite_grad_steps"] == "0"
        for name in ("timing_s/gen", "timing_s/update_actor", "perf/max_memory_allocated_gb", "perf/throughput"):
            assert float(row[name]) > 0, name
    assert float(rows[1]["actor/kl_loss"]) > 0  # the second epoch has moved away from the reference
    assert {row["val-core/math_rule/acc/mean@2"] for row in rows} - {""}

    samples = [json.loads(line) for line in (run_dir / "rollouts" / "2.jsonl").read_text().splitlines()]
    assert len(samples) == 16 and {sample["policy_version"] for sample in samples} == {1}
    assert len({sample["uid"] for sample in samples}) == 4
    assert len((run_dir / "validation" / "val_2.jsonl").read_text().splitlines()) == 8
    for name in ("metrics.jsonl", "reward_curve.png", "data_report.json", "length_hist.png", "config/resolved.yaml"):
        assert (run_dir / name).stat().st_size > 0, name
    assert list((run_dir / "tensorboard").glob("events*"))

    exported = run_dir / "global_step_2" / "hf_model"
    model, info = AutoModelForCausalLM.from_pretrained(exported, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    source = AutoModelForCausalLM.from_pretrained(inputs["model"])
    assert not torch.equal(model.get_input_embeddings().weight, source.get_input_embeddings().weight)
    assert AutoTokenizer.from_pretrained(exported).chat_template


@pytest.mark.slow
def test_the_engine_does_not_change_what_is_learned(tmp_path):
    inputs = write_inputs(tmp_path, "llama_tied")
    more = ("trainer.total_training_steps=4", "trainer.save_freq=-1")
    layouts = {
        "fsdp": ("fsdp", "trainer.n_gpus_per_node=2"),
        "tp2": ("megatron", "trainer.n_gpus_per_node=2", f"{MEGATRON}.tensor_model_parallel_size=2"),
    }
    results = {}
    for name, (engine, *layout) in layouts.items():
        status, output = Run(overrides(inputs, tmp_path / name, engine, *more, *layout)).wait()
        assert status == 0, output
        results[name] = untimed(metrics(tmp_path / name))
    assert len(results["fsdp"]) == len(results["tp2"]) == 5
    for ours, theirs in zip(results["fsdp"], results["tp2"], strict=True):
        for column in ("reward/mean", "train/loss", "actor/grad_norm", "actor/entropy", "val_correct/all/mean"):
            assert (ours[column] == "") == (theirs[column] == "")
            if ours[column]:
                assert float(ours[column]) == pytest.approx(float(theirs[column]), rel=1e-3, abs=1e-5), column
