"""Routing replay on live routers: forced routes arrive, recorded ones are transformers' own, and gradients do not
depend on how tokens, layers and experts are spread or recomputed."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM

from engines import build_train_engine, hf_routing
from engines.base import ForwardOptions
from engines.batch import Denominators, TrainBatch
from engines.megatron.routing import live_routers
from engines.routes import RouteShape, align
from engines.spec import FsdpSpec, LrSchedule, MegatronSpec, ModelSpec, OptimSpec, TrainEngineSpec
from tests.ranks import run_ranks
from tests.tiny import write_tiny_model

# No sequence needs padding: with two context-parallel ranks lengths are multiples of four.
SEQUENCES = [list(range(20, 28)), [3, 100, 129, 4], list(range(40, 52)), [77, 3, 41, 11]]
TOKENS = sum(map(len, SEQUENCES))
DENOMINATORS = Denominators(20.0, 4.0)
OPTIM = OptimSpec(LrSchedule(1e-2), weight_decay=0.0, eps=1e-2, clip_grad=0.0)
FULL = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
MOE_ONLY = dict(recompute_granularity="selective", recompute_modules=["moe"])
LAYOUTS = {
    "fsdp": None,
    "fsdp recompute": None,
    "one rank": {},
    "recompute": dict(override_transformer_config=FULL),
    "recompute moe": dict(override_transformer_config=MOE_ONLY),
    "tp2": dict(tensor_model_parallel_size=2),
    "tp2 recompute": dict(tensor_model_parallel_size=2, override_transformer_config=FULL),
    "ep2": dict(expert_model_parallel_size=2),
    "pp2": dict(pipeline_model_parallel_size=2),
    "pp2 recompute": dict(pipeline_model_parallel_size=2, override_transformer_config=FULL),
    "vpp3": dict(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=3),
    "vpp3 recompute moe": dict(
        pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=3, override_transformer_config=MOE_ONLY
    ),
    "cp2": dict(context_parallel_size=2),
}
SOFTMAX = ("qwen3_moe", dict(num_hidden_layers=6, mlp_only_layers=[0, 3]))
SIGMOID = ("deepseek_v3", {})
SHAPES = {
    "qwen3_moe": RouteShape(layers=6, moe_layers=(1, 2, 4, 5), experts=8, topk=2),
    "deepseek_v3": RouteShape(layers=3, moe_layers=(1, 2), experts=8, topk=4),
}
# All at once: the interleaved schedule then adds a filler, which must record and count nothing.
BY_ONE, AT_ONCE = dict(micro_batch_size=1), dict(micro_batch_size=4)


def _engine(folder: str, layout: str):
    recompute = layout == "fsdp recompute"
    backend = FsdpSpec(param_dtype="float32")
    if LAYOUTS[layout] is not None:
        backend = MegatronSpec(dtype="float32", use_distributed_optimizer=False, **LAYOUTS[layout])
    kind = "fsdp" if LAYOUTS[layout] is None else "megatron"
    model = ModelSpec(folder, gradient_checkpointing=recompute)
    engine = build_train_engine(TrainEngineSpec(kind, "cpu", model, backend, OPTIM, timeout_s=60))
    engine.load(folder)
    return engine


def _forced(shape: RouteShape) -> Tensor:
    """[T, L, K] that differs between tokens and layers: token t of layer l goes to experts t+l, t+l+2, t+l+4, .."""
    first = torch.arange(TOKENS)[:, None, None] + torch.tensor(shape.moe_layers)[None, :, None]
    routes = (first + 2 * torch.arange(shape.topk)) % shape.experts
    return torch.cat([align(part, len(part), shape) for part in routes.split([len(s) for s in SEQUENCES])])


def _batch(engine, routes: Tensor | None = None) -> TrainBatch:
    weights = [[0.0] + [1 + 0.1 * (token % 7) for token in ids[1:]] for ids in SEQUENCES]
    batch = TrainBatch.pack(SEQUENCES, loss_mask=weights)
    if routes is not None:
        batch.tokens["routes"] = routes
    return batch.select(range(engine.dp_rank, len(batch), engine.dp_size))


def _loss(output, batch, denominators):
    return -(batch.tokens["loss_mask"] * output.log_probs).sum() / denominators.tokens, {}


def _live(engine) -> dict[int, torch.nn.Module]:
    return live_routers(engine.models) if engine.spec.engine == "megatron" else hf_routing.routers(engine.model)


def _count(engine, run) -> dict[int, list[int]]:
    """Tokens per expert that each live layer of experts is given while `run` runs."""
    counts = {}

    def add(layer: int, chosen_TE: Tensor) -> None:
        counts[layer] = counts.get(layer, 0) + chosen_TE.sum(0)

    handles = []
    for layer, router in _live(engine).items():
        if engine.spec.engine == "megatron":
            hook = router.register_forward_hook(lambda _, __, output, layer=layer: add(layer, output[1]))
        else:  # the experts' input: hooks of the replay change what the router returned
            experts = engine.model.base_model.layers[layer].mlp.experts
            hook = experts.register_forward_pre_hook(
                lambda _, inputs, layer=layer: add(layer, functional.one_hot(inputs[1], 8).sum(1))
            )
        handles.append(hook)
    run()
    for handle in handles:
        handle.remove()
    return {layer: count.tolist() for layer, count in counts.items()}


def _case(folder: str, layout: str, shape: RouteShape) -> dict:
    """What R2 records, how recorded and forced routes replay, and one step under forced routes."""
    engine, forced = _engine(folder, layout), _forced(shape)
    live = engine.log_probs(_batch(engine), ForwardOptions(record_routes=True, **AT_ONCE))
    result = {"live": live.log_probs, "recorded": live.routes, "own": sorted(_live(engine))}
    whole = forced.clone()  # the recorded routes at their places of the whole batch
    rows = range(engine.dp_rank, len(SEQUENCES), engine.dp_size)
    parts = TrainBatch.pack(SEQUENCES).rows(whole)
    for row, part in zip(rows, live.routes.split([len(SEQUENCES[row]) for row in rows]), strict=True):
        parts[row].copy_(part)
    replay = ForwardOptions(replay_routes=True, **BY_ONE)
    result["replayed"] = engine.log_probs(_batch(engine, whole), replay).log_probs
    batch = _batch(engine, forced)
    result["counts"] = _count(engine, lambda: engine.log_probs(batch, replay))
    result["forced"] = engine.log_probs(batch, replay).log_probs
    metrics = engine.update(_batch(engine, forced), _loss, DENOMINATORS, replay, step=0)
    result["metrics"] = {name: metric for name, metric in metrics.items()}
    result["after"] = engine.log_probs(batch, replay).log_probs
    result["gates"] = {name: value.clone() for name, value in engine.hf_weights() if "mlp.gate." in name}
    result["output"] = engine.is_output_rank
    assert all(vars(router).get("router_replay") is None for router in _live(engine).values())
    engine.close()
    return result


def _on_rank(rank: int, world: int, cases: list[tuple[str, str, str]]) -> list[dict]:
    return [_case(folder, layout, SHAPES[kind]) for folder, kind, layout in cases]


def _one_rank(rank: int, world: int, cases: list[tuple[str, str, str]]) -> list[dict]:
    _discarded_models_and_exceptions_leave_nothing_behind(cases[0][0])
    return _on_rank(rank, world, cases)


def _discarded_models_and_exceptions_leave_nothing_behind(folder: str) -> None:
    """Two models in one process; routes reach the one that runs. A pass that fails leaves routers alone."""
    shape = SHAPES["qwen3_moe"]
    discarded, engine = _engine(folder, "one rank"), _engine(folder, "one rank")
    first_two = torch.tensor([0, 1]).expand(TOKENS, 4, 2)
    batch = _batch(engine, align(first_two, TOKENS, shape))
    replay = ForwardOptions(replay_routes=True, **AT_ONCE)
    dead = _count(discarded, lambda: None)
    counts = _count(engine, lambda: engine.log_probs(batch, replay))
    assert counts == {layer: [TOKENS, TOKENS, 0, 0, 0, 0, 0, 0] for layer in (1, 2, 4, 5)} and dead == {}

    def fail(output, part, denominators):
        raise RuntimeError("a loss that fails")

    before = engine.log_probs(_batch(engine), ForwardOptions(**AT_ONCE)).log_probs
    with pytest.raises(RuntimeError, match="a loss that fails"):
        engine.update(batch, fail, DENOMINATORS, replay, step=0)
    assert all(router.router_replay is None for router in _live(engine).values())
    assert torch.equal(engine.log_probs(_batch(engine), ForwardOptions(**AT_ONCE)).log_probs, before)
    with pytest.raises(AssertionError, match="needs the routes of its batch"):
        engine.log_probs(_batch(engine), replay)
    engine.close()


def _reference(folder: Path, shape: RouteShape) -> Tensor:
    """[T, L, K] that transformers chooses by itself, sequence by sequence."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    chosen: dict[int, list[Tensor]] = {layer: [] for layer in shape.moe_layers}
    for layer in shape.moe_layers:
        gate = model.model.layers[layer].mlp.gate
        gate.register_forward_hook(lambda _, __, output, layer=layer: chosen[layer].append(output[2]))
    with torch.no_grad():
        for ids in SEQUENCES:
            model(torch.tensor([ids]))
    return align(torch.stack([torch.cat(chosen[layer]) for layer in shape.moe_layers], 1), TOKENS, shape)


