"""How much better than expected was each sampled token? Pure functions and the ADVANTAGES table.

Shape legend: T packed tokens, B samples, G samples of one prompt (one uid), L model tokens of the longest sample.

Statistics run in float64 and use `math.fsum`, so the order of the samples cannot change a result.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

import torch
from torch import Tensor

from engines.metric import Metric, Metrics
from trainer.advantage_input import AdvantageInput, AdvantageOptions

EPS = 1e-6  # added to a standard deviation before dividing
WHITEN_EPS = 1e-8  # added to a variance before its square root


@dataclass(frozen=True)
class AdvantageResult:
    """advantages_T, returns_T [T] float32, exactly 0 where the final mask is 0."""

    advantages_T: Tensor
    returns_T: Tensor
    metrics: Metrics


# (input, options) -> (advantages [T] float64 before whitening, returns [T] float64)
Estimator = Callable[[AdvantageInput, AdvantageOptions], tuple[Tensor, Tensor]]


def compute_advantages(name: str, samples: AdvantageInput, options: AdvantageOptions) -> AdvantageResult:
    """Estimate, whiten where the estimator asks for it, mask. `name` is a key of ADVANTAGES or "module:function"."""
    raw_T, returns_T = find_estimator(name)(samples, options)
    advantages_T = _whiten_in_scope(raw_T, samples, options) if name in WHITENED else raw_T
    mask_T = samples.mask_T

    def finish(values_T: Tensor) -> Tensor:
        return torch.where(mask_T, values_T, 0.0).float()

    metrics = _group_metrics(samples)
    for label, values_T in (("advantages", advantages_T), ("raw_advantages", raw_T), ("returns", returns_T)):
        metrics |= _spread(f"critic/{label}", values_T[mask_T])
    return AdvantageResult(finish(advantages_T), finish(returns_T), metrics)


def find_estimator(name: str) -> Estimator:
    """Look up a built-in name or import "module:function"; call it at start so that a wrong name fails early."""
    if name in ADVANTAGES:
        return ADVANTAGES[name]
    module, _, function = name.partition(":")
    if not function:
        raise ValueError(
            f"got algorithm.adv_estimator={name!r}; expected one of {sorted(ADVANTAGES)} or 'module:function'; "
            "correct the name or give an importable function"
        )
    try:
        loaded = vars(import_module(module))
    except ModuleNotFoundError as error:
        raise ValueError(
            f"got algorithm.adv_estimator={name!r}, but importing {module!r} failed: {error}; "
            "expected an importable module; correct the name or extend PYTHONPATH"
        ) from error
    if not callable(loaded.get(function)):
        raise ValueError(
            f"got algorithm.adv_estimator={name!r}, but module {module!r} has no function {function!r}; "
            "expected a function (AdvantageInput, AdvantageOptions) -> (advantages_T, returns_T); correct the name"
        )
    return loaded[function]


# --- estimators with one value per sample ---------------------------------------------------------------------


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


# --- estimators with one value per token ----------------------------------------------------------------------


def reinforce_plus_plus(samples: AdvantageInput, options: AdvantageOptions) -> tuple[Tensor, Tensor]:
    """Discounted return of each token, whitened over the batch: ret_t = r_t + gamma ret_{t+1} (arXiv 2501.03262)."""
    returns_T = _returns(samples, options.gamma) * samples.baseline_T
    return returns_T, returns_T


def remax(samples: AdvantageInput, options: AdvantageOptions) -> tuple[Tensor, Tensor]:
    """Return to go minus the score of one greedy answer to the same prompt (arXiv 2310.10505)."""
    assert samples.greedy_scores is not None, "remax needs greedy_scores: one greedy answer per prompt"
    returns_T = _returns(samples, 1.0) * samples.baseline_T
    return returns_T - samples.broadcast(samples.greedy_scores) * samples.baseline_T, returns_T


def optimal_token_baseline(samples: AdvantageInput, options: AdvantageOptions) -> tuple[Tensor, Tensor]:
    """Return to go minus the variance-optimal baseline of each token position (arXiv 2602.07078).

    B_t = sum_j G_jt W_jt / sum_j W_jt over the samples of the group that have a t-th model token, with
    W_jt = sum_{s<=t} (1 - 2 pi_s + sum_v pi_v^2) rho_s^2. Where one sample alone still has tokens B_t = 0.
    """
    extras = samples.extras_T or {}
    missing = {"old_log_probs", "sum_pi_squared"} - extras.keys()
    assert not missing, f"optimal_token_baseline needs the token tensors {sorted(missing)}"
    rho_T = extras["rollout_is_weights"].double() if "rollout_is_weights" in extras else 1.0
    power_T = (1 - 2 * extras["old_log_probs"].double().exp() + extras["sum_pi_squared"].double()).clamp_min(0)
    power, returns = samples.rows(power_T * rho_T**2), samples.rows(_returns(samples, 1.0))
    masks = samples.rows(samples.model_mask_T)
    advantages = [torch.zeros(length, dtype=torch.float64) for length in samples.lengths]
    for rows in samples.groups():
        if len(rows) == 1 and options.singleton == "zero":
            continue
        returns_GL = _stack([returns[row][masks[row]] for row in rows])
        weights_GL = _stack([power[row][masks[row]].cumsum(0) for row in rows])
        present_GL = _stack([masks[row][masks[row]] for row in rows])
        centred_GL = _centre_positions(returns_GL, weights_GL, present_GL)
        for row, values_L in zip(rows, centred_GL, strict=True):
            advantages[row][masks[row]] = values_L[: int(masks[row].sum())]
    return torch.cat(advantages), torch.cat(returns) * samples.baseline_T


def _stack(rows: list[Tensor]) -> Tensor:
    """[G, L] from G rows of different lengths, padded with zeros."""
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


def _centre_positions(returns_GL: Tensor, weights_GL: Tensor, present_GL: Tensor) -> Tensor:
    """Subtract the weighted mean of each column; equal columns are exactly 0, lone entries stay."""
    # A column of zero weight holds only certain tokens, whose gradient is zero: any baseline is right there.
    weights_GL = torch.where(weights_GL.sum(0) > 0, weights_GL, 1.0) * present_GL
    baseline_L = (returns_GL * weights_GL).sum(0) / weights_GL.sum(0)
    highest_L = returns_GL.masked_fill(~present_GL, -math.inf).amax(0)
    lowest_L = returns_GL.masked_fill(~present_GL, math.inf).amin(0)
    baseline_L = torch.where(highest_L == lowest_L, highest_L, baseline_L)
    return returns_GL - torch.where(present_GL.sum(0) > 1, baseline_L, 0.0)


ADVANTAGES: dict[str, Estimator] = {
    "grpo": grpo,
    "rloo": rloo,
    "opo": opo,
    "gpg": gpg,
    "grpo_passk": grpo_passk,
    "reinforce_plus_plus": reinforce_plus_plus,
    "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline,
    "remax": remax,
    "optimal_token_baseline": optimal_token_baseline,
    "tir_optimal_token_baseline": optimal_token_baseline,
}
WHITENED = frozenset({"reinforce_plus_plus", "reinforce_plus_plus_baseline"})


# --- shared pieces --------------------------------------------------------------------------------------------


def whiten(values_T: Tensor, mask_T: Tensor) -> Tensor:
    """(x - mean) / sqrt(var + 1e-8) with ddof 1 over the masked entries; 0 elsewhere.

    Fewer than two entries stay as they are; equal entries become exactly 0.
    """
    valid = values_T[mask_T]
    if valid.numel() >= 2:
        if valid.max() == valid.min():
            return torch.zeros_like(values_T)
        values_T = (values_T - valid.mean()) / torch.sqrt(valid.var() + WHITEN_EPS)
    return torch.where(mask_T, values_T, 0.0)


def _whiten_in_scope(values_T: Tensor, samples: AdvantageInput, options: AdvantageOptions) -> Tensor:
    mask_T = samples.mask_T & samples.baseline_T  # a sample outside the set keeps its 0
    if options.whiten_scope == "batch":
        return whiten(values_T, mask_T)
    assert samples.domains is not None, "whiten_scope=domain needs the domain of every sample"
    result_T = torch.zeros_like(values_T)
    lengths_B = torch.tensor(samples.lengths)
    for domain in sorted(set(samples.domains)):
        member_T = torch.repeat_interleave(torch.tensor([d == domain for d in samples.domains]), lengths_B)
        result_T += whiten(values_T, mask_T & member_T)
    return result_T


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


def _returns(samples: AdvantageInput, gamma: float) -> Tensor:
    """[T] float64 discounted reward to go; time counts model tokens only, other positions are 0."""
    result: list[float] = []
    for rewards, mask in zip(samples.rows(samples.rewards_T), samples.rows(samples.model_mask_T), strict=True):
        running, backwards = 0.0, []
        for reward, is_model in zip(reversed(rewards.tolist()), reversed(mask.tolist()), strict=True):
            running = reward + gamma * running if is_model else running
            backwards.append(running if is_model else 0.0)
        result.extend(reversed(backwards))
    return torch.tensor(result, dtype=torch.float64)


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
