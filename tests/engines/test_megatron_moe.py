"""Mixture-of-experts families on Megatron against transformers: log-probs, every gradient, its norm and one optimizer
step, over every way to spread experts."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from engines import build_train_engine
from engines.base import ForwardOptions
from engines.batch import Denominators, TrainBatch
from engines.megatron import cpu
from engines.spec import LrSchedule, MegatronSpec, ModelSpec, OptimSpec, TrainEngineSpec
from tests.ranks import run_ranks
from tests.tiny import MOE_KINDS, write_tiny_model

# Shorter and longer than index_topk (4), the number of keys a query of the sparse families may see.
SEQUENCES = [[5, 6, 7, 8, 9, 129, 12], [3, 100, 129, 4], list(range(20, 39)), [1, 2], [77, 3, 41, 11, 9]]
# Different weights for different tokens, so that a misplaced one shows.
WEIGHTS = [[0.0] + [1 + 0.1 * (token % 7) for token in ids[1:]] for ids in SEQUENCES]
DENOMINATORS = Denominators(32.0, 5.0)
OPTIM = OptimSpec(LrSchedule(1e-2), weight_decay=0.5, eps=1e-2, clip_grad=0.7)
UNEVEN = {"num_layers_in_first_pipeline_stage": 1}
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"
FROZEN = re.compile(r"\.indexer\.|correction_bias$|model\.layers\.3\.")  # layer 3 only where it predicts further tokens
TP2, EP2, ETP2 = ({f"{name}_parallel_size": 2} for name in ("tensor_model", "expert_model", "expert_tensor"))
LAYOUTS = {
    "one rank": {},
    "dp2": {},
    "tp2": TP2,  # experts whole on both ranks, each fed by half of the tokens
    "ep2": EP2,
    "ep2 sharded optimizer": EP2 | dict(use_distributed_optimizer=True),
    "tp2 ep2": TP2 | EP2,
    "tp2 etp2": TP2 | ETP2,
    "pp2": dict(pipeline_model_parallel_size=2, override_transformer_config=UNEVEN),
    "pp2 mtp": dict(pipeline_model_parallel_size=2, override_transformer_config=UNEVEN, mtp=True),
    "vpp2": dict(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2),
    "tp2 ep2 etp2": TP2 | EP2 | ETP2,
    "pp2 ep2": dict(pipeline_model_parallel_size=2, override_transformer_config=UNEVEN) | EP2,
}


def _engine(folder: str, layout: str):
    spec = MegatronSpec(**{"dtype": "float32", "use_distributed_optimizer": False, **LAYOUTS[layout]})
    engine = build_train_engine(TrainEngineSpec("megatron", "cpu", ModelSpec(folder), spec, OPTIM, timeout_s=60))
    engine.load(folder)
    return engine


def _loss(output, batch, denominators):
    return -(batch.tokens["loss_mask"] * output.log_probs).sum() / denominators.tokens, {}


def _update(engine) -> float:
    whole = TrainBatch.pack(SEQUENCES, loss_mask=WEIGHTS)
    share = whole.select(range(engine.dp_rank, len(whole), engine.dp_size))
    metrics = engine.update(share, _loss, DENOMINATORS, ForwardOptions(micro_batch_size=2), step=0)
    return metrics["actor/grad_norm"].value


def _weights(engine) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in engine.hf_weights()}


def _gradients(engine) -> dict[str, Tensor]:
    """Clipped gradients of the last update under Hugging Face names: they travel the weights' way, since conversion
    is linear. The weights are lost."""
    with torch.no_grad():
        for parameter in (p for model in engine.models for p in model.parameters()):
            parameter.copy_(parameter.main_grad if parameter.requires_grad else torch.zeros_like(parameter))
    return _weights(engine)


def _on_rank(rank: int, world: int, cases: list[tuple[str, str]]) -> list[dict]:
    results = []
    for folder, layout in cases:
        engine = _engine(folder, layout)
        scores = engine.log_probs(TrainBatch.pack(SEQUENCES), ForwardOptions(max_tokens=20, entropy=True))
        before, norm, after = _weights(engine), _update(engine), _weights(engine)
        sharded = engine.backend.use_distributed_optimizer  # then no rank has all gradients
        gradients = None if sharded else _gradients(engine)
        results.append(dict(scores=scores if engine.is_output_rank else None, norm=norm))
        results[-1] |= dict(before=before, after=after, gradients=gradients)
        engine.close()
    return results


def _one_rank(rank: int, world: int, cases: list[tuple[str, str]], folder: str) -> list[dict]:
    """First, bias values that bfloat16 would make one: they decide who is chosen, so they stay float32 all the way."""
    spec = TrainEngineSpec("megatron", "cpu", ModelSpec(folder), MegatronSpec(dtype="bfloat16"), OPTIM, timeout_s=60)
    engine = build_train_engine(spec)
    engine.load(folder)
    _update(engine)
    exported = {name: value.clone() for name, value in engine.hf_weights() if ".layers.1.mlp.gate." in name}
    assert torch.equal(exported[BIAS], load_file(f"{folder}/model.safetensors")[BIAS])
    assert exported[BIAS].dtype == torch.float32 and exported["model.layers.1.mlp.gate.weight"].dtype == torch.bfloat16
    engine.close()
    return _on_rank(rank, world, cases)


def _two_ranks(rank: int, world: int, cases: list[tuple[str, str]]) -> list[dict]:
    """First, rows gathered and summed where ranks have different numbers of them, forth and back."""
    cpu.adapt()
    sizes, scale = [3, 1], torch.tensor([1.0, 2.0])
    rows = (torch.arange(2.0 * sizes[rank]).view(-1, 2) + 10 * rank).requires_grad_()
    gathered = cpu.mappings.gather_from_sequence_parallel_region(rows, group=dist.group.WORLD, output_split_sizes=sizes)
    assert gathered.tolist() == [[0, 1], [2, 3], [4, 5], [10, 11]]
    total = cpu.mappings.reduce_scatter_to_sequence_parallel_region(gathered * (rank + 1), dist.group.WORLD, sizes)
    assert total.tolist() == (3 * rows).tolist()
    (total * scale).sum().backward()
    assert rows.grad.tolist() == [[3.0, 6.0]] * sizes[rank]
    return _on_rank(rank, world, cases)


def _on_disk(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Parameters of a live transformers model under the names of its files: experts one by one."""
    disk = {}
    for name, value in tensors.items():
        if found := re.fullmatch(r"(.*\.experts\.)(gate_up|down)_proj", name):
            for e, matrix in enumerate(value):
                parts = (
                    zip(("gate", "up"), matrix.chunk(2), strict=True) if found[2] == "gate_up" else [("down", matrix)]
                )
                disk |= {f"{found[1]}{e}.{part}_proj.weight": rows for part, rows in parts}
        else:
            disk[name] = value
    return disk


