"""Cross-field checks: every broken rule names its numbers, its condition, and an argument that mends it."""

import importlib.metadata

import pytest

from engines.routes import RouteShape
from tests.trainer.config_bench import ACTOR, REF, ROLLOUT, command, errors, load
from trainer import wiring
from trainer.config import load_config

TP, PP = f"{ACTOR}.megatron.tensor_model_parallel_size", f"{ACTOR}.megatron.pipeline_model_parallel_size"
CP = f"{ACTOR}.megatron.context_parallel_size"
VPP = f"{ACTOR}.megatron.virtual_pipeline_model_parallel_size=2"
EP, ETP = f"{ACTOR}.megatron.expert_model_parallel_size", f"{ACTOR}.megatron.expert_tensor_parallel_size"
MEGATRON = "model_engine=megatron"


def test_mini_batch_not_divisible_by_dp_word_for_word(tmp_path):
    more = (MEGATRON, "trainer.nnodes=2", "trainer.n_gpus_per_node=8", f"{TP}=2", f"{PP}=2")
    found = errors(tmp_path, *more, f"{ACTOR}.ppo_mini_batch_size=2", f"{ROLLOUT}.n=3")
    assert found == {
        "batch.mini_dp": "ConfigError[batch.mini_dp] actor_rollout_ref.actor.ppo_mini_batch_size\n"
        "  got:      ppo_mini_batch_size=2 x rollout.n=3 = 6 sequences; dp=4 (world 16 = 2 nodes x 8; "
        "tp 2 x pp 2 x cp 1)\n"
        "  expected: sequences per mini-batch divisible by dp\n"
        "  do this:  actor_rollout_ref.actor.ppo_mini_batch_size=4   (or change tp/pp/cp so that dp divides 6)"
    }


def test_expert_layout_word_for_word(tmp_path):
    more = (
        MEGATRON,
        "trainer.n_gpus_per_node=8",
        f"{TP}=4",
        f"{PP}=2",
        f"{EP}=2",
        f"{ETP}=4",
    )
    assert errors(tmp_path, *more)["par.expert"] == (
        "ConfigError[par.expert] actor_rollout_ref.actor.megatron.expert_model_parallel_size\n"
        "  got:      world 8 = 1 x 8; etp 4 x ep 2 x pp 2 = 16\n"
        "  expected: etp x ep x pp divides world\n"
        "  do this:  actor_rollout_ref.actor.megatron.expert_tensor_parallel_size=1"
    )


EXPERTS = dict(architectures=["Qwen3MoeForCausalLM"], num_experts=8, num_experts_per_tok=2, moe_intermediate_size=48)


def test_experts_are_whole_on_a_rank_unless_etp_is_set(tmp_path):
    """Where Megatron-Core would split them over tp."""
    more = (MEGATRON, "trainer.n_gpus_per_node=8", f"{TP}=4", f"{PP}=2", f"{EP}=4", VPP)
    config = load(tmp_path, *more, **EXPERTS).config
    backend = wiring.actor_spec(config, "cpu", total_steps=1).backend
    assert (backend.expert_model_parallel_size, backend.virtual_pipeline_model_parallel_size) == (4, 2)
    assert config.actor_rollout_ref.ref.megatron.expert_model_parallel_size == 4
    assert "etp 1 x ep 3 x pp 2 = 6" in errors(tmp_path, *more, f"{EP}=3", **EXPERTS)["par.expert"]


@pytest.mark.parametrize(
    ("given", "model", "got", "fix"),
    [
        (f"{EP}=16", EXPERTS, "=16; 8 experts", f"{EP}=8"),
        (f"{ETP}=32", EXPERTS, "=32; experts of size 48", f"{ETP}=24"),
        (f"{EP}=2", {}, "=2; a model without experts", f"{EP}=1"),
    ],
)
def test_experts_and_their_size_must_divide(tmp_path, given, model, got, fix):
    text = errors(tmp_path, MEGATRON, "trainer.n_gpus_per_node=32", given, f"{TP}=2", **model)["par.experts"]
    assert got in text and fix in text


