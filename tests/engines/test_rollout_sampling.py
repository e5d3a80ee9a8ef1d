"""The sampler on vocabularies small enough to know every probability."""

from __future__ import annotations

import math

import pytest
import torch

from engines.base import SamplingParams
from engines.rollout import sampling as module
from engines.rollout.sampling import invert_cdf, random_stream, sample


def grid(count: int) -> torch.Tensor:
    """Midpoints of `count` equal cells of [0, 1): drawing at each gives exact frequencies."""
    return (torch.arange(count, dtype=torch.float64) + 0.5) / count


def frequencies(logits: list[float], params: SamplingParams, count: int = 10_000) -> list[float]:
    rows = torch.tensor(logits).expand(count, -1)
    tokens, _ = sample(rows, grid(count), params)
    return (torch.bincount(tokens, minlength=len(logits)) / count).tolist()


LOGITS = [math.log(p) for p in (0.1, 0.4, 0.2, 0.3)]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, [0.1, 0.4, 0.2, 0.3]),
        ({"temperature": 0.5}, [0.01 / 0.3, 0.16 / 0.3, 0.04 / 0.3, 0.09 / 0.3]),
        ({"top_k": 2}, [0, 4 / 7, 0, 3 / 7]),
        ({"top_p": 0.6}, [0, 4 / 7, 0, 3 / 7]),
        ({"top_p": 0.39}, [0, 1, 0, 0]),
        ({"top_k": 3, "top_p": 0.7}, [0, 4 / 7, 0, 3 / 7]),  # of 0.9 left by top-k, 0.63 is wanted
        ({"temperature": 0.0}, [0, 1, 0, 0]),
    ],
    ids=str,
)
def test_frequencies_are_the_wanted_distribution(changes, expected):
    assert frequencies(LOGITS, SamplingParams(**changes)) == pytest.approx(expected, abs=2e-4)


def test_log_prob_is_of_the_full_distribution_at_the_temperature():
    logits = torch.tensor([[1.0, 0.0, -1.0]])
    token, log_prob = sample(logits, torch.tensor([0.0], dtype=torch.float64), SamplingParams(temperature=0.5, top_k=1))
    assert (int(token), float(log_prob)) == (0, pytest.approx(-0.142932, abs=1e-6))
    _, greedy = sample(logits, torch.tensor([0.0], dtype=torch.float64), SamplingParams(temperature=0.0))
    assert float(greedy) == pytest.approx(-0.407606, abs=1e-6)


def test_repetition_penalty_by_hand():
    logits = torch.tensor([[2.0, 1.5, -1.0, -1.2]])
    seen = torch.tensor([[True, False, True, False]])
    uniform = torch.tensor([0.0], dtype=torch.float64)
    token, log_prob = sample(logits, uniform, SamplingParams(temperature=0.0, repetition_penalty=2.0), seen)
    # penalised logits 1, 1.5, -2, -1.2; the log-prob stays that of the raw ones
    assert int(token) == 1
    assert float(log_prob) == pytest.approx(1.5 - math.log(sum(math.exp(x) for x in (2.0, 1.5, -1.0, -1.2))), abs=1e-6)


def test_inverse_cdf_equals_the_plain_definition_over_many_blocks():
    generator = torch.Generator().manual_seed(0)
    weights = torch.rand(50, 1000, generator=generator) ** 8
    weights[:, ::3] = 0.0
    uniforms = torch.rand(50, dtype=torch.float64, generator=generator)
    ends = weights.double().cumsum(-1)
    expected = (ends <= (uniforms * ends[:, -1]).unsqueeze(-1)).sum(-1)
    assert torch.equal(invert_cdf(weights, uniforms), expected)


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1 - 2**-53])
def test_weight_zero_is_never_drawn(uniform):
    weights = torch.zeros(1, 400)
    weights[0, 131], weights[0, 257] = 1e-30, 1e-30
    index = int(invert_cdf(weights, torch.tensor([uniform], dtype=torch.float64)))
    assert index == (131 if uniform < 0.5 else 257)


def test_top_p_wider_than_the_first_candidates(monkeypatch):
    """A flat distribution needs more candidates than are looked at first."""
    monkeypatch.setattr(module, "_TOP_P_CANDIDATES", 4)
    got = frequencies([0.001 * i for i in range(100)], SamplingParams(top_p=0.5), count=20_000)
    kept = [i for i, frequency in enumerate(got) if frequency > 0]
    weights = [math.exp(0.001 * i) for i in range(100)]
    mass, smallest = 0.0, 100
    while mass < 0.5 * sum(weights):
        smallest -= 1
        mass += weights[smallest]
    assert kept == list(range(smallest, 100))


def test_rows_handled_in_chunks_give_the_same(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(7, 130, generator=generator)
    seen = torch.rand(7, 130, generator=generator) < 0.3
    params = SamplingParams(top_k=20, repetition_penalty=1.3, temperature=0.8)
    whole = sample(logits, grid(7), params, seen)
    monkeypatch.setattr(module, "_CHUNK", 2 * 130)
    parts = sample(logits, grid(7), params, seen)
    assert torch.equal(whole[0], parts[0]) and torch.equal(whole[1], parts[1])


def test_random_streams_are_uniform_and_keyed():
    draws = [random_stream(0, "a", i).random() for i in range(2000)]
    assert sum(draws) / 2000 == pytest.approx(0.5, abs=4 * math.sqrt(1 / 12 / 2000))
    keys = [(0, "a", 1), (1, "a", 0), (0, "a", 0), (0, "b", 0), (0, "1/a", 0), (0, "a", 10)]
    assert len({random_stream(*key).random() for key in keys}) == len(keys)
    assert random_stream(5, "a", 2).random() == random_stream(5, "a", 2).random()
