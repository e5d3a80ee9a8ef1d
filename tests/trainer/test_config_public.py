"""68 public verl command lines: each is understood to the last key. What is refused is refused for a reason we name."""

import json
from collections import Counter
from pathlib import Path

import pytest

from trainer.config import ConfigErrors, load_config

LISTS = Path(__file__).resolve().parents[3] / "shared" / "compat" / "verl_overrides.json"
# Reasons that lie outside the command line: paths of another machine, tools that are not installed here,
# and behaviour that is not built yet.
PLACE = {"not.built", "model.path", "data.files", "reward.file", "ray.python", "log.package"}
# At the default values of their scripts these nine are wrong, whatever the machine.
WRONG = {
    "verl-recipe/low_precision/run_dapo_qwen3_moe_30b_megatron_fp8e2e.sh": {"par.expert"},
    "verl/examples/grpo_trainer/run_qwen3_235b_a22b_megatron.sh": {"roll.ep"},
    "verl/examples/grpo_trainer/run_qwen3_30b_a3b_megatron.sh": {"roll.ep"},
    "verl/examples/rollout_correction/run_qwen2_5_7b_fsdp.sh": {"batch.micro"},
    "verl/examples/rollout_correction/run_qwen2_5_7b_fsdp_multi_rs.sh": {"batch.micro", "algo.corr"},
    "verl/examples/grpo_trainer/run_moonlight_16b_a3b_megatron.sh": {"ckpt.dist"},
    "verl-recipe/qat/run_qwen3_30b_w4a16.sh": {"key.refused"},
    "verl-recipe/qat/run_qwen3_30b_w4a16_FFN_only.sh": {"key.refused"},
    "verl-recipe/qat/run_qwen3_30b_w4a16_megatron_FFN_only.sh": {"key.refused"},
}


def arguments(entry: dict) -> list[str]:
    """The list as its script starts it: some choose the engine by --config-name."""
    argv = list(entry["overrides"])
    if not any(text.startswith(("model_engine=", "actor_rollout_ref.actor.strategy=")) for text in argv):
        argv.insert(0, f"model_engine={entry['engine']}")
    return [*argv, "trainer.device=npu"] if entry["device"] == "npu" else argv


def test_public_command_lines():
    if not LISTS.exists():
        pytest.skip(f"no public override lists at {LISTS}")
    found, ids = {}, Counter()
    for script, entry in json.loads(LISTS.read_text()).items():
        with pytest.raises(ConfigErrors) as caught:  # its model and data are on another machine
            load_config(arguments(entry))
        names = {error.id for error in caught.value.errors}
        ids.update(names)
        found[script] = names - PLACE
        assert all(error.got and error.expected and error.fix for error in caught.value.errors)
    assert len(found) == 68
    assert {script: names for script, names in found.items() if names} == WRONG
    assert ids["not.built"] == 60
