"""The critic in worker processes beside the actor: values, steps towards returns, and back from disk."""

import pytest
import torch

from engines.base import ForwardOptions
from engines.batch import TrainBatch
from engines.spec import FsdpSpec, LrSchedule, MegatronSpec, ModelSpec, OptimSpec, TrainEngineSpec
from tests.tiny import write_tiny_model
from tests.trainer.test_cluster import REPOSITORY
from trainer.cluster import Cluster, Pool
from trainer.update.critic import Critic, CriticPlan
from trainer.update.policy import Policy
from trainer.update.value_loss import ValueLoss
from trainer.workers import TrainWorker

BACKENDS = {
    "fsdp": FsdpSpec(param_dtype="float32"),
    "megatron": MegatronSpec(dtype="float32", tensor_model_parallel_size=2),
}


def _plan(**changes) -> CriticPlan:
    return CriticPlan(ForwardOptions(max_tokens=64), ValueLoss(), **{"mini_batch_size": 2, **changes})


def test_the_plan_gives_each_epoch_its_own_order_and_the_actor_its_start():
    plain = _plan(epochs=2)
    assert plain.rows(4, 2, step=0) == [[0, 1, 2, 3], [4, 5, 6, 7]] * 2
    shuffled = _plan(epochs=2, shuffle_seed=5)
    first, again, later = (shuffled.rows(8, 1, step) for step in (0, 0, 1))
    assert first == again != later and first[:4] != first[4:]
    assert sorted(row for rows in first[:4] for row in rows) == list(range(8))
    assert [_plan(warmup_steps=2).actor_learns(step) for step in range(4)] == [False, False, True, True]
    assert plain.actor_learns(0)


@pytest.fixture(scope="module")
def ray_cluster():
    started = Cluster(bundles=2, env={"PYTHONPATH": REPOSITORY})
    yield started
    started.shutdown()


def _batch() -> TrainBatch:
    """Four samples: prompts of two tokens, then 3, 5, 1 and 4 of the policy's own."""
    generator = torch.Generator().manual_seed(0)
    lengths = [5, 7, 3, 6]
    batch = TrainBatch.pack([torch.randint(3, 130, (n,), generator=generator).tolist() for n in lengths])
    batch.tokens["loss_mask"] = (batch.position_ids >= 2).float()
    batch.tokens["returns"] = torch.randn(batch.num_tokens, generator=generator)
    batch.tokens["old_log_probs"] = torch.full((batch.num_tokens,), float("nan"))  # not the critic's to read
    return batch


@pytest.fixture
def folder(tmp_path) -> str:
    return str(write_tiny_model(tmp_path / "model", "qwen3"))


@pytest.fixture(params=["fsdp", pytest.param("megatron", marks=pytest.mark.slow)])
def group(request, ray_cluster, folder):
    """Two training ranks with an actor and a critic."""
    engine = request.param
    optim = OptimSpec(LrSchedule(1e-3))
    actor = TrainEngineSpec(engine, "cpu", ModelSpec(folder), BACKENDS[engine], optim, timeout_s=60)
    value = ModelSpec(folder, head="value")
    critic_spec = TrainEngineSpec(engine, "cpu", value, BACKENDS[engine], optim, timeout_s=60, role="critic")
    placement = ray_cluster.place(Pool(2, "CPU"))
    arguments = [(rank, 2, 1, actor, None, critic_spec) for rank in range(2)]
    group = ray_cluster.spawn("train", TrainWorker, placement, arguments, 1.0)
    group.call("build", group.call("rendezvous", False)[0])
    yield group
    group.kill()
    ray_cluster.release(placement)


@pytest.mark.gloo
def test_critic_and_actor_share_their_processes(group, folder, tmp_path):
    policy = Policy(group, balance_batch=True)
    critic = Critic(policy.ranks, _plan())

    batch = _batch()
    policy.score(batch, ForwardOptions(max_tokens=64), None)
    log_probs_T = batch.tokens["old_log_probs"]
    with critic.turn():
        critic.values(batch)
        first_T = batch.tokens["values"]
        metrics = critic.update(batch, critic.plan.rows(4, 1, step=0), step=0)
        losses = [metrics["critic/vf_loss"].value]
        for step in range(1, 4):
            metrics = critic.update(batch, critic.plan.rows(4, 1, step), step)
            losses.append(metrics["critic/vf_loss"].value)
    assert first_T.shape == (21,) and (first_T[[0, 5, 12, 15]] == 0).all() and first_T.abs().max() > 1e-3
    assert losses[-1] < 0.9 * losses[0], losses
    assert metrics["critic/optimizer_steps"].value == 2 and metrics["critic/lr"].value == 1e-3
    assert metrics["critic/grad_norm"].value > 0 and metrics["critic/nonfinite_grad_steps"].value == 0
    assert not [name for name in metrics if name.startswith("actor/")]

    policy.score(batch, ForwardOptions(max_tokens=64), None)
    assert torch.equal(batch.tokens["old_log_probs"], log_probs_T), "the actor must not move with the critic"

    critic.save(tmp_path / "checkpoint" / "critic")
    critic.values(batch)
    saved_T = batch.tokens["values"]
    critic.update(batch, critic.plan.rows(4, 1, 0), step=0)
    critic.restore(tmp_path / "checkpoint" / "critic")
    critic.values(batch)
    assert torch.equal(batch.tokens["values"], saved_T)
    critic.export_hf(tmp_path / "hf", folder)
    assert (tmp_path / "hf" / "model.safetensors").exists()
