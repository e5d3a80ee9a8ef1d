"""What a loaded tree holds: inheritance, derived values, devices, and what is not built yet."""

import pickle
from dataclasses import FrozenInstanceError

import pytest

from tests.trainer.config_bench import ACTOR, REF, ROLLOUT, command, errors, load
from trainer.config import ConfigErrors, load_config
from trainer.config.load import resolve_device


def test_clip_ratio_fills_the_bounds_that_are_not_given(tmp_path):
    def bounds(*more):
        actor = load(tmp_path, *more).config.actor_rollout_ref.actor
        return actor.clip_ratio_low, actor.clip_ratio_high

    assert bounds() == (0.2, 0.2)
    assert bounds(f"{ACTOR}.clip_ratio=0.1") == (0.1, 0.1)
    assert bounds(f"{ACTOR}.clip_ratio=0.1", f"{ACTOR}.clip_ratio_high=0.28") == (0.1, 0.28)


def test_reference_merges_its_own_override_into_the_actors(tmp_path):
    """One own key must not drop recompute settings and attention backend."""
    section = "megatron.override_transformer_config"
    tree = load(
        tmp_path,
        "model_engine=megatron",
        f"+{ACTOR}.{section}.recompute_granularity=full",
        f"++{REF}.{section}.gradient_accumulation_fusion=False",
    ).config.actor_rollout_ref
    actor = tree.actor.megatron.override_transformer_config
    assert actor["recompute_granularity"] == "full" and "gradient_accumulation_fusion" not in actor
    assert tree.ref.megatron.override_transformer_config == {**actor, "gradient_accumulation_fusion": False}


def test_reference_follows_the_actor_unless_it_is_given(tmp_path):
    config = load(
        tmp_path,
        "model_engine=megatron",
        "trainer.n_gpus_per_node=4",
        f"{ACTOR}.megatron.tensor_model_parallel_size=2",
        f"{ACTOR}.megatron.param_offload=True",
        f"{REF}.megatron.param_offload=False",
        f"{ACTOR}.ppo_max_token_len_per_gpu=2000",
    ).config.actor_rollout_ref
    assert config.ref.megatron.tensor_model_parallel_size == 2
    assert (config.actor.megatron.param_offload, config.ref.megatron.param_offload) == (True, False)
    assert config.ref.log_prob_use_dynamic_bsz is True and config.rollout.log_prob_use_dynamic_bsz is True
    assert config.ref.log_prob_max_token_len_per_gpu == config.rollout.log_prob_max_token_len_per_gpu == 2000
    assert config.ref.strategy == config.actor.strategy == "megatron"


def test_fsdp_reference_computes_like_the_actor(tmp_path):
    """Also with the engine's own key; verl follows only the deprecated one."""
    key = f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size=2"
    with pytest.raises(ConfigErrors) as caught:
        load(tmp_path, key, "trainer.n_gpus_per_node=2")
    assert [error.key for error in caught.value.errors] == [key[:-2]]  # not reported a second time at the reference
    config = load(tmp_path, f"{ACTOR}.fsdp_config.dtype=fp32").config.actor_rollout_ref
    assert config.ref.fsdp_config.dtype == "float32"


def test_seeds_follow_trainer_seed(tmp_path):
    config = load(tmp_path, "trainer.seed=7", "data.seed=3").config
    arr = config.actor_rollout_ref
    seeds = (config.data.seed, arr.rollout.seed, arr.actor.data_loader_seed, arr.actor.fsdp_config.seed)
    assert seeds == (3, 7, 7, 7)


def test_derived_values(tmp_path):
    derived = load(
        tmp_path,
        "model_engine=megatron",
        "trainer.n_gpus_per_node=8",
        f"{ACTOR}.megatron.tensor_model_parallel_size=2",
        f"{ACTOR}.megatron.pipeline_model_parallel_size=2",
        f"{ACTOR}.ppo_epochs=2",
    ).config.derived
    assert (derived.world_size, derived.model_parallel_size, derived.dp) == (8, 4, 2)
    assert (derived.sequences_per_train_batch, derived.sequences_per_mini_batch, derived.sequences_per_rank) == (
        32,
        16,
        8,
    )
    assert derived.optimizer_steps_per_train_step == 4
    assert derived.max_sequence_length == 1024
    assert (derived.rollout_world_size, derived.rollout_replicas) == (8, 8)
    assert derived.formulas["dp"] == "world_size / (tp x pp x cp): world 8 = 1 node x 8; tp 2 x pp 2 x cp 1"


def test_separate_pool(tmp_path):
    more = ("actor_rollout_ref.hybrid_engine=False", f"{ROLLOUT}.nnodes=1", f"{ROLLOUT}.n_gpus_per_node=3")
    derived = load(tmp_path, *more, "trainer.n_gpus_per_node=2").config.derived
    assert (derived.world_size, derived.rollout_world_size, derived.rollout_replicas) == (2, 3, 3)