def test_route_replay_without_routes_word_for_word(tmp_path, monkeypatch):
    monkeypatch.setattr("trainer.config.checks_rollout.version", lambda name: {"vllm": "0.22.1"}[name])
    flag = f"{ROLLOUT}.enable_rollout_routing_replay=False"
    argv = [text for text in command(tmp_path) if not text.startswith(f"{ROLLOUT}.name")]
    argv += [f"{ROLLOUT}.name=vllm", f"{ACTOR}.router_replay.mode=R3"]
    argv += ["data.seed=1"] * (30 - len(argv)) + [flag]
    with pytest.raises(ValueError, match=r"replay\.r3") as caught:
        load_config(argv)
    assert (
        "ConfigError[replay.r3] actor_rollout_ref.actor.router_replay.mode\n"
        "  got:      mode=R3, rollout.enable_rollout_routing_replay=False (argument 31), rollout.name=vllm 0.22.1\n"
        "  expected: the rollout returns the routes that R3 replays\n"
        "  do this:  actor_rollout_ref.rollout.enable_rollout_routing_replay=True   (or mode=R2)"
    ) in str(caught.value)


REPLAY, RETURN = f"{ACTOR}.router_replay.mode", f"{ROLLOUT}.enable_rollout_routing_replay"
EXPERTS = dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=64)


def test_route_replay_switches_the_rollout_on_when_nothing_was_said(tmp_path):
    config = load(tmp_path, f"{REPLAY}=R3", **EXPERTS).config
    assert wiring.rollout_spec(config, "cpu").return_routes
    score, update = wiring.old_log_prob_options(config), wiring.update_options(config)
    assert (score.record_routes, score.replay_routes, update.replay_routes) == (False, True, True)
    options = wiring.route_options(config)
    assert options.shape == RouteShape(layers=4, moe_layers=(0, 1, 2, 3), experts=8, topk=2)
    assert (options.on_missing, options.max_invalid_ratio) == ("drop", 0.05)


def test_recorded_routes_are_replayed_by_the_updates_alone(tmp_path):
    alias = f"{ACTOR}.megatron.router_replay.mode=R2"
    for argv in ([f"{REPLAY}=R2", f"{ACTOR}.use_kl_loss=True"], [MEGATRON, alias, f"{ACTOR}.use_kl_loss=True"]):
        config = load(tmp_path, *argv, **EXPERTS).config
        score, update = wiring.old_log_prob_options(config), wiring.update_options(config)
        assert (score.record_routes, score.replay_routes) == (True, False)
        assert (update.record_routes, update.replay_routes) == (False, True)
        reference = wiring.reference_options(config)
        assert not reference.record_routes and not reference.replay_routes
        assert not wiring.rollout_spec(config, "cpu").return_routes and wiring.route_options(config) is None


@pytest.mark.parametrize(
    ("arguments", "id", "got"),
    [
        ([f"{REPLAY}=R2", f"{RETURN}=True"], "replay.r2", "enable_rollout_routing_replay=True"),
        ([f"{REPLAY}=R2", "algorithm.rollout_correction.bypass_mode=True"], "replay.r2", "bypass_mode=True"),
        ([f"{RETURN}=True"], "replay.idle", "mode=disabled"),
        ([f"{REPLAY}=R3", f"{RETURN}=False"], "replay.r3", "rollout.name=hf"),
        ([f"{REPLAY}=R3", f"{ACTOR}.router_replay.max_invalid_ratio=-1"], "value.range", "max_invalid_ratio=-1"),
    ],
)
def test_route_replay_that_cannot_work(tmp_path, arguments, id, got):
    assert got in errors(tmp_path, *arguments, **EXPERTS)[id]


@pytest.mark.parametrize("argument", [f"{REPLAY}=R2", f"{REPLAY}=R3", f"{RETURN}=True"])
def test_a_dense_model_has_no_routes_to_replay(tmp_path, argument):
    assert "Qwen2ForCausalLM without experts" in errors(tmp_path, argument)["replay.dense"]


def test_a_rollout_too_old_to_return_routes(tmp_path, monkeypatch):
    versions = {"vllm": "0.21.3"}
    monkeypatch.setattr("trainer.config.checks_rollout.version", versions.__getitem__)
    argv = [f"{ROLLOUT}.name=vllm", f"{REPLAY}=R3"]
    assert "vllm 0.22 or newer" in errors(tmp_path, *argv, **EXPERTS)["replay.r3"]
    versions["vllm"] = "0.22.0"
    assert "replay.r3" not in errors(tmp_path, *argv, **EXPERTS)  # vllm itself is not built here