def _whole(ranks: list[dict], name: str) -> Tensor:
    """A per-token result of all data-parallel shares, in the order of SEQUENCES."""
    shares = [rank[name] for rank in ranks if rank["output"]]
    pieces = {}
    for first, share in enumerate(shares):
        rows = range(first, len(SEQUENCES), len(shares))
        pieces |= dict(zip(rows, share.split([len(SEQUENCES[row]) for row in rows]), strict=True))
    return torch.cat([pieces[row] for row in range(len(SEQUENCES))])


def _check(label: str, ranks: list[dict], routes: Tensor, shape: RouteShape, expected: list[dict]) -> None:
    recorded, live = _whole(ranks, "recorded"), _whole(ranks, "live")
    assert torch.equal(recorded.sort(-1).values, routes.sort(-1).values), f"{label}: recorded routes"
    torch.testing.assert_close(_whole(ranks, "replayed"), live, atol=1e-6, rtol=0, msg=label)
    forced = _forced(shape)
    for layer in shape.moe_layers:
        counts = torch.tensor([rank["counts"][layer] for rank in ranks if layer in rank["counts"]]).sum(0)
        assert counts.tolist() == forced[:, layer].flatten().bincount(minlength=8).tolist(), (label, layer)
    assert float((_whole(ranks, "forced") - live).abs().max()) > 0.1, f"{label}: forced routes change nothing"
    for name, tolerance in (("live", 5e-6), ("forced", 5e-6), ("after", 2e-5)):
        torch.testing.assert_close(
            _whole(ranks, name), _whole(expected, name), atol=tolerance, rtol=0, msg=f"{label} {name}"
        )
    for name, gate in expected[0]["gates"].items():
        difference = float((ranks[0]["gates"][name] - gate).abs().max())
        assert difference <= 2e-6, f"{label} {name}: {difference} after one step"
    metrics = [rank["metrics"] for rank in ranks if rank["output"]]
    total = [sum(getattr(m["routing/overlap_ratio"], part) for m in metrics) for part in ("total", "weight")]
    wanted = expected[0]["metrics"]["routing/overlap_ratio"]
    assert total[0] / total[1] == pytest.approx(wanted.value, abs=1e-6), label
    assert sum(m["routing/replayed_rows"].value for m in metrics) == TOKENS - len(SEQUENCES), label
    for each in metrics:
        assert each["actor/grad_norm"].value == pytest.approx(expected[0]["metrics"]["actor/grad_norm"].value, rel=1e-5)