def _reference(folder: str) -> dict:
    """The same with transformers and torch.optim.AdamW, sequence by sequence."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    files = load_file(Path(folder) / "model.safetensors")
    log_probs, entropies, loss = [], [], 0.0
    for ids, weights in zip(SEQUENCES, WEIGHTS, strict=True):
        log_p_SV = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        values = torch.cat([torch.zeros(1), log_p_SV[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]])
        log_probs.append(values)
        entropies.append(torch.cat([torch.zeros(1), -(log_p_SV.exp() * log_p_SV).sum(-1)[:-1]]))
        loss = loss - (torch.tensor(weights) * values).sum() / DENOMINATORS.tokens
    loss.backward()
    trained = {name: p for name, p in model.named_parameters() if p.grad is not None}
    norm = torch.nn.utils.clip_grad_norm_(trained.values(), OPTIM.clip_grad)
    gradients = _on_disk({name: p.grad.clone() for name, p in trained.items()})
    decay = [p for p in trained.values() if p.ndim > 1], [p for p in trained.values() if p.ndim == 1]
    groups = [{"params": ps, "weight_decay": wd} for ps, wd in zip(decay, (OPTIM.weight_decay, 0.0), strict=True)]
    torch.optim.AdamW(groups, lr=1e-2, betas=OPTIM.betas, eps=OPTIM.eps).step()
    # Over the files: transformers does not read the layers that predict further tokens. They must stay as they are.
    after = files | _on_disk({name: value.detach() for name, value in model.state_dict().items()})
    scores = torch.cat(log_probs).detach(), torch.cat(entropies).detach()
    return dict(before=files, scores=scores, gradients=gradients, norm=float(norm), after=after)


def _check(expected: dict, label: str, ranks: list[dict]) -> None:
    got = ranks[0]
    assert got["before"].keys() == expected["before"].keys(), label
    for name, value in expected["before"].items():
        assert torch.equal(got["before"][name], value), (label, name)
    for scores in (result["scores"] for result in ranks if result["scores"] is not None):
        torch.testing.assert_close(scores.log_probs, expected["scores"][0], atol=5e-6, rtol=0, msg=label)
        torch.testing.assert_close(scores.entropy, expected["scores"][1], atol=5e-6, rtol=0, msg=label)
    for name, value in expected["gradients"].items() if got["gradients"] else ():
        difference = float((got["gradients"][name] - value).abs().max())
        assert difference <= 2e-5 * float(value.abs().max()), f"{label} {name}: gradients differ by {difference}"
    for result in ranks:
        assert result["norm"] == pytest.approx(expected["norm"], rel=1e-5), label
    for name, value in expected["after"].items():
        difference = float((got["after"][name] - value).abs().max())
        assert difference <= 2e-6, f"{label} {name}: weights differ by {difference} after one step"
    assert not any(result["before"] for result in ranks[1:]), "one rank hands out weights"


def _run(tmp_path: Path, on_rank: Callable, world: int, cases: list[tuple[str, str, dict]], *more: object) -> None:
    """Each case is (layout, kind of tiny model, changes to its config); all share one set of processes."""
    folders, references = {}, {}
    for _, kind, changes in cases:
        key = kind, str(changes)
        if key not in folders:
            folders[key] = str(write_tiny_model(tmp_path / str(len(folders)), kind, **changes))
            references[key] = _reference(folders[key])
            without = references[key]["before"].keys() - references[key]["gradients"].keys()
            assert all(FROZEN.search(name) for name in without), without
            assert references[key]["norm"] > OPTIM.clip_grad, "else clipping was not tested"
    keys = [(kind, str(changes)) for _, kind, changes in cases]
    prepared = [(folders[key], case[0]) for key, case in zip(keys, cases, strict=True)]
    results = run_ranks(on_rank, world, prepared, *more, timeout=240)
    for i, (key, case) in enumerate(zip(keys, cases, strict=True)):
        _check(references[key], f"{case[0]} {key}", [rank[i] for rank in results])


@pytest.mark.gloo
def test_one_rank_equals_transformers_for_every_family_and_kind_of_router(tmp_path):
    cases = [("one rank", kind, {}) for kind in MOE_KINDS]
    cases += [
        ("one rank", "qwen3_moe", dict(norm_topk_prob=False, mlp_only_layers=[1])),
        ("one rank", "deepseek_v3", dict(num_experts_per_tok=3)),  # not two experts for each chosen group
        ("one rank", "deepseek_v3", dict(q_lora_rank=None)),
    ]
    folder = write_tiny_model(tmp_path / "bias", "deepseek_v3")
    files = load_file(folder / "model.safetensors") | {BIAS: torch.linspace(5.0, 5.02, 8)}
    save_file(files, folder / "model.safetensors", metadata={"format": "pt"})
    _run(tmp_path, _one_rank, 1, cases, str(folder))


@pytest.mark.gloo
def test_two_ranks_equal_transformers_however_experts_are_spread(tmp_path):
    cases = [("tp2 ep2", kind, {}) for kind in MOE_KINDS]
    cases += [("ep2", "qwen3_moe", {}), ("ep2 sharded optimizer", "deepseek_v3", {}), ("tp2 etp2", "deepseek_v3", {})]
    cases += [("tp2", "glm_moe_dsa", {}), ("pp2", "glm_moe_dsa", {}), ("vpp2", "glm4_moe", dict(num_hidden_layers=4))]
    cases += [("pp2 mtp", "glm_moe_dsa", dict(mtp=1))]
    _run(tmp_path, _two_ranks, 2, cases)


@pytest.mark.gloo
@pytest.mark.slow
def test_four_ranks_equal_transformers_with_unequal_shares_of_tokens(tmp_path):
    cases = [("tp2 ep2 etp2", "deepseek_v3", {}), ("pp2 ep2", "qwen3_moe", {}), ("tp2 ep2", "glm4_moe", {})]
    _run(tmp_path, _on_rank, 4, cases)
