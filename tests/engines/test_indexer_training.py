"""A trained indexer in the engine: it learns from its own loss, on any layout alike, and the policy does not notice."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engines import build_train_engine
from engines.base import ForwardOptions
from engines.batch import Denominators, TrainBatch
from engines.spec import LrSchedule, MegatronSpec, ModelSpec, OptimSpec, TrainEngineSpec
from tests.ranks import run_ranks
from tests.tiny import write_tiny_model

SEQUENCES = [[5, 6, 7, 8, 9, 129, 12, 31, 40], [3, 100, 129, 4, 8, 15, 16], [1, 2, 3, 4, 5, 6]]
MASK = [[0.0, 0.0, *[1.0] * (len(ids) - 2)] for ids in SEQUENCES]
OPTIM = OptimSpec(LrSchedule(1e-2), weight_decay=0.0, eps=1e-3, clip_grad=0.0)


def policy_loss(output, batch, denominators):
    return -(batch.tokens["loss_mask"] * output.log_probs).sum() / denominators.tokens, {}


def train(rank: int, world: int, folder: str) -> list[dict[str, Tensor]]:
    """Exported weights after one update, without and with the indexer's loss."""
    found = []
    for coefficient in (0.0, 0.5):
        backend = MegatronSpec(
            dtype="float32",
            tensor_model_parallel_size=world,
            indexer_loss_coeff=coefficient,
            use_distributed_optimizer=False,
        )
        engine = build_train_engine(TrainEngineSpec("megatron", "cpu", ModelSpec(folder), backend, OPTIM, timeout_s=60))
        engine.load(folder)
        batch = TrainBatch.pack(SEQUENCES, loss_mask=MASK)
        options = ForwardOptions(micro_batch_size=1 + world % 2)
        engine.update(batch, policy_loss, Denominators(sum(map(sum, MASK)), 3.0), options, step=0)
        found.append({name: tensor.clone() for name, tensor in engine.hf_weights()})
        engine.close()
    return found


@pytest.mark.gloo
@pytest.mark.slow
def test_an_indexer_learns_on_one_and_two_ranks_alike(tmp_path):
    folder = str(write_tiny_model(tmp_path, "glm_moe_dsa"))
    (still, trained), (_, trained_on_two) = run_ranks(train, 1, folder)[0], run_ranks(train, 2, folder)[0]
    moved = {name for name in still if not torch.equal(still[name], trained[name])}
    assert moved and {name.split(".")[4] for name in moved} == {"indexer"}
    assert {name.split(".")[5] for name in moved} == {"wq_b", "wk", "k_norm", "weights_proj"}
    for name, tensor in trained.items():
        assert torch.allclose(tensor, trained_on_two[name], atol=2e-5), name
