"""Sequences split over context-parallel ranks: the same numbers as on one rank, and where every token goes."""

import pytest
import torch

from engines import build_train_engine
from engines.attention import packed_attention
from engines.base import ForwardOptions
from engines.batch import Denominators, TrainBatch, cumulative
from engines.megatron import context_parallel
from engines.megatron.layers.attention import piece_attention
from engines.metric import Metric
from engines.spec import LrSchedule, MegatronSpec, ModelSpec, OptimSpec, TrainEngineSpec
from tests.ranks import run_ranks
from tests.tiny import write_tiny_model

# One token, fewer tokens than ranks, and lengths that no number of pieces divides.
LENGTHS = [19, 7, 1, 33, 2, 3]
# A large eps keeps Adam smooth in the gradient (with 1e-8 it is the sign): a weight shows its gradient's size.
OPTIM = OptimSpec(LrSchedule(1e-2), weight_decay=0.1, eps=1e-2, clip_grad=0.7)
MODELS = {
    "llama": {},
    "qwen3": {},
    "one kv head": dict(num_key_value_heads=1),
    "llama_tied": dict(num_hidden_layers=4),
}
UNEVEN = {"num_layers_in_first_pipeline_stage": 1}
FULL = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
SELECTIVE = dict(recompute_granularity="selective", recompute_modules=["core_attn", "mlp"])
LAYOUTS = {
    "cp2": dict(context_parallel_size=2),
    "cp2 full recompute": dict(context_parallel_size=2, override_transformer_config=FULL),
    "cp2 selective recompute": dict(context_parallel_size=2, override_transformer_config=SELECTIVE),
    "cp4": dict(context_parallel_size=4),
    "cp2 dp2": dict(context_parallel_size=2),
    "cp2 tp2": dict(context_parallel_size=2, tensor_model_parallel_size=2),
    "cp2 pp2": dict(context_parallel_size=2, pipeline_model_parallel_size=2, override_transformer_config=UNEVEN),
    "cp2 pp2 vpp2": dict(
        context_parallel_size=2, pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2
    ),
}


def _batch() -> TrainBatch:
    generator = torch.Generator().manual_seed(0)
    batch = TrainBatch.pack([torch.randint(3, 130, (n,), generator=generator).tolist() for n in LENGTHS])
    batch.tokens["loss_mask"] = (batch.position_ids > 0).float()
    batch.tokens["advantages"] = torch.randn(batch.num_tokens, generator=generator)
    return batch


def _loss(output, batch, denominators):
    """Weights per token, a square per whole sequence, and entropy: nothing here may see a part for the whole."""
    mask_T = batch.tokens["loss_mask"]
    means_B = torch.stack([row.sum() / max(1, len(row) - 1) for row in batch.rows(output.log_probs * mask_T)])
    tokens = (batch.tokens["advantages"] * output.log_probs + 0.1 * output.entropy) * mask_T
    loss = means_B.square().sum() / denominators.sequences - tokens.sum() / denominators.tokens
    return loss, {"loss": Metric("partial", loss.item())}


def _on_rank(rank: int, world: int, cases: list[tuple[str, str]]) -> list[dict]:
    """For each (folder, layout): log-probs and entropy, then loss, gradient norm and weights after two updates."""
    results = []
    for folder, layout in cases:
        backend = MegatronSpec(dtype="float32", **LAYOUTS.get(layout, {}))
        engine = build_train_engine(TrainEngineSpec("megatron", "cpu", ModelSpec(folder), backend, OPTIM, timeout_s=60))
        engine.load(folder)
        whole = _batch()
        scores = engine.log_probs(whole, ForwardOptions(max_tokens=40, entropy=True, temperature=0.8))
        share = whole.select(range(engine.dp_rank, len(whole), engine.dp_size))
        options = ForwardOptions(micro_batch_size=2, entropy=True, entropy_grad=True, temperature=0.8)
        steps = [engine.update(share, _loss, Denominators(59.0, 6.0), options, step) for step in range(2)]
        weights = {name: value.clone() for name, value in engine.hf_weights()}
        output = engine.is_output_rank
        results.append(
            dict(scores=scores if output else None, losses=[s["loss"].value for s in steps] if output else None)
            | dict(norms=[s["actor/grad_norm"].value for s in steps], weights=weights)
        )
        engine.close()
    return results


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, str]:
    kinds = {"one kv head": "llama"}
    return {
        name: str(write_tiny_model(tmp_path_factory.mktemp("model"), kinds.get(name, name), **changes))
        for name, changes in MODELS.items()
    }


@pytest.fixture(scope="module")
def one_rank(folders) -> dict[str, dict]:
    results = run_ranks(_on_rank, 1, [(folder, "one rank") for folder in folders.values()])[0]
    for result in results:
        assert result["norms"][0] > OPTIM.clip_grad and abs(result["losses"][0] - result["losses"][1]) > 0.1, result
    return dict(zip(folders, results, strict=True))


def _close(got: torch.Tensor, want: torch.Tensor, label: object) -> None:
    torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-6, msg=lambda m: f"{label}: {m}")


