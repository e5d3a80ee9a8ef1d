"""How much better than expected was each sampled token? The ADVANTAGES table, and estimators with one value per
sample; those with one per token are in advantage_tokens.py.

Shape legend: T packed tokens, B samples.

Statistics run in float64 and use `math.fsum`, so the order of the samples cannot change a result.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from engines.metric import Metric, Metrics
from trainer.credit.advantage_input import AdvantageInput, AdvantageOptions
from trainer.credit.advantage_tokens import gae, optimal_token_baseline, reinforce, reinforce_plus_plus, remax
from trainer.credit.whitening import whiten, whiten_by_domain
from trainer.own_function import load_function

EPS = 1e-6  # added to a standard deviation before dividing


@dataclass(frozen=True)
class AdvantageResult:
    """advantages_T, returns_T [T] float32, exactly 0 where the final mask is 0."""

    advantages_T: Tensor
    returns_T: Tensor
    metrics: Metrics


# (input, options) -> (advantages [T] float64 before whitening, returns [T] float64)
Estimator = Callable[[AdvantageInput, AdvantageOptions], tuple[Tensor, Tensor]]


def compute_advantages(name: str, samples: AdvantageInput, options: AdvantageOptions) -> AdvantageResult:
    """Estimate, whiten, shift, clip, mask. `name` is a key of ADVANTAGES or "module:function"."""
    raw_T, returns_T = find_estimator(name)(samples, options)
    advantages_T, mask_T = raw_T, samples.mask_T
    if name in WHITENED or options.whiten_advantages:
        advantages_T = _whiten_in_scope(raw_T, samples, options)
    if samples.shift is not None:
        advantages_T = advantages_T + samples.broadcast(samples.shift)
    metrics = _group_metrics(samples)
    if options.advantage_clip:
        bound, valid = options.advantage_clip, advantages_T[mask_T]
        metrics["critic/advantage_clip_frac"] = Metric("mean", float((valid.abs() > bound).sum()), valid.numel())
        advantages_T = advantages_T.clamp(-bound, bound)
    described = {"advantages": advantages_T, "raw_advantages": raw_T, "returns": returns_T}
    if "values" in (samples.extras_T or {}):
        described["values"] = samples.extras_T["values"]
    for label, values_T in described.items():
        metrics |= _spread(f"critic/{label}", values_T[mask_T])

    def finish(values_T: Tensor) -> Tensor:
        return torch.where(mask_T, values_T, 0.0).float()

    return AdvantageResult(finish(advantages_T), finish(returns_T), metrics)


def _whiten_in_scope(values_T: Tensor, samples: AdvantageInput, options: AdvantageOptions) -> Tensor:
    mask_T = samples.mask_T & samples.baseline_T  # a sample outside the set keeps its 0
    if options.whiten_scope == "batch":
        return whiten(values_T, mask_T)
    assert samples.domains is not None, "whiten_scope=domain needs the domain of every sample"
    return whiten_by_domain(values_T, mask_T, samples.lengths, samples.domains)


def find_estimator(name: str) -> Estimator:
    """Look up a built-in name or import "module:function"; call it at start so that a wrong name fails early."""
    if name in ADVANTAGES:
        return ADVANTAGES[name]
    signature = "(AdvantageInput, AdvantageOptions) -> (advantages_T, returns_T)"
    return load_function(name, "algorithm.adv_estimator", sorted(ADVANTAGES), signature)


def grpo(samples: AdvantageInput, options: AdvantageOptions) -> tuple[Tensor, Tensor]:
    """Reward against the group: A = (R - mean) / (std + eps), ddof 1 (arXiv 2402.03300).

    Without the division this is Dr.GRPO (arXiv 2503.20783).
    """

    def advantages(rewards: list[float], _: list[int]) -> list[float]:
        scale = _std(rewards) + EPS if options.norm_adv_by_std_in_grpo else 1.0
        return [(reward - _mean(rewards)) / scale for reward in rewards]

    return _per_sample(samples, options, advantages)


def rloo(samples: AdvantageInput, options: AdvantageOptions) -> tuple[Tensor, Tensor]:
    """Reward against the mean of the *other* samples: A = n/(n-1) (R - mean) (arXiv 2402.14740)."""

    def advantages(rewards: list[float], _: list[int]) -> list[float]:
        count = len(rewards)
        return [count / (count - 1) * (reward - _mean(rewards)) for reward in rewards]

    return _per_sample(samples, options, advantages)


def opo(samples: AdvantageInput, options: AdvantageOptions) -> tuple[Tensor, Tensor]:
    """Length-weighted baseline, the variance-optimal one if gradients grow with length: A = R - sum(len R)/sum(len).

    arXiv 2505.23585; len counts model tokens.
    """

    def advantages(rewards: list[float], lengths: list[int]) -> list[float]:
        baseline = math.fsum(n * reward for n, reward in zip(lengths, rewards, strict=True)) / max(sum(lengths), 1)
        return [reward - baseline for reward in rewards]

    return _per_sample(samples, options, advantages)


def gpg(samples: AdvantageInput, options: AdvantageOptions) -> tuple[Tensor, Tensor]:
    """A = alpha (R - mean) / f_norm with alpha = B / (B - M) (arXiv 2504.02546).

    M counts samples without signal: their group's rewards are all equal. If every group is equal, alpha is 1.
    """
    rewards = samples.rewards
    signal = sum(len(rows) for rows in samples.groups() if len({rewards[row] for row in rows}) > 1)
    alpha = len(samples.uids) / signal if signal else 1.0

    def advantages(rewards: list[float], _: list[int]) -> list[float]:
        return [alpha * (reward - _mean(rewards)) / options.f_norm for reward in rewards]

    return _per_sample(samples, options, advantages)


def grpo_passk(samples: AdvantageInput, options: AdvantageOptions) -> tuple[Tensor, Tensor]:
    """Only the best sample of a group learns, by its lead over the second: (R1 - R2) [/ (std + eps)].

    arXiv 2503.19595. A tie for first, or a group with one sample left, gives 0 for all.
    """
    if options.singleton == "reward":
        raise ValueError(
            "got algorithm.adv_estimator=grpo_passk with one sample per prompt; expected at least two to compare; "
            "set actor_rollout_ref.rollout.n to 2 or more"
        )

    def advantages(rewards: list[float], _: list[int]) -> list[float]:
        best, second = sorted(rewards, reverse=True)[:2]
        scale = _std(rewards) + EPS if options.norm_adv_by_std_in_grpo else 1.0
        return [(best - second) / scale if reward == best else 0.0 for reward in rewards]

    return _per_sample(samples, options, advantages)


def reinforce_plus_plus_baseline(samples: AdvantageInput, options: AdvantageOptions) -> tuple[Tensor, Tensor]:
    """R - group mean, then whitened over tokens, so long samples weigh more (arXiv 2501.03262)."""

    def advantages(rewards: list[float], _: list[int]) -> list[float]:
        return [reward - _mean(rewards) for reward in rewards]

    return _per_sample(samples, options, advantages)


ADVANTAGES: dict[str, Estimator] = {
    "gae": gae,
    "grpo": grpo,
    "rloo": rloo,
    "opo": opo,
    "gpg": gpg,
    "grpo_passk": grpo_passk,
    "reinforce": reinforce,
    "reinforce_plus_plus": reinforce_plus_plus,
    "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline,
    "remax": remax,
    "optimal_token_baseline": optimal_token_baseline,
    "tir_optimal_token_baseline": optimal_token_baseline,
}
WHITENED = frozenset({"gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline"})


# --- shared pieces --------------------------------------------------------------------------------------------


def _per_sample(
    samples: AdvantageInput,
    options: AdvantageOptions,
    advantages: Callable[[list[float], list[int]], list[float]],
) -> tuple[Tensor, Tensor]:
    """Apply (rewards, model tokens) -> advantages to each group and spread the result over model tokens.

    Equal rewards give exactly 0 and a lone sample follows `options.singleton`, for every group estimator alike.
    """
    rewards, tokens = samples.rewards, samples.model_tokens
    values = [0.0] * len(rewards)
    for rows in samples.groups():
        group = [rewards[row] for row in rows]
        if len(rows) == 1:
            values[rows[0]] = group[0] if options.singleton == "reward" else 0.0
        elif max(group) > min(group):
            for row, value in zip(rows, advantages(group, [tokens[row] for row in rows]), strict=True):
                values[row] = value
    advantages_T = samples.broadcast(values)
    return advantages_T, advantages_T


def _mean(values: list[float]) -> float:
    return math.fsum(values) / len(values)


def _std(values: list[float]) -> float:
    """Unbiased standard deviation of at least two values."""
    mean = _mean(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))


def _group_metrics(samples: AdvantageInput) -> Metrics:
    rewards = samples.rewards
    groups = samples.groups()
    in_set = torch.tensor([r for r, flag in zip(rewards, samples.baseline, strict=True) if flag], dtype=torch.float64)
    singletons = sum(len(rows) == 1 for rows in groups)
    equal = sum(len({rewards[row] for row in rows}) == 1 for rows in groups if len(rows) > 1)
    return {
        "critic/singleton_groups": Metric("count", singletons),
        "critic/equal_reward_groups": Metric("count", equal),
        "critic/samples_outside_baseline": Metric("count", len(rewards) - len(in_set)),
        **_spread("critic/rewards", in_set),
    }


def _spread(name: str, values: Tensor) -> Metrics:
    """Mean, max and min; no key when there is nothing to describe."""
    if values.numel() == 0:
        return {}
    return {
        f"{name}/mean": Metric("mean", float(values.sum()), values.numel()),
        f"{name}/max": Metric("max", float(values.max())),
        f"{name}/min": Metric("min", float(values.min())),
    }
