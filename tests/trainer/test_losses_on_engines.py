"""Every policy loss gives both engines the same update, however the model is spread over ranks."""

from pathlib import Path

import pytest
import torch

from engines import build_train_engine
from engines.base import ForwardOptions
from engines.batch import TrainBatch
from engines.metric import Metrics, merge
from engines.spec import FsdpSpec, LrSchedule, MegatronSpec, ModelSpec, OptimSpec, TrainEngineSpec
from tests.ranks import run_ranks
from tests.tiny import write_tiny_model
from trainer.batching import denominators, in_order, scatter
from trainer.credit.importance import WeightRule
from trainer.update.loss import LOSSES, LossOptions, PolicyLoss

pytestmark = pytest.mark.gloo

SEQUENCES = [[1, 9, 8, 7, 6, 5], [3, 4, 100, 129, 2, 77, 12], [50, 60, 70, 80]]
ONE_RANK = {"fsdp": FsdpSpec(param_dtype="float32"), "megatron": MegatronSpec(dtype="float32")}
TWO_RANKS = {
    "fsdp": ONE_RANK["fsdp"],
    "megatron tp2": MegatronSpec(dtype="float32", tensor_model_parallel_size=2),
    "megatron pp2": MegatronSpec(
        dtype="float32",
        pipeline_model_parallel_size=2,
        override_transformer_config={"num_layers_in_first_pipeline_stage": 1},
    ),
}
SCORING = ForwardOptions(micro_batch_size=2, entropy=True, sum_pi_squared=True)


def _batch(old_log_probs: torch.Tensor) -> TrainBatch:
    """Off-policy samples with everything that some loss reads."""
    batch = TrainBatch.pack(
        SEQUENCES,
        loss_mask=[[0.0, 0.0] + [1.0] * (len(row) - 2) for row in SEQUENCES],
        advantages=[[value] * len(row) for value, row in zip((1.0, -0.5, 0.7), SEQUENCES, strict=True)],
    )
    noise = 0.5 * torch.randn(batch.num_tokens, generator=torch.Generator().manual_seed(0))
    batch.tokens["old_log_probs"] = old_log_probs + noise
    batch.tokens["ref_log_probs"] = batch.tokens["old_log_probs"] - noise / 2
    batch.samples["key"] = torch.arange(3)
    return batch


def _loss(mode: str) -> PolicyLoss:
    return PolicyLoss(
        LossOptions(
            loss_mode=mode,
            dro_beta=0.4,
            clip_cov_ratio=0.3,
            clip_cov_lb=0.0,
            kl_cov_ratio=0.3,
            ppo_kl_coef=1.0,
            rollout_weights=WeightRule("geometric", 1.05),
            use_kl_loss=True,
            kl_loss_coef=0.1,
            entropy_coeff=0.01,
            length_loss_coef=0.2,
            length_max_len=8,
        )
    )


def _updates(rank: int, world: int, model: str, backends: dict) -> dict[str, tuple[torch.Tensor, dict[str, Metrics]]]:
    """Layout -> sums of squared probabilities [T], and loss name -> metrics of one update; None on ranks that do not
    answer for their data-parallel share."""
    results: dict[str, tuple[torch.Tensor, dict[str, Metrics]]] = {}
    old_log_probs = torch.zeros(sum(map(len, SEQUENCES)))
    for name, backend in backends.items():
        optim = OptimSpec(LrSchedule(lr=1e-3))
        engine = build_train_engine(TrainEngineSpec(name.split()[0], "cpu", ModelSpec(model), backend, optim))
        engine.load(model)
        scores = engine.log_probs(TrainBatch.pack(SEQUENCES), SCORING)
        if name == "fsdp":  # the first, so that all see the same old log-probs
            old_log_probs = scores.log_probs
        batch, updates = _batch(old_log_probs), {}
        for number, mode in enumerate(LOSSES):
            engine.load(model)
            mini, loss = batch.select(range(len(batch))), _loss(mode)
            loss.prepare_batch(mini, ["a", "a", "a"])
            loss.prepare_mini(mini, step=0, number=number)
            share = scatter(mini, in_order(mini.lengths, engine.dp_size))[engine.dp_rank]
            options = ForwardOptions(micro_batch_size=2, entropy=True, entropy_grad=True)
            updates[mode] = engine.update(share, loss, denominators(mini), options, step=0)
        if engine.is_output_rank:
            results[name] = (scores.sum_pi_squared, updates)
        engine.close()
    return results


def _check(ranks: list[dict], layouts: list[str]) -> dict[str, float]:
    """All layouts agree; gradient norms by loss."""
    found = {}
    for name in layouts:
        answers = [result[name] for result in ranks if name in result]
        merged = {mode: merge(updates[mode] for _, updates in answers) for mode in LOSSES}
        found[name] = answers[0][0], {mode: {k: m.value for k, m in row.items()} for mode, row in merged.items()}
    squares_T, expected = found.pop("fsdp")
    assert 0 < squares_T[1] < 1 and squares_T[0] == 0
    for name, (others_T, updates) in found.items():
        torch.testing.assert_close(others_T, squares_T, rtol=1e-5, atol=0, msg=name)
        for mode, metrics in updates.items():
            assert metrics == pytest.approx(expected[mode], rel=1e-4, abs=1e-6), (name, mode)
    return {mode: metrics["actor/grad_norm"] for mode, metrics in expected.items()}


def test_one_update_with_every_loss(tmp_path: Path):
    results = run_ranks(_updates, 1, str(write_tiny_model(tmp_path / "model", "qwen3")), ONE_RANK)
    norms = _check(results, list(ONE_RANK))
    # The losses really differ; only the two dppo gates keep the same tokens of this batch.
    assert min(norms.values()) > 0 and len({round(norm, 6) for norm in norms.values()}) == len(LOSSES) - 1


@pytest.mark.slow
def test_one_update_with_every_loss_on_two_ranks(tmp_path: Path):
    """fsdp with two data-parallel shares, Megatron with a split model: masks, selections and counts are global."""
    model = str(write_tiny_model(tmp_path / "model", "qwen3"))
    two = run_ranks(_updates, 2, model, TWO_RANKS)
    norms = _check(two, list(TWO_RANKS))
    assert norms == pytest.approx(_check(run_ranks(_updates, 1, model, ONE_RANK), list(ONE_RANK)), rel=1e-4)