STATIC = (f"{ACTOR}.use_dynamic_bsz=False", f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=1")
GPUS_2 = "trainer.n_gpus_per_node=2"
GPUS_4 = "trainer.n_gpus_per_node=4"
GPUS_8 = "trainer.n_gpus_per_node=8"
OVERLONG = "reward.reward_kwargs.overlong_buffer_cfg"

BROKEN = [
    # id, arguments, a part of got, the argument of "do this"
    ("batch.train_mini", [f"{ACTOR}.ppo_mini_batch_size=3"], "train_batch_size=8", f"{ACTOR}.ppo_mini_batch_size=4"),
    (
        "batch.train_mini",
        [f"{ACTOR}.ppo_mini_batch_size=16"],
        "ppo_mini_batch_size=16",
        f"{ACTOR}.ppo_mini_batch_size=8",
    ),
    (
        "batch.mini_dp",
        [GPUS_2, f"{ROLLOUT}.n=1", f"{ACTOR}.ppo_mini_batch_size=1"],
        "sp 1",
        f"{ACTOR}.ppo_mini_batch_size=2",
    ),
    (
        "batch.micro",
        [*STATIC, GPUS_2, f"{ACTOR}.ppo_micro_batch_size_per_gpu=3"],
        "4 x rollout.n=4 / dp 2 = 8 sequences per rank",
        f"{ACTOR}.ppo_micro_batch_size_per_gpu=2",
    ),
    ("batch.micro_set", STATIC, "ppo_micro_batch_size_per_gpu=null", f"{ACTOR}.ppo_micro_batch_size_per_gpu=1"),
    (
        "batch.micro_set",
        [*STATIC, f"{ACTOR}.ppo_micro_batch_size_per_gpu=1", f"{ACTOR}.use_kl_loss=True"],
        "null with dynamic batches off",
        f"{REF}.log_prob_micro_batch_size_per_gpu=1",
    ),
    (
        "batch.tokens",
        [f"{ACTOR}.ppo_max_token_len_per_gpu=1000", f"{ROLLOUT}.log_prob_max_token_len_per_gpu=1024"],
        "1000 x sp 1 = 1000 tokens; data.max_prompt_length=512 + data.max_response_length=512 = 1024",
        f"{ACTOR}.ppo_max_token_len_per_gpu=1024",
    ),
    (
        "batch.tokens",
        [f"{ACTOR}.use_kl_loss=True", f"{REF}.log_prob_max_token_len_per_gpu=100"],
        "log_prob_max_token_len_per_gpu=100",
        f"{REF}.log_prob_max_token_len_per_gpu=1024",
    ),
    (
        "batch.tokens",
        [
            *(MEGATRON, GPUS_2, f"{CP}=2", f"{ACTOR}.ppo_max_token_len_per_gpu=500"),
            f"{ROLLOUT}.log_prob_max_token_len_per_gpu=512",
        ],
        "500 x cp 2 = 1000 tokens",
        f"{ACTOR}.ppo_max_token_len_per_gpu=512",
    ),
    (
        "batch.dyn_same",
        [f"{ROLLOUT}.log_prob_use_dynamic_bsz=False", f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=1"],
        "actor.use_dynamic_bsz=True, rollout.log_prob_use_dynamic_bsz=False",
        f"{ROLLOUT}.log_prob_use_dynamic_bsz=True",
    ),
    ("par.dense", [MEGATRON, GPUS_8, f"{TP}=3"], "world 8 = 1 node x 8; tp 3 x pp 1 x cp 1", f"{TP}=2"),
    ("par.dense", [MEGATRON, f"{TP}=2"], "tp x pp x cp = 2", f"{TP}=1"),
    ("par.dense", [MEGATRON, GPUS_2, f"{CP}=3"], "tp 1 x pp 1 x cp 3", f"{TP}=1 {PP}=1 {CP}=1"),
    ("par.layers", [MEGATRON, GPUS_8, f"{PP}=8"], "4 layers; pp 8", f"{PP}=4"),
    (
        "par.layers",
        [
            MEGATRON,
            GPUS_2,
            f"{PP}=2",
            f"{ACTOR}.megatron.override_transformer_config.num_layers_in_first_pipeline_stage=5",
        ],
        "first stage 5",
        f"{PP}=2",
    ),
    ("par.heads", [MEGATRON, GPUS_8, f"{TP}=8"], "tp 8; 4 heads, 2 key-value heads", f"{TP}=4"),
    (
        "par.fsdp",
        [GPUS_8, f"{ACTOR}.fsdp_config.fsdp_size=3"],
        "fsdp_size=3; world 8",
        f"{ACTOR}.fsdp_config.fsdp_size=4",
    ),
    (
        "par.colocated",
        [MEGATRON, GPUS_2, f"{TP}=2", f"{REF}.megatron.tensor_model_parallel_size=1"],
        "ref",
        f"{REF}.megatron",
    ),
    ("par.colocated", [f"{REF}.strategy=megatron"], "strategy=megatron, actor.strategy=fsdp2", f"{REF}.strategy=fsdp2"),
    (
        "roll.world",
        [f"{ROLLOUT}.tensor_model_parallel_size=2"],
        "rollout tp 2",
        f"{ROLLOUT}.tensor_model_parallel_size=1",
    ),
    ("roll.sync", ["actor_rollout_ref.hybrid_engine=False"], "rollout.nnodes=0", f"{ROLLOUT}.nnodes=1"),
    ("roll.sync", [f"{ROLLOUT}.nnodes=1"], "hybrid_engine=True", "actor_rollout_ref.hybrid_engine=False"),
    ("roll.sampling", [f"{ROLLOUT}.temperature=0"], "temperature=0.0", f"{ROLLOUT}.temperature=1.0"),
    ("len.model", [f"{ROLLOUT}.max_model_len=1000"], "max_model_len=1000", f"{ROLLOUT}.max_model_len=1024"),
    ("len.model", ["data.max_response_length=2000"], "max_position_embeddings=2048", "data.max_response_length=1536"),
    (
        "len.overlong",
        [f"{OVERLONG}.enable=True", f"{OVERLONG}.len=64"],
        "max_resp_len=None",
        "reward.reward_kwargs.max_resp_len=512",
    ),
    (
        "len.overlong",
        [f"{OVERLONG}.enable=True", f"{OVERLONG}.len=600", "reward.reward_kwargs.max_resp_len=512"],
        "len=600, max_resp_len=512",
        f"{OVERLONG}.len=128",
    ),
    (
        "len.rollout",
        [f"{ROLLOUT}.prompt_length=5"],
        "prompt_length=5; data.max_prompt_length=512",
        f"{ROLLOUT}.prompt_length=512",
    ),
    ("algo.adv", ["algorithm.adv_estimator=grop"], "adv_estimator=grop", "algorithm.adv_estimator=grpo"),
    ("algo.loss", [f"{ACTOR}.loss_scale_factor=5"], "loss_agg_mode=token-mean", f"{ACTOR}.loss_scale_factor=null"),
    ("algo.loss", [f"{ACTOR}.clip_ratio_low=1.5"], "clip_ratio_low=1.5", f"{ACTOR}.clip_ratio_low=0.2"),
    ("algo.loss", [f"{ACTOR}.clip_ratio_c=0.9"], "clip_ratio_c=0.9", f"{ACTOR}.clip_ratio_c=3.0"),
    (
        "ckpt.save",
        [f"{ACTOR}.checkpoint.save_contents=[model,nothing]"],
        "nothing",
        f"{ACTOR}.checkpoint.save_contents=[model]",
    ),
    ("ckpt.save", ["trainer.resume_mode=resume_path"], "resume_from_path=null", "trainer.resume_from_path=DIRECTORY"),
    (
        "ckpt.dist",
        [MEGATRON, f"{ACTOR}.megatron.use_dist_checkpointing=True"],
        "dist_checkpointing_path=empty",
        f"{ACTOR}.megatron.dist_checkpointing_path=DIRECTORY",
    ),
    (
        "dev.npu_only",
        [MEGATRON, f"+{ACTOR}.megatron.override_transformer_config.use_flash_attn=True"],
        "use_flash_attn on cpu (argument 13)",
        "remove it",
    ),
    (
        "dsa.own_layers",
        [MEGATRON, f"+{ACTOR}.megatron.override_transformer_config.dsa_indexer_topk=64"],
        "dsa_indexer_topk (argument 13)",
        "remove it",
    ),
    ("value.range", ["data.train_batch_size=0"], "train_batch_size=0", "data.train_batch_size=1"),
    ("value.range", [f"{ROLLOUT}.top_p=1.5"], "top_p=1.5", f"{ROLLOUT}.top_p=1.0"),
    ("value.range", [f"{ACTOR}.optim.betas=[0.9]"], "betas=[0.9]", f"{ACTOR}.optim.betas=[0.9,0.999]"),
    (
        "reward.file",
        ["reward.custom_reward_function.path=/none/f.py"],
        "no such file",
        "reward.custom_reward_function.path=FILE",
    ),
    (
        "ray.python",
        ["ray_kwargs.ray_init.runtime_env.py_executable=no-such-tool run"],
        "no-such-tool is not on PATH",
        "ray_kwargs",
    ),
    (
        "data.files",
        ["data.train_files=/none/train.parquet"],
        "/none/train.parquet: no such file",
        "data.train_files=FILE",
    ),
    ("data.files", ["data.val_files=val.csv"], "val.csv", "data.val_files=FILE"),
    (
        "model.path",
        ["actor_rollout_ref.model.path=/none/model"],
        "/none/model: no such directory",
        "actor_rollout_ref.model.path",
    ),
]


@pytest.mark.parametrize(
    ("id", "arguments", "got", "fix"), BROKEN, ids=[f"{row[0]}-{i}" for i, row in enumerate(BROKEN)]
)
def test_broken_rules(tmp_path, id, arguments, got, fix):
    lines = errors(tmp_path, *arguments)[id].split("\n")
    assert lines[0].startswith(f"ConfigError[{id}] ")
    assert lines[1].startswith("  got:      ") and got in lines[1]
    assert lines[2].startswith("  expected: ")
    assert lines[3].startswith("  do this:  ") and fix in lines[3]


def test_the_suggested_mini_batch_mends_the_error(tmp_path):
    more = (GPUS_8, "data.train_batch_size=24", f"{ROLLOUT}.n=2")
    text = errors(tmp_path, *more, f"{ACTOR}.ppo_mini_batch_size=3")["batch.mini_dp"]
    fix = text.rpartition("do this:  ")[2].split()[0]
    assert fix == f"{ACTOR}.ppo_mini_batch_size=4"
    load(tmp_path, *more, fix)


def test_context_parallel_ranks_share_sequences_and_token_budget(tmp_path):
    more = (GPUS_4, f"{CP}=2", f"{ACTOR}.ppo_max_token_len_per_gpu=512", f"{ACTOR}.use_kl_loss=True")
    config = load(tmp_path, MEGATRON, *more).config
    assert (config.derived.dp, config.derived.train_tokens_per_micro_batch) == (2, 1024)
    assert config.actor_rollout_ref.ref.megatron.context_parallel_size == 2
    options = [wiring.update_options(config), wiring.old_log_prob_options(config), wiring.reference_options(config)]
    assert [each.max_tokens for each in options] == [1024, 1024, 1024]
    assert wiring.actor_spec(config, "cpu", total_steps=1).backend.context_parallel_size == 2
    assert "par.colocated" in errors(tmp_path, MEGATRON, *more, f"{REF}.megatron.context_parallel_size=1")


def test_the_architecture_must_be_known(tmp_path):
    text = errors(tmp_path, architectures=["MixtralForCausalLM"])["model.arch"]
    assert "MixtralForCausalLM" in text
    assert "one of LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM, Qwen3MoeForCausalLM, " in text


def test_a_hub_id_is_not_looked_up(tmp_path):
    assert load(tmp_path, "actor_rollout_ref.model.path=Qwen/Qwen3-8B").model is None


def test_tensorboard_must_be_installed(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    text = errors(tmp_path, "trainer.logger=[console,tensorboard]")["log.package"]
    assert "tensorboard is not installed" in text and "trainer.logger=[console]" in text


def test_relative_data_files_lie_in_dataset_dir(tmp_path):
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "a.parquet").write_text("")
    load(tmp_path, "data.train_files=[a.parquet]", f"data.dataset_dir={tmp_path}/more")
    assert "data.files" in errors(tmp_path, "data.train_files=[a.parquet]", f"data.dataset_dir={tmp_path}")


@pytest.mark.parametrize(
    ("argument", "part"),
    [
        (f"{ROLLOUT}.n=1", "a group of one has no baseline"),
        (f"{ACTOR}.ppo_micro_batch_size_per_gpu=4", "is ignored: use_dynamic_bsz=True"),
        (f"{ROLLOUT}.val_kwargs.temperature=0.6", "do_sample=False has no effect"),
        (f"{ROLLOUT}.top_p=0.9", "uncut distribution"),
        ("trainer.resume_from_path=/x", "no effect with resume_mode=auto"),
    ],
)
def test_warnings(tmp_path, argument, part):
    assert len([notice for notice in load(tmp_path, argument).notices if part in notice]) == 1


def test_a_kl_loss_with_coefficient_zero_warns(tmp_path):
    loaded = load(tmp_path, f"{ACTOR}.use_kl_loss=True", f"{ACTOR}.kl_loss_coef=0.0")
    assert loaded.config.derived.needs_reference
    assert len([notice for notice in loaded.notices if "loaded for nothing" in notice]) == 1


def test_version_of_a_missing_package_is_said(monkeypatch):
    from trainer.config.checks_rollout import rollout_version

    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr("trainer.config.checks_rollout.version", missing)
    assert rollout_version("vllm") == "rollout.name=vllm (not installed)"
    assert rollout_version("hf") == "rollout.name=hf"
