"""Our estimators, losses, KL and rollout correction beside verl's, on the same random inputs.

    pip install --no-deps --target DIR verl==0.9.1 tensordict pyvers codetiming orjson
    python3 scripts/compare_verl.py --verl DIR

verl is imported, never copied, and nothing of it enters this environment. Prints one row per quantity: the largest
absolute difference and a verdict; then why some differ on purpose. The exit status is 1 when a difference is
unexpected, or when one that is meant has disappeared: then this file no longer tells the truth.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch
from torch import Tensor

from engines.batch import PolicyOutput, TrainBatch, ValueOutput
from trainer.batching import denominators
from trainer.credit.advantage import compute_advantages
from trainer.credit.advantage_input import AdvantageInput, AdvantageOptions
from trainer.credit.correction import CorrectionOptions, Rejection, correct
from trainer.credit.importance import WeightRule
from trainer.kl import kl_estimate
from trainer.kl_control import KlControl, KlController
from trainer.update.loss import AGG_MODES, LossOptions, PolicyLoss
from trainer.update.value_loss import ValueLoss

VERSION = "0.9.1"
TOLERANCE = 1e-6
SAMPLES, GROUP, WIDTH = 12, 4, 9  # samples, samples per prompt, padded response length (B, G, R)

MEANT = {
    "gpg": "verl counts samples with a non-zero score for alpha; we count those whose group's rewards differ",
    "grpo, group of one": "a lone sample of a larger group has no baseline: we give 0, verl its score",
    "gae, masked": "verl leaves whitened values and V at masked positions; we give 0",
    "otb, tool tokens": "we align samples by model token, verl by column, tool tokens included",
    "gspo, token-mean": "a loss of whole samples is averaged over samples here, whatever loss_agg_mode says",
    "geo_mean, empty sample": "verl averages over all rows of the micro-batch; we over samples with a token",
    "seq-mean-token-sum-norm": "verl divides by the padded width unless told otherwise; we by a constant",
    "kl_cov, moved policy": "we select once per mini-batch from old log-probs, verl in each micro-batch from new ones",
    "token_k1 0.8_4.0": "our bounds are on rho, verl's act on 1 / rho",
    "rollout_is_std": "unbiased here, of the population in verl",
    "sequence rollout_is_max": "of the weights in use here, of those before truncation in verl",
}


@dataclass(frozen=True)
class Row:
    """`meant` names the reason in MEANT for which the two should differ; None: they should not."""

    name: str
    ours: Any
    theirs: Any
    meant: str | None = None

    @property
    def difference(self) -> float:
        ours, theirs = (torch.as_tensor(value, dtype=torch.float64).detach() for value in (self.ours, self.theirs))
        return float((ours - theirs).abs().max())

    @property
    def verdict(self) -> str:
        if self.difference <= TOLERANCE:
            return "equal" if self.meant is None else "NO LONGER DIFFERS"
        return "UNEXPECTED" if self.meant is None else "differs, meant"


@dataclass
class Case:
    """Random samples, padded [B, R] float64 on the right as verl has them; `packed` is the same as we have them."""

    seed: int = 0
    holes: bool = False  # tool tokens inside responses
    empty: bool = False  # the last sample has no valid token
    uids: list[str] = field(init=False)
    mask: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self._generator = torch.Generator().manual_seed(self.seed)
        self.lengths = torch.randint(2, WIDTH + 1, (SAMPLES,), generator=self._generator)
        self.uids = [f"p{row % (SAMPLES // GROUP)}" for row in range(SAMPLES)]  # interleaved
        self.mask = (torch.arange(WIDTH) < self.lengths[:, None]).double()
        if self.holes:
            self.mask[:, 1] = torch.where(self.lengths > 2, 0.0, 1.0).double()
            self.mask[0, 1] = 1.0
        if self.empty:
            self.mask[-1] = 0.0
        self.scores = torch.where(self.mask.any(1), self.noise(SAMPLES), 0.0)
        last = (self.mask * torch.arange(1, WIDTH + 1)).argmax(1)
        self.rewards = torch.zeros(SAMPLES, WIDTH).double()
        self.rewards[torch.arange(SAMPLES), last] = self.scores
        self.log_probs = -self.noise(SAMPLES, WIDTH).abs() - 0.02
        self.old = (self.log_probs + 0.4 * self.noise(SAMPLES, WIDTH)).clamp_max(-0.01)
        self.rollout = (self.old + 0.3 * self.noise(SAMPLES, WIDTH)).clamp_max(-0.005)
        self.advantages = self.noise(SAMPLES, 1).expand(-1, WIDTH) * self.mask
        self.values, self.returns, self.now = (self.noise(SAMPLES, WIDTH) for _ in range(3))
        self.weights = 0.5 + self.noise(SAMPLES, WIDTH).abs()
        probability = self.old.exp()
        self.squares = probability**2 + 0.7 * (1 - probability) ** 2

    def noise(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self._generator, dtype=torch.float64)

    def packed(self, **tokens: Tensor) -> TrainBatch:
        """One prompt token, then the response of each sample."""
        lengths = self.lengths.tolist()
        batch = TrainBatch.pack([[1] * (length + 1) for length in lengths])
        for name, value in {"loss_mask": self.mask, **tokens}.items():
            rows = [torch.nn.functional.pad(row[:n], (1, 0)) for row, n in zip(value, lengths, strict=True)]
            batch.tokens[name] = torch.cat(rows)
        batch.samples["key"] = torch.arange(SAMPLES)
        return batch

    def padded(self, batch: TrainBatch, values_T: Tensor) -> Tensor:
        rows = [torch.nn.functional.pad(row[1:], (0, WIDTH + 1 - len(row))) for row in batch.rows(values_T)]
        return torch.stack(rows)


# --- advantages -----------------------------------------------------------------------------------------------


def our_advantages(case: Case, name: str, uids: list[str], **options: Any) -> tuple[Tensor, Tensor]:
    batch = case.packed(values=case.values, old_log_probs=case.old, sum_pi_squared=case.squares)
    greedy = (0.1 * torch.arange(SAMPLES)).tolist()
    samples = AdvantageInput.from_batch(batch, case.scores.tolist(), uids, greedy_scores=greedy)
    result = compute_advantages(name, samples, AdvantageOptions(**options))
    return case.padded(batch, result.advantages_T), case.padded(batch, result.returns_T)


def verl_advantages(
    verl: SimpleNamespace, case: Case, name: str, uids: list[str], **more: Any
) -> tuple[Tensor, Tensor]:
    function = verl.algos.get_adv_estimator_fn(name)
    return function(token_level_rewards=case.rewards.clone(), response_mask=case.mask, **more | _index(name, uids))


def _index(name: str, uids: list[str]) -> dict[str, Any]:
    return {} if name in ("gae", "remax", "reinforce_plus_plus") else {"index": np.array(uids)}


def advantages(verl: SimpleNamespace) -> Iterator[Row]:
    plain, holes = Case(1), Case(2, holes=True)
    otb = {"old_log_probs": plain.old, "sum_pi_squared": plain.squares}
    no_std = {"norm_adv_by_std_in_grpo": False}
    for name, ours, theirs in (
        ("grpo", {}, {}),
        ("grpo", no_std, no_std),
        ("rloo", {}, {}),
        ("opo", {}, {}),
        ("grpo_passk", {}, {"config": verl.AlgoConfig()}),
        ("reinforce_plus_plus", {"gamma": 0.9}, {"config": verl.AlgoConfig(gamma=0.9)}),
        ("reinforce_plus_plus_baseline", {}, {}),
        ("remax", {}, {"reward_baselines": 0.1 * torch.arange(SAMPLES).double()}),
        ("optimal_token_baseline", {}, otb),
    ):
        pairs = zip(*(f(plain) for f in _pair(verl, name, plain.uids, ours, theirs)), strict=True)
        yield Row(f"advantages {name}{' without std' if ours == no_std else ''}", *next(pairs))
    for name, more in (("grpo", {}), ("reinforce_plus_plus", {"config": verl.AlgoConfig(gamma=0.9)})):
        mine, their = _pair(verl, name, holes.uids, {"gamma": 0.9}, more)
        yield Row(f"advantages {name}, tool tokens", mine(holes)[0], their(holes)[0])
    ours, returns = our_advantages(holes, "gae", holes.uids, gamma=0.99, lam=0.9)
    theirs, targets = verl_advantages(verl, holes, "gae", [], values=holes.values, gamma=0.99, lam=0.9)
    yield Row("advantages gae, tool tokens", ours, theirs * holes.mask)
    yield Row("returns gae, tool tokens", returns, targets * holes.mask)
    yield Row("advantages gae at masked positions", ours, theirs, "gae, masked")
    more = {"old_log_probs": holes.old, "sum_pi_squared": holes.squares}
    mine, their = _pair(verl, "optimal_token_baseline", holes.uids, {}, more)
    yield Row("advantages optimal_token_baseline, tool tokens", mine(holes)[0], their(holes)[0], "otb, tool tokens")
    alone = ["alone", *plain.uids[1:]]
    mine, their = _pair(verl, "grpo", alone, {}, {})
    yield Row("advantages grpo, group of one", mine(plain)[0], their(plain)[0], "grpo, group of one")
    solved = replace_scores(plain, torch.tensor([1.0, 0.0, 1.0] + [0.0, 0.0, 1.0] * 3).double())
    mine, their = _pair(verl, "gpg", solved.uids, {}, {})
    yield Row("advantages gpg, one group solved", mine(solved)[0], their(solved)[0], "gpg")


def _pair(verl: SimpleNamespace, name: str, uids: list[str], ours: dict, theirs: dict) -> tuple:
    return (
        lambda case: our_advantages(case, name, uids, **ours),
        lambda case: verl_advantages(verl, case, name, uids, **theirs),
    )


def replace_scores(case: Case, scores: Tensor) -> Case:
    changed = Case(case.seed)
    changed.rewards = torch.where(case.rewards != 0, scores[:, None], 0.0)
    changed.scores = scores
    return changed


# --- losses ---------------------------------------------------------------------------------------------------


def our_loss(case: Case, options: LossOptions, **changes: Tensor) -> tuple[Tensor, Tensor, dict[str, float]]:
    """Loss, gradient [B, R], metrics."""
    tokens = {"old_log_probs": case.old, "advantages": case.advantages, "rollout_is_weights": case.weights} | changes
    batch = case.packed(now=case.log_probs, **tokens)
    loss = PolicyLoss(options)
    loss.prepare_mini(batch, step=0, number=0)
    now_T = batch.tokens["now"].requires_grad_()
    value, metrics = loss(PolicyOutput(now_T), batch, denominators(batch))
    grad = torch.autograd.grad(value, now_T)[0]
    return value, case.padded(batch, grad), {name: metric.value for name, metric in metrics.items()}


def verl_loss(
    verl: SimpleNamespace, case: Case, options: LossOptions, **changes: Tensor
) -> tuple[Tensor, Tensor, dict[str, float]]:
    policy = verl.PolicyLossConfig(
        loss_mode=options.loss_mode,
        dro_beta=options.dro_beta,
        **{name: getattr(options, name) for name in ("clip_cov_ratio", "kl_cov_ratio", "ppo_kl_coef")},
        **{name: getattr(options, name) for name in ("clip_cov_lb", "clip_cov_ub")},
    )
    config = verl.ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        policy_loss=policy,
        **{name: getattr(options, name) for name in ("clip_ratio_low", "clip_ratio_high", "clip_ratio_c")},
    )
    if options.loss_scale_factor is not None:
        config.global_batch_info["loss_scale_factor"] = options.loss_scale_factor
    now = case.log_probs.clone().requires_grad_()
    value, metrics = verl.algos.get_policy_loss_fn(options.loss_mode)(
        old_log_prob=changes.get("old_log_probs", case.old),
        log_prob=now,
        advantages=changes.get("advantages", case.advantages),
        response_mask=case.mask,
        loss_agg_mode=options.loss_agg_mode,
        config=config,
        rollout_is_weights=case.weights,
    )
    return value, torch.autograd.grad(value, now)[0], metrics


def losses(verl: SimpleNamespace) -> Iterator[Row]:
    case, holes = Case(3), Case(4, holes=True)
    clips = {"dppo_tv": 0.1, "dppo_kl": 0.05, "geo_mean": 0.3, "gspo": 0.05}
    for mode in ("vanilla", "cispo", "gpg", "dro", "dppo_tv", "dppo_kl", "gspo", "sapo", "geo_mean"):
        by_sample = mode in ("gspo", "sapo", "geo_mean")
        clip = clips.get(mode, 0.2)
        options = LossOptions(mode, clip, 1.4 * clip, 2.0, loss_scale_factor=50.0, dro_beta=0.3)
        for agg in ("seq-mean-token-mean",) if by_sample else AGG_MODES:
            chosen = replace(options, loss_agg_mode=agg)
            ours, theirs = our_loss(holes, chosen), verl_loss(verl, holes, chosen)
            yield Row(f"loss {mode}, {agg}", ours[0], theirs[0])
            yield Row(f"gradient {mode}, {agg}", ours[1], theirs[1])
        for name in ("pg_clipfrac", "pg_clipfrac_lower", "ppo_kl") if mode == "vanilla" else ():
            yield Row(f"metric {name}, {mode}", ours[2][f"actor/{name}"], theirs[2][f"actor/{name}"])
    shifted = {"old_log_probs": case.log_probs - 0.05}  # ratios alike: both select the same tokens
    clip_cov = LossOptions("clip_cov", clip_cov_ratio=1.0, clip_cov_lb=0.1)
    kl_cov = LossOptions("kl_cov", kl_cov_ratio=0.2, ppo_kl_coef=0.7)
    for options in (clip_cov, kl_cov):
        ours, theirs = our_loss(case, options, **shifted), verl_loss(verl, case, options, **shifted)
        yield Row(f"loss {options.loss_mode}, same selection", ours[0], theirs[0])
        yield Row(f"gradient {options.loss_mode}, same selection", ours[1], theirs[1])
    yield Row("gradient kl_cov", our_loss(case, kl_cov)[1], verl_loss(verl, case, kl_cov)[1], "kl_cov, moved policy")
    gspo = LossOptions("gspo", 0.05, 0.07)
    yield Row("loss gspo, token-mean", our_loss(case, gspo)[0], verl_loss(verl, case, gspo)[0], "gspo, token-mean")
    empty, geo = Case(5, empty=True), LossOptions("geo_mean", 0.3, 0.3)
    reason = "geo_mean, empty sample"
    yield Row(f"loss {reason}", our_loss(empty, geo)[0], verl_loss(verl, empty, geo)[0], reason)
    norm = LossOptions(loss_agg_mode="seq-mean-token-sum-norm", loss_scale_factor=50.0)
    width = verl.algos.agg_loss(case.advantages, case.mask, norm.loss_agg_mode)
    told = verl.algos.agg_loss(case.advantages, case.mask, norm.loss_agg_mode, loss_scale_factor=50.0)
    yield Row("seq-mean-token-sum-norm, divisor left open", told, width, "seq-mean-token-sum-norm")


def values(verl: SimpleNamespace) -> Iterator[Row]:
    case = Case(6, holes=True)
    for agg in AGG_MODES:
        batch = case.packed(values=case.values, returns=case.returns, now=case.now)
        now_T = batch.tokens["now"].requires_grad_()
        value, metrics = ValueLoss(0.5, agg, 50.0)(ValueOutput(now_T), batch, denominators(batch))
        now = case.now.clone().requires_grad_()
        theirs, clipped = verl.algos.compute_value_loss(
            now, case.returns, case.values, case.mask, 0.5, agg, loss_scale_factor=50.0
        )
        yield Row(f"value loss, {agg}", value, theirs)
        grad_T = torch.autograd.grad(value, now_T)[0]
        yield Row(f"value gradient, {agg}", case.padded(batch, grad_T), torch.autograd.grad(theirs, now)[0])
    yield Row("metric vf_clipfrac", metrics["critic/vf_clipfrac"].value, clipped)


def kl(verl: SimpleNamespace) -> Iterator[Row]:
    case = Case(7)
    reference = case.old - 3 * case.noise(SAMPLES, WIDTH)
    for name in ("k1", "abs", "k2", "k3", "low_var_kl", "k1+", "k2+", "k3+"):
        ours, theirs = (case.log_probs.clone().requires_grad_() for _ in range(2))
        value, expected = kl_estimate(ours, reference, name), verl.algos.kl_penalty(theirs, reference, name)
        yield Row(f"KL {name}", value, expected)
        grads = (torch.autograd.grad(x.sum(), y)[0] for x, y in ((value, ours), (expected, theirs)))
        yield Row(f"KL gradient {name}", *grads)
    controller = KlController(KlControl("adaptive", kl_coef=0.1, target_kl=0.1, horizon=10000))
    other = verl.algos.AdaptiveKLController(0.1, 0.1, 10000)
    for divergence in (0.2, 0.05, 0.101):
        controller.update(divergence, 256)
        other.update(divergence, 256)
    yield Row("adaptive KL coefficient", controller.coefficient(3), other.value)


# --- rollout correction ---------------------------------------------------------------------------------------


def correction(verl: SimpleNamespace) -> Iterator[Row]:
    case = Case(8, holes=True)

    def ours(**options: Any) -> tuple[Tensor, Tensor, dict[str, float]]:
        batch = case.packed(old_log_probs=case.old, rollout_log_probs=case.rollout)
        found = correct(batch, CorrectionOptions(**options))
        weights_T = batch.tokens.get("rollout_is_weights", torch.ones(batch.num_tokens))
        metrics = {name.removeprefix("rollout_corr/"): metric.value for name, metric in found.items()}
        return case.padded(batch, weights_T) * case.mask, case.padded(batch, batch.tokens["rs_mask"]), metrics

    log_ratio = case.old - case.rollout
    for kind, threshold, rule, normalize in (
        ("token", 1.2, WeightRule("token", 1.2), False),
        ("token", 1.2, WeightRule("token", 1.2), True),
        ("sequence", 1.5, WeightRule("sequence", 1.5), False),
        ("sequence", 1.5, WeightRule("sequence", 1.5), True),
        ("token", "0.8_1.3", WeightRule("token", 1.3, 0.8), False),
    ):
        weights, _, metrics = ours(weights=rule, batch_normalize=normalize)
        theirs, others = verl.correction.compute_rollout_correction_weights(
            log_ratio, case.mask, kind, threshold, normalize
        )
        name = f"{kind} {threshold}{' normalised' if normalize else ''}"
        yield Row(f"rollout weights {name}", weights, theirs * case.mask)
        for key in sorted(others.keys() & metrics.keys()) if not normalize else ():
            meant = "rollout_is_std" if key == "rollout_is_std" else None
            if kind == "sequence" and key == "rollout_is_max":
                meant = "sequence rollout_is_max"
            yield Row(f"metric {key}, {name}", metrics[key], others[key], meant)
    for name, threshold, rule, meant in (
        ("token_k1", "0.5_2.0", Rejection("token_k1", 2.0, 0.5), None),
        ("token_k2", 0.05, Rejection("token_k2", 0.05), None),
        ("token_k3", 0.05, Rejection("token_k3", 0.05), None),
        ("seq_sum_k1", "0.5_2.0", Rejection("seq_sum_k1", 2.0, 0.5), None),
        ("seq_mean_k3", 0.04, Rejection("seq_mean_k3", 0.04), None),
        ("seq_max_k2", 0.2, Rejection("seq_max_k2", 0.2), None),
        ("token_k1", "0.8_4.0", Rejection("token_k1", 4.0, 0.8), "token_k1 0.8_4.0"),
    ):
        _, kept, metrics = ours(rejections=(rule,))
        mask, others = verl.correction.compute_rollout_rejection_mask(log_ratio, case.mask, name, threshold)
        yield Row(f"rejection {name} {threshold}", kept, mask, meant)
        key = f"rollout_rs_{name}_masked_fraction"
        yield Row(f"metric {key}, {threshold}", metrics[key], others[key], meant)
    expected = verl.correction.compute_offpolicy_metrics(case.old, case.rollout, case.mask)
    found = ours()[2]
    yield from (Row(f"metric {key}", found[key], expected[key]) for key in sorted(expected))


# --- the table ------------------------------------------------------------------------------------------------


def load_verl(folder: Path) -> SimpleNamespace:
    """The modules of verl under `folder`; ValueError unless it is the version this was written against."""
    if not (folder / "verl" / "trainer" / "ppo" / "core_algos.py").is_file():
        raise ValueError(f"got --verl {folder}; expected a folder with the package verl; install it as this file says")
    sys.path.append(str(folder))  # behind this environment: what both have comes from here
    import verl
    from verl.trainer.config import AlgoConfig
    from verl.trainer.ppo import core_algos, rollout_corr_helper
    from verl.workers.config import ActorConfig, PolicyLossConfig

    if verl.__version__ != VERSION:
        raise ValueError(f"got verl {verl.__version__}; expected {VERSION}; install that version into another folder")
    return SimpleNamespace(
        algos=core_algos,
        correction=rollout_corr_helper,
        AlgoConfig=AlgoConfig,
        ActorConfig=ActorConfig,
        PolicyLossConfig=PolicyLossConfig,
    )


def compare(verl: SimpleNamespace) -> list[Row]:
    return [row for part in (advantages, losses, values, kl, correction) for row in part(verl)]


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--verl", type=Path, required=True, help="folder that holds the package verl")
    rows = compare(load_verl(parser.parse_args(argv).verl))
    width = max(len(row.name) for row in rows)
    for row in rows:
        print(f"{row.name:{width}}  {row.difference:9.2e}  {row.verdict}")
    print("\nDifferent on purpose:")
    for name, reason in MEANT.items():
        print(f"  {name}: {reason}")
    wrong = [row for row in rows if row.verdict in ("UNEXPECTED", "NO LONGER DIFFERS")]
    meant = sum(row.meant is not None for row in rows)
    print(f"\n{len(rows)} compared with verl {VERSION}: {len(rows) - meant} should be equal, {len(wrong)} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
