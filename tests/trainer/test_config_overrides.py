"""Keys: unknown ones, prefixes, legacy spellings, keys without effect, refused keys, flags."""

import pytest

from tests.trainer.config_bench import ACTOR, REF, ROLLOUT, command, errors, load, problem, value, values
from trainer.config import ConfigErrors, load_config


def filler(argument: str, position: int) -> list[str]:
    """argv whose argument at `position` (from 1) is the given one."""
    return ["data.seed=1"] * (position - 1) + [argument]


@pytest.mark.parametrize("prefix", ["", "+", "++"])
def test_unknown_key_names_its_neighbours_word_for_word(prefix):
    argv = filler(f"{prefix}{ROLLOUT}.tensor_parallel_size=4", 14)
    assert values(*argv)[1] == [
        "ConfigError[key.unknown] actor_rollout_ref.rollout.tensor_parallel_size   (argument 14)\n"
        "  got:      a key that does not exist; value 4\n"
        "  expected: one of actor_rollout_ref.rollout.tensor_model_parallel_size, .data_parallel_size, "
        ".expert_parallel_size\n"
        "  do this:  actor_rollout_ref.rollout.tensor_model_parallel_size=4"
    ]


@pytest.mark.parametrize(
    ("argument", "fix"),
    [
        ("actor_rollout_ref.rolout.temperature=0.7", "actor_rollout_ref.rollout.temperature=0.7"),
        ("trainer.total_training_step=5", "trainer.total_training_steps=5"),
        ("trainer.rollout.group.n=5", "actor_rollout_ref.rollout.n=5"),
        ("actor_rollout_ref.model.temperature=0.7", "actor_rollout_ref.rollout.temperature=0.7"),
        ("data.trian_files=a", "data.train_files=a"),
        ("model_engin=fsdp", "model_engine=fsdp"),
    ],
)
def test_the_fix_can_be_pasted(argument, fix):
    assert problem(argument).endswith(f"do this:  {fix}")


def test_key_of_the_other_engine_names_both():
    message = values("model_engine=megatron", f"{ACTOR}.optim.lr_scheduler_type=cosine")[1][0]
    assert "optim.lr_scheduler_type belongs to model_engine=fsdp; megatron: lr_decay_style" in message
    assert message.endswith(f"do this:  {ACTOR}.optim.lr_decay_style=cosine")
    message = problem(f"{ACTOR}.megatron.tensor_model_parallel_size=2")
    assert "belongs to model_engine=megatron" in message and "do this:  model_engine=megatron" in message


@pytest.mark.parametrize("prefix", ["", "+", "++"])
def test_every_prefix_sets_a_known_key_and_a_passthrough_key(prefix):
    assert value(f"{prefix}data.train_batch_size=7") == 7
    assert value(f"{prefix}actor_rollout_ref.model.override_config.rope_theta=5.0") == 5.0


def test_deleting_works_inside_passthroughs_only():
    section = f"{ACTOR}.megatron.override_transformer_config"
    found, problems = values("model_engine=megatron", f"~{section}.recompute_modules")
    assert problems == [] and "recompute_modules" not in found[section] and "attention_backend" in found[section]
    assert problem("~data.seed").endswith("do this:  data.seed=null")
    assert "it is not there" in values("model_engine=megatron", f"~{section}.nothing")[1][0]


def test_a_section_may_be_given_as_a_dict():
    found, problems = values(f"{ACTOR}.optim={{lr:3e-6,weight_decay:0}}")
    assert problems == [] and (found[f"{ACTOR}.optim.lr"], found[f"{ACTOR}.optim.weight_decay"]) == (3e-6, 0.0)
    assert "key.unknown" in values(f"{ACTOR}.optim={{lr:3e-6,wieght_decay:0}}")[1][0]


def test_the_last_of_two_values_wins_with_one_notice(tmp_path):
    loaded = load(tmp_path, "trainer.save_freq=3", "trainer.save_freq=5")
    assert loaded.config.trainer.save_freq == 5
    assert [n for n in loaded.notices if "trainer.save_freq" in n] == [
        "trainer.save_freq is given twice: 3 and 5; the last one counts"
    ]


