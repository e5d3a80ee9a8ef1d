"""The critic in the configuration: when there is one, what it inherits, what it must share, and what engines get."""

import json

import pytest

from engines.spec import FsdpSpec, LrSchedule, MegatronSpec
from tests.trainer.config_bench import ACTOR, ROLLOUT, errors, load
from trainer import wiring_critic
from trainer.update.value_loss import ValueLoss

GAE = ("algorithm.adv_estimator=gae", "trainer.critic_warmup=3")
MEGATRON = "model_engine=megatron"
TP = "megatron.tensor_model_parallel_size"


def test_gae_has_a_critic_made_of_the_actors_model(tmp_path):
    override = "actor_rollout_ref.model.override_config.rope_theta=5000.0"
    config = load(tmp_path, *GAE, override, "critic.optim.lr_warmup_steps=2", "trainer.seed=9").config
    spec = wiring_critic.critic_spec(config, "cpu", total_steps=10)
    assert (spec.role, spec.model.head, spec.seed) == ("critic", "value", 9)
    assert spec.model.path == config.actor_rollout_ref.model.path
    assert spec.model.override_config == {"rope_theta": 5000.0}
    assert isinstance(spec.backend, FsdpSpec)
    assert spec.optim.schedule == LrSchedule(lr=1e-5, warmup_steps=2, total_steps=10)


def test_a_model_of_its_own_takes_nothing_from_the_actors(tmp_path):
    own = tmp_path / "reward"
    own.mkdir()
    (own / "config.json").write_text(json.dumps({}))
    override = "actor_rollout_ref.model.override_config.rope_theta=5000.0"
    config = load(tmp_path, *GAE, override, f"critic.model.path={own}").config
    model = wiring_critic.critic_spec(config, "cpu", total_steps=10).model
    assert (model.path, model.override_config) == (str(own), {})


def test_the_plan_is_the_actors_unless_it_is_given(tmp_path):
    plan = wiring_critic.critic_plan(load(tmp_path, *GAE, f"{ACTOR}.ppo_epochs=2", f"{ACTOR}.shuffle=True").config)
    assert (plan.mini_batch_size, plan.epochs, plan.warmup_steps) == (4, 2, 3)
    assert plan.shuffle_seed == 42 and plan.options.max_tokens == 32768
    assert plan.loss == ValueLoss(0.5, "token-mean", 512.0)
    more = ("critic.cliprange_value=null", "critic.loss_agg_mode=seq-mean-token-mean", "critic.ppo_epochs=1")
    more += ("critic.use_dynamic_bsz=False", "critic.ppo_micro_batch_size_per_gpu=2", "critic.ppo_mini_batch_size=8")
    plan = wiring_critic.critic_plan(load(tmp_path, *GAE, *more).config)
    assert plan.loss == ValueLoss(None, "seq-mean-token-mean", 512.0)
    assert (plan.options.micro_batch_size, plan.mini_batch_size, plan.epochs) == (2, 8, 1)


def test_megatron_inherits_the_actors_layout(tmp_path):
    config = load(tmp_path, *GAE, MEGATRON, "trainer.n_gpus_per_node=4", f"{ACTOR}.{TP}=2").config
    backend = wiring_critic.critic_spec(config, "cpu", total_steps=10).backend
    assert isinstance(backend, MegatronSpec) and backend.tensor_model_parallel_size == 2


def test_no_critic_without_gae(tmp_path):
    loaded = load(tmp_path, "critic.optim.lr=3e-5")
    assert wiring_critic.critic_spec(loaded.config, "cpu", 1) is wiring_critic.critic_plan(loaded.config) is None
    assert "critic.optim.lr: no effect, there is no critic" in loaded.notices
    assert any("trained for nothing" in text for text in load(tmp_path, "critic.enable=True").notices)


@pytest.mark.parametrize(
    ("given", "id", "got", "fix"),
    [
        ([*GAE[:1], "critic.enable=False"], "algo.adv", "enable=False, adv_estimator=gae", "critic.enable=True"),
        (["trainer.critic_warmup=2"], "algo.adv", "critic_warmup=2, no critic", "trainer.critic_warmup=0"),
        ([*GAE, "critic.ppo_mini_batch_size=3"], "batch.train_mini", "=3", "critic.ppo_mini_batch_size=2"),
        (
            [*GAE, "critic.ppo_mini_batch_size=2", f"{ROLLOUT}.n=3", "trainer.n_gpus_per_node=4"],
            "batch.mini_dp",
            "2 x rollout.n=3 = 6 sequences; dp=4",
            "critic.ppo_mini_batch_size=4",
        ),
        ([*GAE, "critic.use_dynamic_bsz=False"], "batch.micro_set", "=null", "critic.ppo_micro_batch_size_per_gpu=1"),
        (
            [*GAE, "critic.use_dynamic_bsz=False", "critic.ppo_micro_batch_size_per_gpu=5"],
            "batch.micro",
            "16 sequences per rank; ppo_micro_batch_size_per_gpu=5",
            "critic.ppo_micro_batch_size_per_gpu=4",
        ),
        (
            [*GAE, "critic.ppo_max_token_len_per_gpu=100"],
            "batch.tokens",
            "=100",
            "critic.ppo_max_token_len_per_gpu=1024",
        ),
        (
            [*GAE, MEGATRON, "trainer.n_gpus_per_node=2", f"critic.{TP}=2"],
            "par.colocated",
            "critic tensor_model_parallel_size=2, actor tensor_model_parallel_size=1",
            f"critic.{TP}=1",
        ),
        ([*GAE, "trainer.n_gpus_per_node=4", "critic.fsdp.fsdp_size=3"], "par.fsdp", "=3; world 4", "fsdp_size=4"),
        ([*GAE, "critic.loss_scale_factor=10"], "algo.loss", "loss_scale_factor=10", "critic.loss_scale_factor=null"),
        ([*GAE, "critic.model.path=/none/here"], "model.path", "no config.json", "critic.model.path=DIRECTORY"),
        (
            [*GAE, "critic.checkpoint.save_contents=[model,hf_model]"],
            "ckpt.save",
            "['model', 'hf_model']",
            "critic.checkpoint.save_contents=[model,optimizer,extra,hf_model]",
        ),
        ([*GAE, "critic.optim.betas=[0.9,1.5]"], "value.range", "[0.9, 1.5]", "critic.optim.betas=[0.9,0.999]"),
        ([*GAE, "critic.cliprange_value=0"], "value.range", "cliprange_value=0", "critic.cliprange_value="),
    ],
)
def test_what_does_not_fit_is_refused_with_its_remedy(tmp_path, given, id, got, fix):
    text = errors(tmp_path, *given)[id]
    assert got in text and fix in text, text
