"""The configuration on disk and in words: save, reload, compare, explain, summarise."""

import json

import pytest
from omegaconf import OmegaConf

from tests.trainer.config_bench import ACTOR, ROLLOUT, command, load
from trainer.config import (
    ConfigErrors,
    changed,
    diff,
    explain,
    fingerprint,
    load_config,
    save_config,
    size_summary,
    to_yaml,
)

GIVEN = (
    f"+{ACTOR}.grad_clip=0.5",
    "actor_rollout_ref.model.override_config.rope={base:1.0,kinds:[a,b]}",
    'trainer.experiment_name="a=b \\"c\\" {d}"',
    "rewards.math_rule.answer=last_number",
    "trainer.project_name=${trainer.experiment_name}",
)


def test_saved_files(tmp_path):
    loaded = load(tmp_path, *GIVEN)
    folder = save_config(loaded, tmp_path / "run")
    assert folder == tmp_path / "run" / "config"
    assert sorted(path.name for path in folder.iterdir()) == [
        "argv.txt",
        "origin.json",
        "overrides_effective.txt",
        "resolved.yaml",
    ]
    assert (folder / "argv.txt").read_text().splitlines() == list(loaded.argv)
    effective = (folder / "overrides_effective.txt").read_text().splitlines()
    assert f"{ACTOR}.optim.clip_grad=0.5" in effective and not any("grad_clip=" in line for line in effective)
    origin = json.loads((folder / "origin.json").read_text())
    assert origin["data.train_batch_size"] == "argv 8"
    assert origin[f"{ACTOR}.optim.clip_grad"] == f"legacy of {ACTOR}.grad_clip (argv 12)"
    assert origin["data.shuffle"] == "default"
    assert origin[f"{ROLLOUT}.log_prob_use_dynamic_bsz"] == origin["derived.dp"] == "derived"
    text = (folder / "resolved.yaml").read_text()
    assert "${" not in text
    assert OmegaConf.to_container(OmegaConf.create(text))["trainer"]["project_name"] == 'a=b "c" {d}'


@pytest.mark.parametrize("engine", ["fsdp", "megatron"])
def test_resolved_yaml_is_a_complete_input(tmp_path, engine):
    loaded = load(tmp_path, f"model_engine={engine}", *GIVEN)
    folder = save_config(loaded, tmp_path / "run")
    again = load_config(["--config", str(folder / "resolved.yaml")])
    assert again.config == loaded.config
    assert fingerprint(again.config) == fingerprint(loaded.config)
    assert load_config(["--config", str(folder / "resolved.yaml"), "trainer.save_freq=9"]).config.trainer.save_freq == 9


def test_diff_names_old_and_new_values(tmp_path):
    old = load(tmp_path, f"{ACTOR}.optim.lr=1e-5")
    path = save_config(old, tmp_path / "run") / "resolved.yaml"
    assert diff(path, old.config) == []
    new = load(tmp_path, "trainer.total_epochs=2", "actor_rollout_ref.model.override_config.a=1").config
    assert diff(path, new) == [
        ("actor_rollout_ref.model.override_config.a", None, 1),
        (f"{ACTOR}.optim.lr", 1e-5, 1e-6),
        ("trainer.total_epochs", 30, 2),
    ]


def test_fingerprint_is_of_the_content(tmp_path):
    one, same, other = load(tmp_path), load(tmp_path, "data.shuffle=True"), load(tmp_path, "data.shuffle=False")
    assert fingerprint(one.config) == fingerprint(same.config) != fingerprint(other.config)


def test_changed_lists_what_was_given(tmp_path):
    lines = changed(load(tmp_path, "actor_rollout_ref.model.override_config.a=1"))
    assert "data.train_batch_size=8 (argv 8)" in lines
    assert "actor_rollout_ref.model.override_config.a=1 (argv 12)" in lines
    assert not any(line.startswith("data.shuffle") for line in lines)


def test_yaml_holds_derived_values_with_formulas(tmp_path):
    tree = OmegaConf.to_container(OmegaConf.create(to_yaml(load(tmp_path).config)))
    assert tree["derived"]["sequences_per_mini_batch"] == 16
    assert tree["derived"]["formulas"]["sequences_per_mini_batch"] == "actor.ppo_mini_batch_size x rollout.n"


def test_summary(tmp_path):
    text = size_summary(load(tmp_path, "trainer.n_gpus_per_node=2"))
    assert "8 prompts x 4 = 32 samples, 2 optimizer steps" in text
    assert "16 samples, 8 per dp rank" in text
    # 4 layers of 64x64 q, o, 2 x 64x32 k, v and 3 x 64x128 mlp, one tied 300x64 embedding
    assert f"Qwen2ForCausalLM, {(4 * (2 * 4096 + 2 * 2048 + 3 * 8192) + 19200) / 1e6:.1f}M parameters" in text


def test_explain(tmp_path):
    text = load_config(["--explain", f"{ACTOR}.ppo_mini_batch_size"]).text
    assert text == explain(f"{ACTOR}.ppo_mini_batch_size")
    assert "whole number" in text and "256" in text and "prompts per optimizer step" in text and "works" in text
    assert "not built yet" in explain("algorithm.use_pf_ppo")
    assert "megatron only" in explain(f"{ACTOR}.optim.lr_decay_style")
    assert "works for bfloat16, float32" in explain(f"{ROLLOUT}.dtype")
    assert "legacy spelling of" in explain(f"{ACTOR}.grad_clip")
    assert "accepted without effect" in explain(f"{ROLLOUT}.mode")
    assert "refused" in explain(f"{ACTOR}.ppo_micro_batch_size")
    assert "last_number" in explain("rewards.math_rule.answer")
    with pytest.raises(ConfigErrors, match="ppo_mini_batch_size"):
        explain(f"{ACTOR}.ppo_mini_batch_sizes")


def test_a_failed_load_saves_nothing_and_keeps_every_error(tmp_path):
    with pytest.raises(ConfigErrors) as caught:
        load_config([*command(tmp_path), "a=1", "b=2"])
    assert [error.position for error in caught.value.errors] == [12, 13]
    assert str(caught.value) == "\n".join(str(error) for error in caught.value.errors)
