"""What the tests of the vLLM rollout share: tiny models whose sizes its CPU kernels know, and what to compare."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engines import build_rollout_engine
from engines.base import Prompt, RolloutEngine, Sample, SamplingParams
from engines.spec import ModelSpec, RolloutEngineSpec, VllmSpec
from tests.tiny import write_tiny_model

LONGEST = 192
# Four lengths. The last one fills blocks of vLLM's cache: a prefix kept from old weights would show.
PROMPTS = [Prompt(f"p{i}", tuple(range(3 + i, 9 + 2 * i))) for i in range(3)]
PROMPTS.append(Prompt("p3", tuple(3 + 7 * i % 120 for i in range(150))))
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=8, ignore_eos=True)
DRAWN = SamplingParams(n=2, temperature=0.8, max_new_tokens=8, eos_token_ids=(2,), seed=4)

_DENSE = dict(hidden_size=128, intermediate_size=128)
_EXPERTS = dict(_DENSE, moe_intermediate_size=64)
_LATENT = dict(_EXPERTS, kv_lora_rank=512, qk_rope_head_dim=64, qk_nope_head_dim=32, v_head_dim=32)
CHANGES: dict[str, dict] = {
    **{kind: dict(_DENSE, head_dim=32) for kind in ("llama", "qwen3", "qwen3_tied")},
    **{kind: dict(_EXPERTS, head_dim=32) for kind in ("qwen3_moe", "glm4_moe")},
    "deepseek_v3": _LATENT,
    "glm_moe_dsa": dict(_LATENT, index_topk=LONGEST, index_head_dim=96),
}


def write_model(folder: Path | str, kind: str) -> str:
    return str(write_tiny_model(folder, kind, **CHANGES[kind]))


def engine(name: str, folder: str, routes: bool = False, **vllm: int) -> RolloutEngine:
    return build_rollout_engine(
        RolloutEngineSpec(
            name=name,
            device="cpu",
            model=ModelSpec(folder),
            dtype="float32",
            max_num_seqs=16,
            max_model_len=LONGEST,
            return_routes=routes,
            timeout_s=60,
            vllm=VllmSpec(max_num_batched_tokens=256, **vllm),
        )
    )


def weights_of(folder: str) -> dict[str, Tensor]:
    return load_file(f"{folder}/model.safetensors")


def stream_of(weights: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Tensors that are valid until the next one is asked for, as those of a bucket are."""
    for name, tensor in weights.items():
        lent = tensor.clone()
        yield name, lent
        lent.fill_(torch.nan)


def changed(weights: dict[str, Tensor], seed: int) -> dict[str, Tensor]:
    """Every tensor moved by a tenth of its size, so that no old one can be taken for the new one."""
    stream = torch.Generator().manual_seed(seed)
    return {n: t + 0.1 * t.abs().mean() * torch.randn(t.shape, generator=stream) for n, t in weights.items()}


def save(weights: dict[str, Tensor], like: str, folder: Path) -> str:
    """A checkpoint of these weights with the config.json of `like`."""
    folder.mkdir()
    (folder / "config.json").write_text((Path(like) / "config.json").read_text())
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


def ordered(samples) -> list[Sample]:
    return sorted(samples, key=lambda sample: (sample.uid, sample.index))


def gap(samples: list[Sample], scorer: RolloutEngine, temperature: float) -> float:
    """Largest difference between the samples' own log-probs and those that `scorer` gives to the same tokens."""
    rows = scorer.score([[*s.prompt_ids, *s.response_ids] for s in samples], temperature)
    pairs = zip(samples, rows, strict=True)
    return max(abs(a - b) for s, row in pairs for a, b in zip(s.log_probs, row[len(s.prompt_ids) :], strict=True))


def assert_same(rollout: RolloutEngine, reference: RolloutEngine) -> list[Sample]:
    """Greedy answers are the reference's, drawn ones have its log-probs; returns the greedy ones."""
    got, expected = ordered(rollout.generate(PROMPTS, GREEDY)), ordered(reference.generate(PROMPTS, GREEDY))
    assert [s.response_ids for s in got] == [s.response_ids for s in expected]
    for one, other in zip(got, expected, strict=True):
        assert torch.allclose(torch.tensor(one.log_probs), torch.tensor(other.log_probs), rtol=0, atol=1e-5)
    drawn = list(rollout.generate(PROMPTS, DRAWN))
    assert len(drawn) == len(PROMPTS) * DRAWN.n
    assert gap(drawn, reference, DRAWN.temperature) < 1e-5
    return got
