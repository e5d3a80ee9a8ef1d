"""One trajectory for all engines and layouts: five optimizer steps in float32, loss and gradient norm to 1e-4."""

import pytest
import torch

from engines import build_train_engine
from engines.base import ForwardOptions
from engines.batch import Denominators, TrainBatch
from engines.metric import Metric, merge
from engines.spec import FsdpSpec, LrSchedule, MegatronSpec, ModelSpec, OptimSpec, TrainEngineSpec
from tests.ranks import run_ranks
from tests.tiny import write_tiny_model

STEPS = 5
KINDS = ("qwen3", "llama_tied")
UNEVEN = {"num_layers_in_first_pipeline_stage": 1}
OPTIM = OptimSpec(LrSchedule(2e-3, style="cosine", total_steps=8, warmup_steps=1), weight_decay=0.1, clip_grad=1.0)
BACKENDS = {
    "fsdp": FsdpSpec(param_dtype="float32"),
    "megatron": MegatronSpec(dtype="float32"),
    "tp2": MegatronSpec(dtype="float32", tensor_model_parallel_size=2),
    "pp2": MegatronSpec(dtype="float32", pipeline_model_parallel_size=2, override_transformer_config=UNEVEN),
    "tp2 pp2": MegatronSpec(
        dtype="float32",
        tensor_model_parallel_size=2,
        pipeline_model_parallel_size=2,
        override_transformer_config=UNEVEN,
    ),
}
BY_ONE, BY_TWO, ALL = (ForwardOptions(micro_batch_size=size, temperature=0.8) for size in (1, 2, 6))
BUDGET = ForwardOptions(max_tokens=40, temperature=0.8)


def _batch(step: int) -> TrainBatch:
    """Six sequences of very different lengths; token ids, advantages and old log-probs drawn from the step.

    Ids start at 3: transformers gives the pad token's embedding no gradient.
    """
    generator = torch.Generator().manual_seed(step)
    lengths = [19, 4, 33, 11, 2, 27]
    batch = TrainBatch.pack([torch.randint(3, 130, (n,), generator=generator).tolist() for n in lengths])
    first = batch.position_ids == 0
    batch.tokens["loss_mask"] = ((torch.rand(batch.num_tokens, generator=generator) < 0.7) & ~first).float()
    batch.tokens["advantages"] = torch.randn(batch.num_tokens, generator=generator)
    batch.tokens["old_log_probs"] = -4.8 + 0.1 * torch.randn(batch.num_tokens, generator=generator)
    return batch


def _loss(output, batch, denominators):
    """Clipped policy gradient with a small entropy bonus."""
    mask_T, advantages_T = batch.tokens["loss_mask"], batch.tokens["advantages"]
    ratio_T = (output.log_probs - batch.tokens["old_log_probs"]).clamp(-3, 1).exp()
    gain_T = torch.minimum(ratio_T * advantages_T, ratio_T.clamp(0.8, 1.2) * advantages_T) + 0.01 * output.entropy
    loss = -(gain_T * mask_T).sum() / denominators.tokens
    return loss, {"loss": Metric("partial", loss.item())}


def _trajectories(rank: int, world: int, folders: list[str], cases: list[tuple]) -> list[list[dict]]:
    """Per (folder, case): one metric dict per step, empty on ranks whose metrics do not count."""
    return [_trajectory(folder, *case) for folder in folders for case in cases]


def _trajectory(folder: str, name: str, options: ForwardOptions, shuffled: bool) -> list[dict]:
    kind = "fsdp" if name == "fsdp" else "megatron"
    engine = build_train_engine(TrainEngineSpec(kind, "cpu", ModelSpec(folder), BACKENDS[name], OPTIM, timeout_s=60))
    engine.load(folder)
    options = ForwardOptions(**{**vars(options), "entropy": True, "entropy_grad": True})
    order = [3, 0, 5, 1, 4, 2] if shuffled else range(6)
    steps = []
    for step in range(STEPS):
        batch = _batch(step)
        denominators = Denominators(float(batch.tokens["loss_mask"].sum()), 6.0)
        share = batch.select(list(order)[engine.dp_rank :: engine.dp_size])
        metrics = engine.update(share, _loss, denominators, options, step)
        steps.append(metrics if engine.is_output_rank else {})
    engine.close()
    return steps


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> list[str]:
    return [str(write_tiny_model(tmp_path_factory.mktemp(kind), kind)) for kind in KINDS]


@pytest.fixture(scope="module")
def reference(folders) -> list[list[dict]]:
    """FSDP on one rank with the whole batch at once; one trajectory per model."""
    trajectories = run_ranks(_trajectories, 1, folders, [("fsdp", ALL, False)])[0]
    for steps in trajectories:
        losses = {round(step["loss"].value, 3) for step in steps}
        assert len(losses) == STEPS, f"a trajectory that does not move proves nothing: {losses}"
    return trajectories


def _check(folders: list[str], reference: list[list[dict]], world: int, cases: list[tuple]) -> None:
    ranks = run_ranks(_trajectories, world, folders, cases, timeout=240)
    for i, trajectories in enumerate(zip(*ranks, strict=True)):
        expected, label = reference[i // len(cases)], (KINDS[i // len(cases)], *cases[i % len(cases)])
        for step, (want, *parts) in enumerate(zip(expected, *trajectories, strict=True)):
            got = merge(parts)
            for key in ("loss", "actor/grad_norm", "actor/lr"):
                assert got[key].value == pytest.approx(want[key].value, rel=1e-4), (label, step, key)


@pytest.mark.gloo
def test_one_rank_however_the_batch_is_cut(folders, reference):
    cuts = [(BY_ONE, False), (BY_TWO, True), (BUDGET, False), (ALL, False)]
    _check(folders, reference, 1, [(name, *cut) for name in ("fsdp", "megatron") for cut in cuts])


@pytest.mark.gloo
def test_two_ranks_in_every_layout(folders, reference):
    layouts = [("fsdp", BY_TWO, True), ("tp2", BY_TWO, False), ("pp2", BY_ONE, False), ("megatron", BUDGET, True)]
    _check(folders, reference, 2, layouts)


@pytest.mark.gloo
@pytest.mark.slow
def test_tensor_and_pipeline_parallel_together(folders, reference):
    _check(folders, reference, 4, [("tp2 pp2", BY_ONE, False), ("tp2 pp2", BUDGET, True)])
