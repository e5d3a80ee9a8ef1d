"""Megatron against transformers: log-probs, exported weights, and one optimizer step, over parallel layouts."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from engines import build_train_engine
from engines.base import ForwardOptions
from engines.batch import Denominators, TrainBatch
from engines.spec import LrSchedule, MegatronSpec, ModelSpec, OptimSpec, TrainEngineSpec
from tests.ranks import run_ranks
from tests.tiny import KINDS, write_tiny_model

SEQUENCES = [
    [5, 6, 7, 8, 9, 129, 12],
    [3, 100, 129, 4],
    list(range(20, 39)),
    [1, 2],
    [77, 3, 41, 11, 9],
]  # no pad token (0): transformers gives its embedding no gradient
MASKS = [[0, 0] + [1] * (len(ids) - 2) if len(ids) > 2 else [0, 1] for ids in SEQUENCES]
TOKENS = float(sum(map(sum, MASKS)))
# A large eps keeps Adam's first step smooth in the gradient (with 1e-8 it is the sign): each weight then
# shows its own gradient's size. Decay and clipping are strong enough to be seen.
OPTIM = OptimSpec(LrSchedule(1e-2), weight_decay=0.5, eps=1e-2, clip_grad=0.7)
LLAMA3 = dict(rope_type="llama3", rope_theta=5e5, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
LLAMA3["original_max_position_embeddings"] = 64
UNEVEN = {"num_layers_in_first_pipeline_stage": 1}
LAYOUTS = {
    "tp1": {},
    "tp2": dict(tensor_model_parallel_size=2),
    "tp2 without sp": dict(tensor_model_parallel_size=2, sequence_parallel=False),
    "pp2": dict(pipeline_model_parallel_size=2, override_transformer_config=UNEVEN),
    "dp2": {},
    "dp2 plain optimizer": dict(use_distributed_optimizer=False),
    "vpp2": dict(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2),
}


def _spec(folder: str, layout: str, optim: OptimSpec | None) -> TrainEngineSpec:
    return TrainEngineSpec(
        "megatron", "cpu", ModelSpec(folder), MegatronSpec(dtype="float32", **LAYOUTS[layout]), optim, timeout_s=60
    )


def _loss(output, batch, denominators):
    """A loss with different token weights, so that a misplaced token shows."""
    weights_T = batch.tokens["loss_mask"] * (1 + 0.1 * (batch.input_ids % 7))
    return -(weights_T * output.log_probs).sum() / denominators.tokens, {}


def _on_rank(rank: int, world: int, cases: list[tuple[str, str]]) -> list[dict]:
    """For each (folder, layout): log-probs and entropy of all sequences, exported weights before and after one
    update on the rank's share, and the gradient norm."""
    results = []
    for folder, layout in cases:
        engine = build_train_engine(_spec(folder, layout, OPTIM))
        engine.load(folder)
        whole = TrainBatch.pack(SEQUENCES, loss_mask=MASKS)
        scores = engine.log_probs(whole, ForwardOptions(max_tokens=20, entropy=True))
        before = {name: value.clone() for name, value in engine.hf_weights()}
        share = whole.select(range(engine.dp_rank, len(whole), engine.dp_size))
        metrics = engine.update(share, _loss, Denominators(TOKENS, 5.0), ForwardOptions(micro_batch_size=2), step=0)
        after = {name: value.clone() for name, value in engine.hf_weights()}
        results.append(
            dict(scores=scores if engine.is_output_rank else None, before=before, after=after)
            | dict(norm=metrics["actor/grad_norm"].value)
        )
        engine.close()
    return results


def _reference(folder: str) -> dict:
    """The same with transformers and torch.optim.AdamW, sequence by sequence."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    log_probs, entropies, loss = [], [], 0.0
    for ids, mask in zip(SEQUENCES, MASKS, strict=True):
        log_p_SV = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        values = torch.cat([torch.zeros(1), log_p_SV[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]])
        log_probs.append(values)
        entropies.append(torch.cat([torch.zeros(1), -(log_p_SV.exp() * log_p_SV).sum(-1)[:-1]]))
        weights = torch.tensor(mask) * (1 + 0.1 * (torch.tensor(ids) % 7))
        loss = loss - (weights * values).sum() / TOKENS
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIM.clip_grad)
    parameters = list(model.parameters())
    torch.optim.AdamW(
        [
            {"params": [p for p in parameters if p.ndim > 1], "weight_decay": OPTIM.weight_decay},
            {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0},
        ],
        lr=1e-2,
        betas=OPTIM.betas,
        eps=OPTIM.eps,
    ).step()
    after = {name: value.detach() for name, value in model.named_parameters()}
    return dict(
        log_probs=torch.cat(log_probs).detach(), entropy=torch.cat(entropies).detach(), after=after, norm=float(norm)
    )


def _check(folder: str, layout: str, ranks: list[dict]) -> None:
    source = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    exported, expected = ranks[0], _reference(folder)
    names = {name for name, _ in source.named_parameters()}
    assert set(exported["before"]) == names, layout
    for name, value in source.named_parameters():
        assert torch.equal(exported["before"][name], value), (layout, name)
    for scores in (result["scores"] for result in ranks if result["scores"] is not None):
        torch.testing.assert_close(scores.log_probs, expected["log_probs"], atol=5e-6, rtol=0, msg=layout)
        torch.testing.assert_close(scores.entropy, expected["entropy"], atol=5e-6, rtol=0, msg=layout)
    for result in ranks:
        assert result["norm"] == pytest.approx(expected["norm"], rel=1e-5), layout
    assert expected["norm"] > OPTIM.clip_grad  # else clipping was not tested
    for name, value in expected["after"].items():
        torch.testing.assert_close(
            exported["after"][name], value, atol=2e-6, rtol=0, msg=lambda m, n=name: f"{layout} {n}: {m}"
        )
    assert all(not result["before"] and not result["after"] for result in ranks[1:])


def _run(tmp_path: Path, world: int, cases: list[tuple[str, str, dict]]) -> None:
    """Each case is (layout, kind of tiny model, changes to its config); all share one set of processes."""
    prepared = [
        (str(write_tiny_model(tmp_path / str(i), kind, **changes)), layout)
        for i, (layout, kind, changes) in enumerate(cases)
    ]
    results = run_ranks(_on_rank, world, prepared)
    for i, (folder, layout) in enumerate(prepared):
        _check(folder, f"{layout} {cases[i][1]}", [rank[i] for rank in results])


@pytest.mark.gloo
def test_one_rank_equals_transformers_for_every_family(tmp_path):
    _run(tmp_path, 1, [("tp1", kind, {}) for kind in KINDS])


@pytest.mark.gloo
def test_two_ranks_equal_transformers_in_every_layout(tmp_path):
    """`vpp2`: five sequences make three micro-batches, and a filler completes the schedule's multiple of two."""
    cases = [("tp2", kind, {}) for kind in KINDS]
    cases += [(layout, kind, {}) for layout in ("pp2", "dp2") for kind in ("qwen3", "llama_tied")]
    cases += [
        ("tp2", "llama", dict(num_key_value_heads=1)),  # fewer key/value heads than tensor-parallel ranks
        ("tp2 without sp", "qwen3", {}),
        ("dp2 plain optimizer", "qwen2", {}),
        ("vpp2", "llama_tied", dict(num_hidden_layers=4)),
        ("pp2", "llama", dict(rope_parameters=LLAMA3)),
    ]
    _run(tmp_path, 2, cases)
