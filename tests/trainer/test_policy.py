"""The training ranks seen as one model: what is asked of them, and what must not depend on how many there are."""

from dataclasses import dataclass, field

import pytest
import torch

from engines.base import ForwardOptions
from engines.batch import PolicyOutput, TrainBatch
from engines.metric import Metric
from trainer.update import ranks as ranks_module
from trainer.update.loss import LossOptions, PolicyLoss
from trainer.update.policy import Policy
from trainer.workers import Scores

OPTIONS = ForwardOptions(micro_batch_size=1)


@dataclass
class Workers:
    """Stands for a group of workers, one per data-parallel share, and remembers what they were given."""

    size: int
    shares: list[TrainBatch] = field(default_factory=list)

    def call(self, method: str) -> list:
        assert method == "dp_place"
        return [(rank, self.size, True) for rank in range(self.size)]

    def call_each(self, method: str, arguments: list[tuple]) -> list:
        self.shares += [share for share, *_ in arguments]
        return [getattr(self, method)(*each) for each in arguments]

    def score(self, batch, options, ref_options):
        values_T = batch.input_ids.float()
        squares_T = values_T / 2 if options is not None and options.sum_pi_squared else None
        old = PolicyOutput(-values_T, sum_pi_squared=squares_T) if options is not None else None
        return Scores(old, -2 * values_T if ref_options is not None else None)

    def update(self, batch, role, loss, counts, options, step):
        return {"seen": Metric("count", counts.tokens)}


@pytest.fixture
def ranks(monkeypatch):
    monkeypatch.setattr(ranks_module.cluster, "put", lambda share: share)
    return Workers


def batch_of(lengths=(3, 1, 2, 4)):
    batch = TrainBatch.pack([[10 * row + i for i in range(n)] for row, n in enumerate(lengths)])
    generator = torch.Generator().manual_seed(0)
    batch.tokens["loss_mask"] = torch.ones(batch.num_tokens)
    for name in ("advantages", "old_log_probs"):
        batch.tokens[name] = torch.randn(batch.num_tokens, generator=generator)
    batch.samples["index"] = batch.samples["key"] = torch.arange(len(batch))
    return batch


def test_scores_come_back_in_the_order_of_the_batch(ranks):
    batch = batch_of()
    Policy(ranks(2), balance_batch=True).score(batch, ForwardOptions(micro_batch_size=1, sum_pi_squared=True), OPTIONS)
    ids_T = batch.input_ids.float()
    assert torch.equal(batch.tokens["old_log_probs"], -ids_T) and torch.equal(batch.tokens["ref_log_probs"], -2 * ids_T)
    assert torch.equal(batch.tokens["sum_pi_squared"], ids_T / 2)


def test_a_pass_that_nobody_asks_for_is_left_out(ranks):
    batch, group = batch_of(), ranks(2)
    del batch.tokens["old_log_probs"]
    assert "global_seqlen/mean" in Policy(group, balance_batch=True).score(batch, None, None)
    assert group.shares == [] and "old_log_probs" not in batch.tokens
    Policy(group, balance_batch=True).score(batch, None, OPTIONS)
    assert len(group.shares) == 2
    assert "ref_log_probs" in batch.tokens and "old_log_probs" not in batch.tokens


@pytest.mark.parametrize("mode", ["clip_cov", "kl_cov"])
def test_tokens_are_selected_over_a_whole_mini_batch_before_it_is_cut(ranks, mode):
    loss = PolicyLoss(LossOptions(mode, clip_cov_ratio=0.3, clip_cov_lb=-9.0, clip_cov_ub=9.0, kl_cov_ratio=0.3))
    found = []
    for size in (1, 2):
        group, batch = ranks(size), batch_of()
        metrics = Policy(group, balance_batch=True).update(batch, [[0, 3], [1, 2]] * 2, loss, OPTIONS, step=5)
        assert "cov_selected" not in batch.tokens and metrics["seen"].value == 2 * size * batch.num_tokens
        rows = [
            (sample, row.tolist())
            for share in group.shares
            for sample, row in zip(share.samples["key"].tolist(), share.rows(share.tokens["cov_selected"]), strict=True)
        ]
        found.append(sorted(rows))
    assert found[0] == found[1]
    chosen = sum(sum(row) for _, row in found[0])
    assert chosen == 2 * (2 + 1)  # int(.3 x 7) and at least one of 3, in each of two epochs
