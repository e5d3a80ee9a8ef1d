"""Families with experts, latent and sparse attention in the transformers rollout engine, by full forward passes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from engines import build_rollout_engine, sparse_index
from engines.base import Sample, SamplingParams
from engines.rollout import decode
from engines.rollout.sampling import random_stream, sample
from engines.spec import ModelSpec, RolloutEngineSpec
from tests.engines.test_fsdp_families import BIAS, CASES, SPARSE
from tests.engines.test_rollout_hf import PROMPTS, by_key, loaded_engine
from tests.tiny import write_tiny_model

# Rows stop early, others take their place, and the last prompt waits: the cache moves rows while others go on.
SAMPLING = SamplingParams(n=3, temperature=0.8, max_new_tokens=12, eos_token_ids=tuple(range(0, 130, 10)), seed=5)


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("families")
    return {name: write_tiny_model(folder / name, kind, **changes) for name, (kind, changes) in CASES.items()}


def plain_model(path: Path):
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


@torch.no_grad()
def plain_sample(model, prompt: tuple[int, ...], uid: str, index: int, sampling: SamplingParams) -> Sample:
    """Draw by one unpadded forward pass over everything so far for each token."""
    stream, tokens, log_probs = random_stream(sampling.seed, uid, index), list(prompt), []
    while True:
        logits_1V = model(torch.tensor([tokens])).logits[:, -1]
        token_1, log_prob_1 = sample(logits_1V, torch.tensor([stream.random()], dtype=torch.float64), sampling)
        tokens.append(int(token_1))
        log_probs.append(float(log_prob_1))
        stopped = tokens[-1] in sampling.eos_token_ids
        if stopped or len(log_probs) == sampling.max_new_tokens:
            return Sample(
                uid, index, prompt, tokens[len(prompt) :], log_probs, "stop" if stopped else "length", weight_version=7
            )


@pytest.mark.parametrize("name", CASES)
def test_samples_equal_a_full_forward_for_every_token(models, name):
    engine = loaded_engine(models[name], max_num_seqs=4)
    model, lengths = plain_model(models[name]), set()
    for sampling in (SAMPLING, replace(SAMPLING, n=1, temperature=0.0)):
        samples = by_key(engine.generate(PROMPTS, sampling))
        for prompt in PROMPTS:
            for index in range(sampling.n):
                got = samples[prompt.uid, index]
                expected = plain_sample(model, prompt.token_ids, prompt.uid, index, sampling)
                assert got.log_probs == pytest.approx(expected.log_probs, abs=1e-5)
                assert replace(got, log_probs=[]) == replace(expected, log_probs=[])
                lengths.add(len(prompt.token_ids) + len(got.response_ids))
    assert min(lengths) < 6 and max(lengths) > 12, "short and long rows must decode side by side"


@pytest.mark.parametrize("name", SPARSE)
def test_scores_equal_the_log_probs_of_generation(models, name):
    engine = loaded_engine(models[name], max_num_seqs=5)
    samples = list(engine.generate(PROMPTS, SAMPLING))
    scores = engine.score([[*s.prompt_ids, *s.response_ids] for s in samples], SAMPLING.temperature)
    for got, score in zip(samples, scores, strict=True):
        assert score[len(got.prompt_ids) :] == pytest.approx(got.log_probs, abs=1e-5)


def test_latent_cache_grows_with_index_keys(models, monkeypatch):
    sampling = replace(SAMPLING, eos_token_ids=(), max_new_tokens=40)
    expected = by_key(loaded_engine(models["shared indexers"]).generate(PROMPTS, sampling))
    monkeypatch.setattr(decode, "_FIRST_POSITIONS", 2)
    grown = by_key(loaded_engine(models["shared indexers"]).generate(PROMPTS, sampling))
    assert all(grown[key].response_ids == expected[key].response_ids for key in expected)


def empty_engine(path: Path, dtype: str = "float32"):
    return build_rollout_engine(RolloutEngineSpec("hf", "cpu", ModelSpec(str(path)), dtype=dtype))


@pytest.mark.parametrize("name", CASES)
def test_a_stream_writes_every_element_once(models, name):
    source = load_file(models[name] / "model.safetensors")
    engine = empty_engine(models[name])
    for tensor in engine.model.state_dict().values():
        tensor.fill_(torch.nan)
    engine.load_weights(source.items(), version=1)
    assert not any(tensor.isnan().any() for tensor in engine.model.state_dict().values())
    expected = plain_model(models[name]).state_dict()
    assert all(torch.equal(tensor, expected[key]) for key, tensor in engine.model.state_dict().items())


@pytest.mark.parametrize(
    "name, gone",
    [
        ("qwen3_moe", "model.layers.1.mlp.experts.7.up_proj.weight"),
        ("glm4_moe", f"model.layers.2.{BIAS}"),
        ("deepseek_v3", "model.layers.0.self_attn.kv_b_proj.weight"),
        ("deepseek_v32", "model.layers.2.self_attn.indexer.k_norm.bias"),
    ],
)
def test_a_tensor_that_is_missing_doubled_or_misshapen_is_named(models, name, gone):
    source = load_file(models[name] / "model.safetensors")
    engine = empty_engine(models[name])
    with pytest.raises(ValueError, match=rf"missing \['{gone}'\], doubled \[\] and unknown \[\]"):
        engine.load_weights([(n, t) for n, t in source.items() if n != gone], version=1)
    with pytest.raises(ValueError, match=rf"missing \[\], doubled \['{gone}'\]"):
        engine.load_weights([*source.items(), (gone, source[gone])], version=1)
    with pytest.raises(ValueError, match=rf"unusable tensors \{{'{gone}'"):
        engine.load_weights((source | {gone: source[gone][:1]}).items(), version=1)
    assert engine.version == -1


def test_names_without_a_place_are_passed_over(models):
    source = load_file(models["shared indexers"] / "model.safetensors")
    shared = {n.replace("layers.0", "layers.2"): t for n, t in source.items() if "layers.0.self_attn.indexer" in n}
    engine = empty_engine(models["shared indexers"])
    engine.load_weights((source | shared).items(), version=1)
    assert engine.version == 1 and len(shared) == 5


@pytest.mark.parametrize("name", ["glm4_moe", "deepseek_v3", "glm_moe_dsa"])
def test_bfloat16_holds_correction_biases_in_float32(models, name):
    """Only the experts of a token are chosen with the bias, so rounding it would be silent."""
    source: dict[str, Tensor] = load_file(models[name] / "model.safetensors")
    for key in (n for n in source if n.endswith(BIAS)):
        source[key][:3] = torch.tensor([5.0, 5.003, 5.01])
    engine = empty_engine(models[name], "bfloat16")
    engine.load_weights(source.items(), version=1)
    live = engine.model.state_dict()
    kinds = {key: tensor.dtype for key, tensor in live.items()}
    assert {key for key, dtype in kinds.items() if dtype == torch.float32} == {k for k in kinds if k.endswith(BIAS)}
    assert all(torch.equal(live[key], source[key]) for key in kinds if key.endswith(BIAS))
    sample_log_probs = [s.log_probs for s in engine.generate(PROMPTS, SAMPLING)]
    assert all(torch.tensor(row).isfinite().all() for row in sample_log_probs)


def test_sparse_families_need_a_transformers_that_computes_them(models, monkeypatch):
    monkeypatch.setattr(sparse_index, "version", lambda _: "5.10.4")
    with pytest.raises(ValueError, match=r"glm_moe_dsa model and transformers 5.10.4.*upgrade transformers"):
        empty_engine(models["glm_moe_dsa"])