def test_small_fill_ins(tmp_path):
    loaded = load(tmp_path, "trainer.project_name=p", "trainer.experiment_name=e")
    config = loaded.config
    assert config.trainer.default_local_dir == config.derived.run_dir == "checkpoints/p/e"
    assert config.actor_rollout_ref.rollout.tensor_model_parallel_size == 1
    assert any("tensor_model_parallel_size=1" in notice for notice in loaded.notices)
    assert config.data.gen_batch_size == 8
    assert config.actor_rollout_ref.rollout.prompt_length == 512
    assert config.actor_rollout_ref.actor.checkpoint.load_contents == ("model", "optimizer", "extra")
    for more, said in (((), 0), (("actor_rollout_ref.actor.megatron.sequence_parallel=True",), 1)):
        megatron = load(tmp_path, "model_engine=megatron", *more)
        assert megatron.config.actor_rollout_ref.actor.megatron.sequence_parallel is False
        assert len([n for n in megatron.notices if "sequence_parallel=False" in n]) == said


def test_the_tree_is_frozen_and_pickles(tmp_path):
    config = load(tmp_path, "actor_rollout_ref.model.override_config.a={b:[1]}").config
    with pytest.raises(FrozenInstanceError):
        config.data.train_batch_size = 1
    with pytest.raises(TypeError, match="frozen"):
        config.actor_rollout_ref.model.override_config["a"]["b"] = 2
    assert pickle.loads(pickle.dumps(config)) == config


@pytest.mark.parametrize(
    ("argument", "key"),
    [
        ("algorithm.filter_groups.max_inflight_gen_batches=2", "algorithm.filter_groups.max_inflight_gen_batches"),
        ("trainer.logger=[console,wandb]", "trainer.logger"),
        ("data.gen_batch_size=16", "data.gen_batch_size"),
        ("actor_rollout_ref.model.lora_rank=8", "actor_rollout_ref.model.lora_rank"),
        ("actor_rollout_ref.model.mtp.enable=True", "actor_rollout_ref.model.mtp.enable"),
        (f"{ACTOR}.fsdp_config.dtype=fp16", f"{ACTOR}.fsdp_config.dtype"),
        ("rewards.my_domain.tag_included=[a]", "rewards.my_domain"),
        ("trainer.v1.trainer_mode=colocate_async", "trainer.v1.trainer_mode"),
    ],
)
def test_what_is_not_built_is_refused_by_name(tmp_path, argument, key):
    with pytest.raises(ConfigErrors) as caught:
        load(tmp_path, argument)
    assert [(error.id, error.key) for error in caught.value.errors] == [("not.built", key)]
    assert "not built yet" in str(caught.value)


def test_not_built_keys_pass_at_their_default(tmp_path):
    load(
        tmp_path,
        "critic.strategy=fsdp2",
        "critic.optim.lr=1e-5",
        "algorithm.filter_groups.enable=False",
        "algorithm.kl_ctrl.kl_coef=0.001",
        f"{ROLLOUT}.expert_parallel_size=1",
        f"{ACTOR}.fsdp_config.mixed_precision.buffer_dtype=fp32",
    )


def test_the_defaults_of_verl_are_a_run(tmp_path):
    argv = [text for text in command(tmp_path) if not text.startswith((f"{ROLLOUT}.name", "algorithm.adv"))]
    config = load_config(argv).config
    assert config.actor_rollout_ref.rollout.name == "vllm"
    assert config.algorithm.adv_estimator == "gae" and config.critic.enable


def test_hints_are_a_no_op_with_one_notice(tmp_path):
    given = (
        "actor_rollout_ref.model.use_liger=True",
        f"{ROLLOUT}.gpu_memory_utilization=0.8",
        f"{ROLLOUT}.enforce_eager=True",
    )
    notices = load(tmp_path, *given).notices
    for argument in given:
        key = argument.partition("=")[0]
        assert len([n for n in notices if n.startswith(f"{key}=") and "no effect" in n]) == 1


def test_other_spellings_of_a_value(tmp_path):
    actor = load(
        tmp_path, f"{ACTOR}.fsdp_config.model_dtype=bf16", f"{ACTOR}.kl_loss_type=k3+"
    ).config.actor_rollout_ref.actor
    assert (actor.fsdp_config.model_dtype, actor.kl_loss_type) == ("bfloat16", "k3+")
    assert "value.choice" in errors(tmp_path, f"{ACTOR}.kl_loss_type=full")
    assert "value.choice" in errors(tmp_path, f"{ROLLOUT}.name=sglang")


def test_required_keys_are_named():
    with pytest.raises(ConfigErrors) as caught:
        load_config([])
    required = [error.key for error in caught.value.errors if error.id == "value.required"]
    assert required == ["data.train_files", "data.val_files", "actor_rollout_ref.model.path"]


def test_device_is_resolved_without_torch(monkeypatch):
    assert resolve_device("cpu") == "cpu" and resolve_device("npu") == "npu"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert resolve_device("cuda") == "cpu"


def test_more_ranks_than_cores_is_a_warning(tmp_path):
    notices = load(tmp_path, "trainer.n_gpus_per_node=1024", f"{ROLLOUT}.n=256").notices
    assert any(notice.startswith("1024 ranks on ") for notice in notices)


def test_reward_domains(tmp_path):
    config = load(tmp_path, "rewards.math_rule.tag_included=[gsm8k]", "rewards.math_rule.answer=last_number").config
    domain = config.rewards["math_rule"]
    assert (domain.tag_included, domain.answer, domain.world_size) == (("gsm8k",), "last_number", None)
    assert "key.unknown" in errors(tmp_path, "rewards.math_rule.answr=rules")
    assert "value.choice" in errors(tmp_path, "rewards.math_rule.answer=first")