def _run(tmp_path: Path, on_rank, world: int, cases: list[tuple[tuple[str, dict], str]]) -> list[list[dict]]:
    """Results of (model, layout) cases, each case checked against one FSDP rank and transformers."""
    folders = {kind: write_tiny_model(tmp_path / kind, kind, **changes) for (kind, changes), _ in cases}
    reference = [(str(folder), kind, "fsdp") for kind, folder in folders.items()]
    expected = {kind: [r] for kind, r in zip(folders, run_ranks(_on_rank, 1, reference)[0], strict=True)}
    for kind, folder in folders.items():
        shape, routes = SHAPES[kind], _reference(folder, SHAPES[kind])
        sets = {tuple(sorted(row)) for row in routes[:, shape.moe_layers[0]].tolist()}
        assert len(sets) > 3, "tokens that all go the same way would pass in any order"
        _check(f"fsdp {kind}", expected[kind], routes, shape, expected[kind])
        for name, gate in expected[kind][0]["gates"].items():
            before = AutoModelForCausalLM.from_pretrained(folder).state_dict()[name]
            moved = float((gate - before).abs().max())
            assert moved > 1e-4 or name.endswith("correction_bias"), f"{name} has no gradient"
    prepared = [(str(folders[kind]), kind, layout) for (kind, _), layout in cases]
    results = run_ranks(on_rank, world, prepared, timeout=240)
    by_case = [[rank[i] for rank in results] for i in range(len(cases))]
    for ((kind, _), layout), ranks in zip(cases, by_case, strict=True):
        _check(f"{layout} {kind}", ranks, _reference(folders[kind], SHAPES[kind]), SHAPES[kind], expected[kind])
    return by_case


@pytest.mark.gloo
@pytest.mark.slow
def test_one_rank_of_each_engine(tmp_path):
    _run(tmp_path, _one_rank, 1, [(SOFTMAX, "one rank"), (SOFTMAX, "recompute moe"), (SIGMOID, "fsdp recompute")])


@pytest.mark.gloo
@pytest.mark.slow
def test_two_ranks_that_split_layers_and_tokens(tmp_path):
    by_case = _run(tmp_path, _on_rank, 2, [(SOFTMAX, "vpp3"), (SOFTMAX, "tp2 recompute"), (SIGMOID, "cp2")])
    assert [rank["own"] for rank in by_case[0]] == [[2, 4], [1, 5]]


@pytest.mark.gloo
@pytest.mark.slow
def test_one_rank_in_the_other_ways(tmp_path):
    cases = [(SOFTMAX, layout) for layout in ("fsdp recompute", "recompute")]
    _run(tmp_path, _one_rank, 1, cases + [(SIGMOID, layout) for layout in ("one rank", "recompute", "recompute moe")])


@pytest.mark.gloo
@pytest.mark.slow
def test_two_ranks_in_the_other_layouts(tmp_path):
    layouts = ("pp2", "pp2 recompute", "vpp3 recompute moe", "tp2", "ep2", "cp2", "fsdp")
    cases = [(SOFTMAX, layout) for layout in layouts]
    cases += [(SIGMOID, layout) for layout in ("fsdp", "ep2", "tp2 recompute")]
    by_case = _run(tmp_path, _on_rank, 2, cases)
    assert [rank["own"] for rank in by_case[0]] == [[1, 2], [4, 5]]
