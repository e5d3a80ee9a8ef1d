"""From a command line for Ascend to what the engine is told. No device is needed for that."""

import pytest

from engines import check_train_engine
from tests.trainer.config_bench import ACTOR, command
from trainer import wiring
from trainer.config import load_config

OVERRIDE = f"+{ACTOR}.megatron.override_transformer_config"
NPU = ("model_engine=megatron", "trainer.device=npu")


def actor(folder, device: str, *more: str):
    return wiring.actor_spec(load_config(command(folder, *more)).config, device, total_steps=4)


def test_one_namespace_reaches_megatron_and_mindspeed(tmp_path):
    flags = (f"{OVERRIDE}.use_fused_swiglu=True", f"{OVERRIDE}.bias_dropout_fusion=True")
    backend = actor(tmp_path, "npu", *NPU, *flags).backend
    assert backend.mindspeed == {"use_fused_swiglu": True}
    assert backend.override_transformer_config["bias_dropout_fusion"] is True
    assert "use_fused_swiglu" not in backend.override_transformer_config
    assert backend.override_transformer_config["recompute_granularity"] is None, "the defaults stay"


def test_what_mindspeed_cannot_do_ends_the_run_before_it_starts(tmp_path):
    check_train_engine(actor(tmp_path, "npu", *NPU, f"{OVERRIDE}.use_flash_attn=True"))
    refused = actor(tmp_path, "npu", *NPU, f"{OVERRIDE}.swap_attention=True")
    with pytest.raises(ValueError, match="got swap_attention on npu"):
        check_train_engine(refused)


def test_other_devices_and_engines_have_nothing_to_check(tmp_path):
    spec = actor(tmp_path, "cpu", "model_engine=megatron")
    assert spec.backend.mindspeed == {}
    check_train_engine(spec)
    check_train_engine(actor(tmp_path, "npu", "model_engine=fsdp", "trainer.device=npu"))