def _check(folders: dict[str, str], one_rank: dict[str, dict], world: int, cases: list[tuple[str, str]]) -> None:
    ranks = run_ranks(_on_rank, world, [(folders[model], layout) for model, layout in cases], timeout=240)
    for number, label in enumerate(cases):
        expected, results = one_rank[label[0]], [rank[number] for rank in ranks]
        outputs = [result for result in results if result["scores"] is not None]
        for result in outputs:
            _close(result["scores"].log_probs, expected["scores"].log_probs, label)
            _close(result["scores"].entropy, expected["scores"].entropy, label)
        losses = [sum(parts) for parts in zip(*(result["losses"] for result in outputs), strict=True)]
        assert losses == pytest.approx(expected["losses"], rel=1e-6), label
        for result in results:
            assert result["norms"] == pytest.approx(expected["norms"], rel=1e-6), label
        assert results[0]["weights"].keys() == expected["weights"].keys()
        assert not any(result["weights"] for result in results[1:]), label
        for name, value in expected["weights"].items():
            _close(results[0]["weights"][name], value, (*label, name))


@pytest.mark.gloo
def test_two_ranks_equal_one(folders, one_rank):
    layouts = ("cp2", "cp2 full recompute", "cp2 selective recompute")
    _check(folders, one_rank, 2, [("llama", "cp2"), *(("qwen3", layout) for layout in layouts)])


@pytest.mark.gloo
@pytest.mark.slow
def test_four_ranks_equal_one(folders, one_rank):
    layouts = ("cp4", "cp2 dp2", "cp2 tp2", "cp2 pp2")
    cases = [(model, layout) for model in ("llama", "qwen3") for layout in layouts]
    _check(folders, one_rank, 4, [*cases, ("one kv head", "cp2 tp2"), ("llama_tied", "cp2 pp2 vpp2")])


def _as_rank(monkeypatch, rank: int, size: int) -> None:
    monkeypatch.setattr(context_parallel, "_rank", lambda: rank)
    monkeypatch.setattr(context_parallel, "_size", lambda: size)


def test_a_rank_holds_one_early_and_one_late_piece_of_every_sequence(monkeypatch):
    tokens = torch.arange(100, 108)
    for rank, held in ((0, [100, 101, 106, 107]), (1, [102, 103, 104, 105])):
        _as_rank(monkeypatch, rank, 2)
        assert context_parallel.cut([8], 1, tokens.device).local(tokens).tolist() == held
    # A sequence of 3 becomes 4, one of 1 becomes 4, and sequence parallelism over 3 wants 6 on each rank.
    for rank, held in ((0, [1, -1, 4, -1, -1, -1]), (1, [2, 3, -1, -1, -1, -1])):
        _as_rank(monkeypatch, rank, 2)
        part = context_parallel.cut([3, 1], 3, tokens.device)
        assert part.lengths == (4, 8)
        assert part.local(torch.tensor([1, 2, 3, 4]), fill=-1).tolist() == held


@pytest.mark.parametrize("size, multiple", [(1, 1), (1, 4), (2, 2), (4, 3)])
def test_what_the_ranks_hold_comes_back_in_order_without_padding(monkeypatch, size, multiple):
    values = torch.randn(sum(LENGTHS), 2)
    parts = []
    for rank in range(size):
        _as_rank(monkeypatch, rank, size)
        part = context_parallel.cut(LENGTHS, multiple, values.device)
        parts.append(part.local(values, fill=float("nan")))
        assert len(parts[-1]) % multiple == 0 and len(parts[-1]) * size == sum(part.lengths)
    assert torch.equal(torch.cat(parts)[part.held_T], values)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("heads, groups, value_size", [(4, 4, 24), (6, 2, 28), (4, 1, 16)])
def test_attention_of_all_pieces_equals_attention_of_whole_sequences(size, heads, groups, value_size):
    torch.manual_seed(0)
    lengths = [16, 8, 40, 8, 24]
    shapes = ((heads, 24), (groups, 24), (groups, value_size))
    inputs = [torch.randn(sum(lengths), *shape, dtype=torch.float64) for shape in shapes]
    ours, theirs = ([x.clone().requires_grad_() for x in inputs] for _ in range(2))
    grad = torch.randn(sum(lengths), heads, value_size, dtype=torch.float64)
    offsets = cumulative(lengths)
    expected = packed_attention(*theirs, offsets, 0.3)
    expected.backward(grad)
    query, key, value = ours
    for rank in range(size):
        pieces = context_parallel.pieces(lengths, rank, size)
        rows = torch.cat([torch.arange(p.start, p.stop) + offsets[p.sequence] for p in pieces])
        out = piece_attention(query[rows], key, value, offsets, pieces, 0.3)
        torch.testing.assert_close(out, expected[rows], atol=1e-12, rtol=0)
        out.backward(grad[rows])
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad, atol=1e-12, rtol=0)


def test_every_rank_does_the_same_work():
    for size in (2, 4, 8):
        seen = [sum(p.stop for p in context_parallel.pieces([64, 16], rank, size)) for rank in range(size)]
        assert len(set(seen)) == 1, seen