@pytest.mark.parametrize(
    ("legacy", "key", "expected"),
    [
        (f"{ACTOR}.grad_clip=0.5", f"{ACTOR}.optim.clip_grad", 0.5),
        (f"{ACTOR}.ulysses_sequence_parallel_size=2", f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size", 2),
        (f"{REF}.ulysses_sequence_parallel_size=2", f"{REF}.fsdp_config.ulysses_sequence_parallel_size", 2),
        (f"{ACTOR}.entropy_checkpointing=True", f"{ACTOR}.fsdp_config.entropy_checkpointing", True),
        (f"{ACTOR}.use_remove_padding=False", "actor_rollout_ref.model.use_remove_padding", False),
        (f"{ACTOR}.loss_mode=kl_cov", f"{ACTOR}.policy_loss.loss_mode", "kl_cov"),
        (f"{ACTOR}.policy_loss.loss_mode=geo-mean", f"{ACTOR}.policy_loss.loss_mode", "geo_mean"),
        (f"+{ACTOR}.policy_loss.tau_pos=2.0", f"{ACTOR}.tau_pos", 2.0),
        (f"{ACTOR}.optim.warmup_style=cosine", f"{ACTOR}.optim.lr_scheduler_type", "cosine"),
        ("rollout.nnodes=2", f"{ROLLOUT}.nnodes", 2),
        ("data.preprocessing_num_workers=4", "data.filter_overlong_prompts_workers", 4),
        ("reward_model.reward_manager=dapo", "reward.reward_manager.name", "dapo"),
        ("reward_model.reward_manager.name=dapo", "reward.reward_manager.name", "dapo"),
        ("custom_reward_function.path=f.py", "reward.custom_reward_function.path", "f.py"),
        ("reward_model.model.path=m", "reward.reward_model.model_path", "m"),
        ("sandbox_fusion.url=u", "reward.sandbox_fusion.url", "u"),
        ("algorithm.lambd=0.95", "algorithm.lam", 0.95),
        ("algorithm.pg_clip=0.1", f"{ACTOR}.clip_ratio", 0.1),
        ("algorithm.dual_clip_loss=true", f"{ACTOR}.clip_ratio_c", 1.4),
        ("algorithm.dual_clip_loss=false", f"{ACTOR}.clip_ratio_c", None),
        ("algorithm.importance_sampling=seq", f"{ACTOR}.policy_loss.loss_mode", "gspo"),
        ("algorithm.value_clip=0.3", "critic.cliprange_value", 0.3),
        (
            "algorithm.rollout_correction.rollout_is_threshold_lower=0.5",
            "algorithm.rollout_correction.rollout_is_threshold",
            "0.5_2.0",
        ),
    ],
)
def test_legacy_keys_move(legacy, key, expected):
    found, problems = values(legacy)
    assert problems == [] and found[key] == expected


def test_legacy_engine_switches_move_too(tmp_path):
    found, problems = values(f"{ACTOR}.model_engine=megatron", f"{ACTOR}.megatron.router_replay.mode=R2")
    assert problems == [] and found["model_engine"] == "megatron"
    assert found[f"{ACTOR}.router_replay.mode"] == "R2"
    assert values(f"{ACTOR}.router_replay.mode=R2")[0][f"{ACTOR}.router_replay.mode"] == "R2"
    assert values("algorithm.dual_clip_loss=true", "algorithm.pg_clip=0.1")[0][f"{ACTOR}.clip_ratio_c"] == 1.2


def test_a_legacy_key_gives_one_notice(tmp_path):
    notices = load(tmp_path, f"{ACTOR}.grad_clip=0.5").notices
    assert [n for n in notices if "grad_clip" in n] == [
        f"{ACTOR}.grad_clip is a legacy key: moved to {ACTOR}.optim.clip_grad"
    ]


def test_legacy_and_new_spelling_must_agree():
    both = (f"{ACTOR}.grad_clip=0.5", f"{ACTOR}.optim.clip_grad=0.5")
    assert values(*both)[1] == []
    message = values(f"{ACTOR}.grad_clip=0.5", f"{ACTOR}.optim.clip_grad=1.0")[1][0]
    assert "key.conflict" in message and "grad_clip=0.5 and" in message and "clip_grad=1.0" in message


def test_a_legacy_null_never_overwrites():
    found, problems = values("reward.custom_reward_function.path=f.py", "custom_reward_function.path=null")
    assert problems == [] and found["reward.custom_reward_function.path"] == "f.py"


def test_reward_settings_of_every_age_reach_the_reward(tmp_path):
    """verl drops the two older spellings in its main program: such runs had no overlong penalty."""
    new = [
        f"reward.reward_kwargs.overlong_buffer_cfg.{text}" for text in ("enable=True", "len=64", "penalty_factor=1.0")
    ]
    old = [
        f"+reward_model.reward_kwargs.overlong_buffer_cfg.{text}"
        for text in ("enable=True", "len=64", "penalty_factor=1.0")
    ]
    oldest = [f"reward_model.overlong_buffer.{text}" for text in ("enable=True", "len=64", "penalty_factor=1.0")]
    configs = [
        load(tmp_path, "reward.reward_manager.name=dapo", "reward.reward_kwargs.max_resp_len=512", *new),
        load(tmp_path, "reward_model.reward_manager=dapo", "+reward_model.reward_kwargs.max_resp_len=512", *old),
        load(tmp_path, "reward_model.reward_manager=dapo", *oldest),
    ]
    assert configs[0].config.reward.reward_kwargs == {
        "overlong_buffer_cfg": {"enable": True, "len": 64, "penalty_factor": 1.0, "log": False},
        "max_resp_len": 512,
    }
    assert configs[0].config.reward == configs[1].config.reward == configs[2].config.reward


def test_typos_in_our_own_passthroughs_end_the_run(tmp_path):
    text = errors(tmp_path, "reward.reward_kwargs.overlong_buffer_cfg.penalty_facter=1.0")["key.unknown"]
    assert "(argument 12)" in text
    assert text.endswith("do this:  reward.reward_kwargs.overlong_buffer_cfg.penalty_factor=1.0")
    engine = f"{ROLLOUT}.checkpoint_engine.engine_kwargs"
    assert "key.unknown" in errors(tmp_path, f"{engine}.verify=2")
    assert "a whole number" in errors(tmp_path, f"{engine}.verify_every=often")["value.type"]
    config = load(tmp_path, f"{engine}.verify_every=2", f"{engine}.timeout_s=30").config
    assert config.actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs == {"verify_every": 2, "timeout_s": 30.0}


def test_keys_without_effect_give_exactly_one_notice(tmp_path):
    given = (
        "transfer_queue.enable=True",
        f"{ROLLOUT}.mode=sync",
        "+data.min_response_length=4096",
        "trainer.use_v1=True",
    )
    notices = load(tmp_path, *given).notices
    for name in ("transfer_queue", f"{ROLLOUT}.mode", "data.min_response_length", "trainer.use_v1"):
        assert len([n for n in notices if n.startswith(f"{name} has no effect")]) == 1


def test_refused_keys_pass_with_null_defaults_and_closed_switches():
    assert values(f"{ACTOR}.ppo_micro_batch_size=null")[1] == []
    assert values(f"{ROLLOUT}.pipeline_model_parallel_size=1")[1] == []
    assert values(f"{ACTOR}.fsdp_config.qat.enable=False", f"{ACTOR}.fsdp_config.qat.mode=w4a16")[1] == []
    message = problem(f"{ACTOR}.ppo_micro_batch_size=8")
    assert "key.refused" in message and message.endswith(f"do this:  {ACTOR}.ppo_micro_batch_size_per_gpu=N")
    found = values(f"{ACTOR}.fsdp_config.qat.enable=True", f"{ACTOR}.fsdp_config.qat.mode=w4a16")[1]
    assert len(found) == 1 and "NVFP4" in found[0]


@pytest.mark.parametrize("engine", ["veomni", "torchtitan", "automodel", "mlite"])
def test_engines_that_are_not_offered(engine):
    assert "value.choice" in problem(f"model_engine={engine}")


def test_the_engine_is_found_wherever_it_stands(tmp_path):
    late = load(tmp_path, f"{ACTOR}.megatron.optimizer_offload=True", "model_engine=megatron")
    assert late.config.model_engine == "megatron" and late.config.actor_rollout_ref.actor.megatron.optimizer_offload
    assert load(tmp_path, f"{ACTOR}.strategy=megatron").config.model_engine == "megatron"
    assert load(tmp_path, "model_engine=dp").config.model_engine == "fsdp"
    assert load(tmp_path, f"{ACTOR}.strategy=fsdp").config.actor_rollout_ref.actor.strategy == "fsdp2"
    assert "one training engine" in errors(tmp_path, "model_engine=megatron", f"{ACTOR}.strategy=fsdp2")["key.conflict"]


def test_flags(tmp_path):
    argv = command(tmp_path)
    assert load_config([*argv, "--dry-run"]).action == "dry-run"
    assert load_config(["--cfg", "resolved", *argv]).action == "cfg"
    assert load_config(argv).action == "run"
    assert any("--config-path" in n for n in load_config([*argv, "--config-path", "/x"]).notices)
    assert any("hydra.run.dir" in n for n in load_config([*argv, "hydra.run.dir=/x"]).notices)
    megatron = load_config([*argv, "--config-name=dapo_megatron_trainer.yaml"]).config
    assert (megatron.model_engine, megatron.reward.reward_manager.name) == ("megatron", "dapo")
    separate = load_config([*argv, "--config-name", "one_step_off_ppo_trainer", f"{ROLLOUT}.nnodes=1"]).config
    assert separate.actor_rollout_ref.hybrid_engine is False and separate.derived.rollout_world_size == 1
    for refused in ("-m", "--multirun", "--config-name=nothing", "--cfg=all"):
        with pytest.raises(ConfigErrors, match=r"ConfigError\[arg.syntax\]"):
            load_config([*argv, refused])


def test_all_errors_are_shown_together(tmp_path):
    found = errors(tmp_path, "data.typo=1", "data.shuffle=maybe", f"{ROLLOUT}.n=3", "trainer.n_gpus_per_node=8", "x=[")
    assert set(found) == {"key.unknown", "value.type", "batch.mini_dp", "arg.syntax"}
