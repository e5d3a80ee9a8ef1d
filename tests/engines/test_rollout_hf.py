"""The transformers rollout engine against transformers' own generate() and plain forward passes."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from engines import build_rollout_engine
from engines.base import Prompt, Sample, SamplingParams
from engines.rollout import decode
from engines.spec import ModelSpec, RolloutEngineSpec
from tests.engines.test_fsdp import write_tiny_moe
from tests.tiny import KINDS, write_tiny_model

PROMPTS = [Prompt("a", (5, 6, 7, 8, 9, 3)), Prompt("b", (11,)), Prompt("c", (4, 129, 77)), Prompt("d", (9, 9))]
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=9)
RANDOM = SamplingParams(n=3, temperature=0.7, max_new_tokens=7, seed=3)


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    return {kind: write_tiny_model(tmp_path_factory.mktemp(kind), kind) for kind in KINDS}


def empty_engine(path: Path, **changes):
    return build_rollout_engine(RolloutEngineSpec("hf", "cpu", ModelSpec(str(path)), dtype="float32", **changes))


def loaded_engine(path: Path, **changes):
    engine = empty_engine(path, **changes)
    engine.load_weights(load_file(path / "model.safetensors").items(), version=7)
    return engine


def by_key(samples) -> dict[tuple[str, int], Sample]:
    samples = list(samples)
    keyed = {(sample.uid, sample.index): sample for sample in samples}
    assert len(keyed) == len(samples), "a sample was handed out twice"
    return keyed


@torch.no_grad()
def plain_log_probs(path: Path, tokens: list[int], temperature: float) -> list[float]:
    """log p of every token but the first, from one unpadded forward pass of transformers."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    log_p = (model(torch.tensor([tokens])).logits[0, :-1] / temperature).log_softmax(-1)
    return log_p.gather(-1, torch.tensor(tokens[1:])[:, None])[:, 0].tolist()


@torch.no_grad()
def plain_greedy(path: Path, prompt: tuple[int, ...], **options) -> list[int]:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    options = {"max_new_tokens": GREEDY.max_new_tokens, "do_sample": False, "pad_token_id": 0, **options}
    return model.generate(torch.tensor([prompt]), **options)[0, len(prompt) :].tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_equals_transformers_generate(models, kind):
    samples = by_key(loaded_engine(models[kind], max_num_seqs=3).generate(PROMPTS, GREEDY))
    for prompt in PROMPTS:
        sample = samples[prompt.uid, 0]
        assert sample.response_ids == plain_greedy(models[kind], prompt.token_ids)
        expected = plain_log_probs(models[kind], [*prompt.token_ids, *sample.response_ids], 1.0)
        assert sample.log_probs == pytest.approx(expected[len(prompt.token_ids) - 1 :], abs=1e-5)
        assert (sample.finish_reason, sample.weight_version, sample.prompt_ids) == ("length", 7, prompt.token_ids)


def test_repetition_penalty_equals_transformers_and_leaves_log_probs_raw(models):
    sampling = replace(GREEDY, repetition_penalty=1.4)
    samples = by_key(loaded_engine(models["qwen3"], max_num_seqs=2).generate(PROMPTS, sampling))
    plain = by_key(loaded_engine(models["qwen3"]).generate(PROMPTS, GREEDY))
    assert any(samples[key].response_ids != plain[key].response_ids for key in plain)
    for prompt in PROMPTS:
        sample = samples[prompt.uid, 0]
        assert sample.response_ids == plain_greedy(models["qwen3"], prompt.token_ids, repetition_penalty=1.4)
        expected = plain_log_probs(models["qwen3"], [*prompt.token_ids, *sample.response_ids], 1.0)
        assert sample.log_probs == pytest.approx(expected[len(prompt.token_ids) - 1 :], abs=1e-5)


def test_experts_generate_like_transformers(tmp_path):
    path = write_tiny_moe(tmp_path, experts=3)
    samples = by_key(loaded_engine(path).generate(PROMPTS, GREEDY))
    assert all(samples[p.uid, 0].response_ids == plain_greedy(path, p.token_ids) for p in PROMPTS)


