"""Every policy loss gives both engines the same update."""

from pathlib import Path

import pytest
import torch

from engines import build_train_engine
from engines.base import ForwardOptions
from engines.batch import TrainBatch
from engines.spec import FsdpSpec, LrSchedule, MegatronSpec, ModelSpec, OptimSpec, TrainEngineSpec
from tests.ranks import run_ranks
from tests.tiny import write_tiny_model
from trainer.batching import denominators
from trainer.loss import LOSSES, LossOptions, PolicyLoss

pytestmark = pytest.mark.gloo

SEQUENCES = [[1, 9, 8, 7, 6, 5], [3, 4, 100, 129, 2, 77, 12], [50, 60, 70, 80]]
BACKENDS = {"fsdp": FsdpSpec(param_dtype="float32"), "megatron": MegatronSpec(dtype="float32")}


def _updates(rank: int, world: int, model: str) -> dict[str, dict[str, tuple[float, float]]]:
    """engine -> loss name -> (loss, gradient norm) of one off-policy update."""
    results: dict[str, dict[str, tuple[float, float]]] = {}
    for name, backend in BACKENDS.items():
        optim = OptimSpec(LrSchedule(lr=1e-3))
        engine = build_train_engine(TrainEngineSpec(name, "cpu", ModelSpec(model), backend, optim))
        options = ForwardOptions(micro_batch_size=2, entropy=True, entropy_grad=True)
        engine.load(model)
        batch = TrainBatch.pack(
            SEQUENCES,
            loss_mask=[[0.0, 0.0] + [1.0] * (len(row) - 2) for row in SEQUENCES],
            advantages=[[value] * len(row) for value, row in zip((1.0, -0.5, 0.7), SEQUENCES, strict=True)],
        )
        noise = 0.5 * torch.randn(batch.num_tokens, generator=torch.Generator().manual_seed(0))
        batch.tokens["old_log_probs"] = engine.log_probs(batch, options).log_probs + noise
        batch.tokens["ref_log_probs"] = batch.tokens["old_log_probs"] - noise / 2
        results[name] = {}
        for mode in LOSSES:
            engine.load(model)
            loss = PolicyLoss(
                LossOptions(loss_mode=mode, dro_beta=0.4, use_kl_loss=True, kl_loss_coef=0.1, entropy_coeff=0.01)
            )
            metrics = engine.update(batch, loss, denominators(batch), options, step=0)
            results[name][mode] = (metrics["actor/loss"].value, metrics["actor/grad_norm"].value)
        engine.close()
    return results


def test_one_update_with_every_loss(tmp_path: Path):
    results = run_ranks(_updates, 1, str(write_tiny_model(tmp_path / "model", "qwen3")))[0]
    assert set(results["fsdp"]) == set(LOSSES)
    for mode, (loss, norm) in results["fsdp"].items():
        assert results["megatron"][mode] == (pytest.approx(loss, rel=1e-4), pytest.approx(norm, rel=1e-4)), mode
        assert norm > 0
    # The losses really differ; only the two dppo gates keep the same tokens of this batch.
    assert len({round(norm, 6) for _, norm in results["fsdp"].values()}) == len(LOSSES) - 1
