"""vLLM under changing weights: after every update it is the transformers engine with the same weights, and the engine
that a fresh vLLM makes of a checkpoint of them. VLLM_FRESH_ENGINES=50 starts a fresh one after every update."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from engines.rollout.vllm.latent import check_derived
from engines.rollout.vllm.platform import platform_of
from tests.engines.vllm_bench import (
    CHANGES,
    GREEDY,
    LONGEST,
    PROMPTS,
    assert_same,
    changed,
    engine,
    ordered,
    save,
    stream_of,
    weights_of,
    write_model,
)
from tests.vllm_process import needs_vllm, run

pytestmark = [*needs_vllm, pytest.mark.timeout(2400)]

UPDATES = 50
FRESH = int(os.environ.get("VLLM_FRESH_ENGINES", "3"))


def _follow(folder: str, kind: str, updates: int, exports: list[int]) -> dict[int, list]:
    """Greedy (tokens, log-probs) of the updates in `exports`, whose weights are written beside the model."""
    model = write_model(f"{folder}/model", kind)
    first, answers = weights_of(model), {}
    rollout, reference = engine("vllm", model), engine("hf", model)
    for version in range(1, updates + 1):
        weights = changed(first, version)
        rollout.load_weights(stream_of(weights), version)
        reference.load_weights(weights.items(), version)
        greedy = assert_same(rollout, reference)
        assert {sample.weight_version for sample in greedy} == {version}
        if version in exports:
            answers[version] = [(s.response_ids, s.log_probs) for s in greedy]
            save(weights, model, Path(folder) / str(version))
    rollout.load_weights(stream_of(weights), updates + 1)
    again = ordered(rollout.generate(PROMPTS, GREEDY))
    assert [(s.response_ids, s.log_probs) for s in again] == [(s.response_ids, s.log_probs) for s in greedy]
    rollout.close()
    return answers


def _fresh(folder: str, exports: list[int]) -> dict[int, list]:
    """Greedy (tokens, log-probs) of an engine of vLLM's own for each checkpoint, loaded from disk."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    from vllm import LLM, SamplingParams

    sampling = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=0, detokenize=False)
    answers = {}
    for version in exports:
        llm = LLM(
            f"{folder}/{version}",
            load_format="auto",
            skip_tokenizer_init=True,
            dtype="float32",
            max_model_len=LONGEST,
            enforce_eager=True,
            enable_prefix_caching=False,
            kv_cache_memory_bytes=2**26,
        )
        outputs = llm.generate([{"prompt_token_ids": list(p.token_ids)} for p in PROMPTS], sampling, use_tqdm=False)
        found = [output.outputs[0] for output in outputs]
        answers[version] = [
            (list(a.token_ids), [row[t].logprob for row, t in zip(a.logprobs, a.token_ids, strict=True)]) for a in found
        ]
        llm.llm_engine.engine_core.shutdown()
    return answers


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
def test_fifty_updates_are_fifty_fresh_engines(tmp_path, kind):
    exports = sorted({round(1 + i * (UPDATES - 1) / max(1, FRESH - 1)) for i in range(FRESH)})
    followed = run(_follow, str(tmp_path), kind, UPDATES, exports, timeout=400)
    fresh = run(_fresh, str(tmp_path), exports, timeout=200 + 30 * FRESH)
    assert len(fresh) == FRESH and list(fresh) == list(followed)
    for version, answers in fresh.items():
        for (tokens, log_probs), (own_tokens, own_log_probs) in zip(answers, followed[version], strict=True):
            assert own_tokens == tokens, version
            assert own_log_probs == pytest.approx(log_probs, abs=1e-5), version
    assert len({str(answers) for answers in fresh.values()}) == FRESH, "the weights must change the answers"


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in CHANGES if kind not in ("qwen3", "qwen3_moe")])
def test_every_family_follows_its_updates(tmp_path, kind):
    run(_follow, str(tmp_path), kind, 3, [], timeout=200)


def _latent(folder: str) -> None:
    model = write_model(f"{folder}/model", "deepseek_v3")
    first, rollout = weights_of(model), engine("vllm", model)
    weights = changed(first, 1)
    rollout.load_weights(stream_of(weights), 1)
    live = rollout._engine.model_executor.driver_worker.worker.model_runner.get_model()
    name = "model.layers.0.self_attn.kv_b_proj.weight"
    check_derived(live, {name: weights[name]})
    with pytest.raises(ValueError, match=f"got W_UK_T that differs from the {name} just sent"):
        check_derived(live, {name: first[name]})
    # What Ascend's sparse attention does to kv_b_proj, vLLM's CPU build does to every matrix: no memory is left.
    disposed = {n for n, parameter in live.named_parameters() if parameter.numel() == 0}
    assert "model.layers.0.self_attn.o_proj.weight" in disposed
    platform_of("npu").before_update(live)
    shapes = {n: tuple(parameter.shape) for n, parameter in live.named_parameters()}
    assert {n: shapes[n] for n in disposed & first.keys()} == {
        n: tuple(first[n].shape) for n in disposed & first.keys()
    }
    rollout.close()


@pytest.mark.slow
def test_an_update_reaches_what_latent_attention_derives(tmp_path):
    run(_latent, str(tmp_path), timeout=200)