@pytest.mark.parametrize("cut", [{}, {"top_p": 0.8}, {"top_k": 5}, {"top_k": 9, "top_p": 0.7}], ids=str)
def test_log_probs_are_those_of_the_whole_vocabulary_at_the_temperature(models, cut):
    engine = loaded_engine(models["qwen2"], max_num_seqs=4)
    samples = list(engine.generate(PROMPTS, replace(RANDOM, **cut)))
    assert len(samples) == 3 * len(PROMPTS)
    scores = engine.score([[*s.prompt_ids, *s.response_ids] for s in samples], RANDOM.temperature)
    for sample, score in zip(samples, scores, strict=True):
        expected = plain_log_probs(models["qwen2"], [*sample.prompt_ids, *sample.response_ids], RANDOM.temperature)
        assert sample.log_probs == pytest.approx(expected[len(sample.prompt_ids) - 1 :], abs=1e-5)
        assert score == pytest.approx([0.0, *expected], abs=1e-5)


def test_a_sample_does_not_depend_on_its_neighbours(models):
    expected = by_key(loaded_engine(models["llama"]).generate(PROMPTS, RANDOM))
    for rows in (1, 2, 5):
        engine = loaded_engine(models["llama"], max_num_seqs=rows)
        for prompts in (PROMPTS, PROMPTS[::-1], PROMPTS[1:3]):
            for key, sample in by_key(engine.generate(prompts, RANDOM)).items():
                assert sample.response_ids == expected[key].response_ids
                assert sample.log_probs == pytest.approx(expected[key].log_probs, abs=1e-5)


def test_seed_uid_and_index_give_different_samples(models):
    engine = loaded_engine(models["llama"])
    twin = [Prompt("a", (5, 6, 7)), Prompt("b", (5, 6, 7))]
    responses = [s.response_ids for seed in (0, 1) for s in engine.generate(twin, replace(RANDOM, seed=seed))]
    assert len({tuple(response) for response in responses}) == len(responses) == 12
    again = [s.response_ids for s in engine.generate(twin, replace(RANDOM, seed=0))]
    assert again == responses[:6]


def test_top_k_one_and_tiny_top_p_are_greedy(models):
    engine = loaded_engine(models["llama"])
    greedy = by_key(engine.generate(PROMPTS, GREEDY))
    for cut in ({"top_k": 1}, {"top_p": 1e-6}):
        samples = by_key(engine.generate(PROMPTS, replace(GREEDY, temperature=1.0, **cut)))
        assert all(samples[key].response_ids == greedy[key].response_ids for key in greedy)


def test_first_tokens_follow_the_model_distribution(models):
    engine = loaded_engine(models["llama"])
    draws = 4000
    counts = Counter(s.response_ids[0] for s in engine.generate(PROMPTS[:1], SamplingParams(n=draws, max_new_tokens=1)))
    model = AutoModelForCausalLM.from_pretrained(models["llama"], dtype=torch.float32)
    with torch.no_grad():
        probabilities = model(torch.tensor([PROMPTS[0].token_ids])).logits[0, -1].softmax(-1)
    for token in probabilities.topk(5).indices.tolist():
        p = float(probabilities[token])
        assert abs(counts[token] / draws - p) < 4 * (p * (1 - p) / draws) ** 0.5


def test_end_token_stops_and_is_part_of_the_response(models):
    engine = loaded_engine(models["llama"])
    free = by_key(engine.generate(PROMPTS, GREEDY))["a", 0]
    end = free.response_ids[3]
    length = free.response_ids.index(end) + 1
    stopping = replace(GREEDY, eos_token_ids=(1, end))

    def first(sampling: SamplingParams) -> Sample:
        return by_key(engine.generate(PROMPTS, sampling))["a", 0]

    stopped = first(stopping)
    assert (stopped.response_ids, stopped.finish_reason) == (free.response_ids[:length], "stop")
    assert len(stopped.log_probs) == length
    last = first(replace(stopping, max_new_tokens=length))  # the last allowed token is the end token
    assert (last.response_ids, last.finish_reason) == (free.response_ids[:length], "stop")
    cut = first(replace(stopping, max_new_tokens=max(1, length - 1)))
    assert cut.finish_reason == ("length" if length > 1 else "stop")
    ignoring = first(replace(stopping, ignore_eos=True))
    assert (ignoring.response_ids, ignoring.finish_reason) == (free.response_ids, "length")


def test_rows_that_stop_early_make_room_without_disturbing_others(models):
    """Many end tokens: rows finish at different lengths and are replaced while others go on."""
    ends = tuple(range(0, 130, 6))
    sampling = SamplingParams(n=5, max_new_tokens=20, eos_token_ids=ends, seed=1)
    expected = by_key(loaded_engine(models["qwen3"], max_num_seqs=1).generate(PROMPTS, sampling))
    samples = by_key(loaded_engine(models["qwen3"], max_num_seqs=6).generate(PROMPTS, sampling))
    assert len(samples) == 20 and len({len(s.response_ids) for s in samples.values()}) > 4
    for key, sample in samples.items():
        assert sample.response_ids == expected[key].response_ids
        assert sample.finish_reason == ("stop" if sample.response_ids[-1] in ends else "length")
        assert not set(sample.response_ids[:-1]) & set(ends)


def test_samples_are_handed_out_as_they_finish(models):
    engine = loaded_engine(models["llama"], max_num_seqs=2)
    steps = []
    engine.model.register_forward_hook(lambda *_: steps.append(1))
    samples = engine.generate(PROMPTS, GREEDY)
    next(samples)
    assert len(steps) == 1 + (GREEDY.max_new_tokens - 1), "one prefill, then one pass per further token"
    assert len(list(samples)) == len(PROMPTS) - 1


def test_each_prompt_is_prefilled_once(models):
    engine = loaded_engine(models["llama"], max_num_seqs=2)
    seen = []
    engine.model.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(kwargs["input_ids"].shape), with_kwargs=True
    )
    list(engine.generate(PROMPTS, replace(RANDOM, n=3)))
    prefilled = sum(shape[1] for shape in seen if shape[1] > 1 or shape == (1, 1))
    decoded = 3 * len(PROMPTS) * (RANDOM.max_new_tokens - 1)
    assert sum(shape[0] * shape[1] for shape in seen) == decoded + sum(len(p.token_ids) for p in PROMPTS)
    assert prefilled >= sum(len(p.token_ids) for p in PROMPTS if len(p.token_ids) > 1)


def test_lengths_are_bounded_by_max_model_len(models):
    engine = loaded_engine(models["llama"], max_model_len=10)
    samples = by_key(engine.generate(PROMPTS, replace(GREEDY, max_new_tokens=50)))
    assert {key: len(s.response_ids) for key, s in samples.items()} == {
        ("a", 0): 4, ("b", 0): 9, ("c", 0): 7, ("d", 0): 8,
    }  # fmt: skip
    assert {s.finish_reason for s in samples.values()} == {"length"}
    with pytest.raises(ValueError, match=r"\{'long': 10\}.*expected 1..9 tokens"):
        engine.generate([Prompt("long", tuple(range(10)))], GREEDY)


def test_cache_grows_with_long_responses(models, monkeypatch):
    expected = by_key(loaded_engine(models["qwen3"]).generate(PROMPTS, replace(RANDOM, max_new_tokens=40)))
    monkeypatch.setattr(decode, "_FIRST_POSITIONS", 2)
    grown = by_key(loaded_engine(models["qwen3"]).generate(PROMPTS, replace(RANDOM, max_new_tokens=40)))
    assert all(grown[key].response_ids == expected[key].response_ids for key in expected)


def test_long_prompts_are_prefilled_in_several_passes(models, monkeypatch):
    expected = by_key(loaded_engine(models["llama"]).generate(PROMPTS, RANDOM))
    monkeypatch.setattr(decode, "_PREFILL_TOKENS", 5)
    samples = by_key(loaded_engine(models["llama"]).generate(PROMPTS, RANDOM))
    assert all(samples[key].response_ids == expected[key].response_ids for key in expected)


@pytest.mark.parametrize(
    "wrong", [{"n": 0}, {"temperature": -0.1}, {"top_p": 0.0}, {"top_k": 0}, {"max_new_tokens": 0}], ids=str
)
def test_sampling_outside_its_range_is_refused(models, wrong):
    with pytest.raises(ValueError, match=f"got {next(iter(wrong))}="):
        loaded_engine(models["llama"]).generate(PROMPTS, replace(RANDOM, **wrong))


# Loading weights


def test_nothing_is_generated_without_weights(models):
    engine = empty_engine(models["llama"])
    assert engine.version == -1
    with pytest.raises(RuntimeError, match="no complete set of weights"):
        engine.generate(PROMPTS, GREEDY)
    with pytest.raises(RuntimeError, match="no complete set of weights"):
        engine.score([[1, 2]], 1.0)


def test_every_wrong_name_is_listed_and_generation_refused_until_a_full_load(models):
    engine, source = loaded_engine(models["llama"]), load_file(models["llama"] / "model.safetensors")
    pairs = [(n, t) for n, t in source.items() if n != "model.norm.weight"]
    pairs += [("lm_head.weight", source["lm_head.weight"]), ("stray", torch.ones(1))]
    with pytest.raises(
        ValueError, match=r"missing \['model.norm.weight'\], doubled \['lm_head.weight'\] and unknown \['stray'\]"
    ):
        engine.load_weights(pairs, version=8)
    with pytest.raises(RuntimeError, match="no complete set of weights"):
        engine.generate(PROMPTS, GREEDY)
    engine.load_weights(source.items(), version=9)
    assert {s.weight_version for s in engine.generate(PROMPTS, GREEDY)} == {9}


def test_wrong_shape_is_refused(models):
    engine, source = loaded_engine(models["llama"]), load_file(models["llama"] / "model.safetensors")
    source["model.norm.weight"] = source["model.norm.weight"][:1]  # would broadcast
    with pytest.raises(ValueError, match=r"model.norm.weight.*\(1,\), expected \(80,\)"):
        engine.load_weights(source.items(), version=8)
    assert engine.version == -1


def test_tied_head_may_come_but_must_equal_the_embedding(models):
    engine, source = loaded_engine(models["llama_tied"]), load_file(models["llama_tied"] / "model.safetensors")
    head = source["model.embed_tokens.weight"].clone()
    engine.load_weights([("lm_head.weight", head), *source.items()], version=8)
    assert engine.version == 8
    head[0, 0] += 1
    with pytest.raises(ValueError, match=r"lm_head.weight.*not equal to model.embed_tokens.weight"):
        engine.load_weights([*source.items(), ("lm_head.weight", head)], version=9)


def test_tensors_are_copied_before_the_next_is_asked_for(models):
    source = load_file(models["qwen3_tied"] / "model.safetensors")

    def stream():
        buffer = torch.empty(max(t.numel() for t in source.values()))
        for name, tensor in [*source.items(), ("lm_head.weight", source["model.embed_tokens.weight"])]:
            view = buffer[: tensor.numel()].view_as(tensor)
            yield name, view.copy_(tensor)
            buffer.fill_(torch.nan)

    engine = empty_engine(models["qwen3_tied"])
    engine.load_weights(stream(), version=1)
    samples = by_key(engine.generate(PROMPTS, GREEDY))
    assert samples["a", 0].response_ids == plain_greedy(models["qwen3_tied"], PROMPTS[0].token_ids)


def test_new_weights_change_the_next_samples_but_never_a_running_one(models):
    engine, source = loaded_engine(models["llama"], max_num_seqs=1), load_file(models["llama"] / "model.safetensors")
    other: dict[str, Tensor] = {name: tensor.flip(0) for name, tensor in source.items()}
    old = by_key(engine.generate(PROMPTS, GREEDY))
    running = engine.generate(PROMPTS, GREEDY)
    next(running)
    engine.load_weights(other.items(), version=8)
    with pytest.raises(RuntimeError, match="weights were changed"):
        next(running)
    new = by_key(engine.generate(PROMPTS, GREEDY))
    assert all(new[key].response_ids != old[key].response_ids for key in old)


def test_sleeping_engine_refuses_until_woken(models):
    engine = loaded_engine(models["llama"])
    engine.sleep()
    with pytest.raises(RuntimeError, match="asleep"):
        engine.generate(PROMPTS, GREEDY)
    engine.wake()
    assert len(list(engine.generate(PROMPTS, GREEDY))) == len(PROMPTS)
