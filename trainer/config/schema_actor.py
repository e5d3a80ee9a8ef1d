"""The roles that train or score: actor, reference, critic."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from trainer.config.schema_engine import (
    CriticFsdpOptim,
    CriticMegatronOptim,
    FsdpEngine,
    FsdpOptim,
    InheritedMegatronEngine,
    MegatronEngine,
    MegatronOptim,
)
from trainer.config.schema_model import CriticModel
from trainer.config.schema_trainer import Profiler

Strategy = Literal["fsdp2", "megatron"]
LossAggMode = Literal["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
KlType = Literal[
    "kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", "kl+", "k1+", "abs+", "mse+", "k2+", "low_var_kl+", "k3+"
]


@dataclass(frozen=True)
class PolicyLoss:
    loss_mode: str = "vanilla"  # per-token policy loss: a name, or module:function
    clip_cov_ratio: float = 2e-4  # clip_cov: share of tokens cut
    clip_cov_lb: float = 1.0  # clip_cov: lower covariance bound
    clip_cov_ub: float = 5.0  # clip_cov: upper covariance bound
    kl_cov_ratio: float = 2e-4  # kl_cov: share of tokens with a KL term
    ppo_kl_coef: float = 0.1  # kl_cov: its coefficient
    dro_beta: float | None = None  # dro: regularisation


@dataclass(frozen=True)
class RouterReplay:
    mode: Literal["disabled", "R2", "R3"] = "disabled"  # replay expert routes of the log-prob pass or the rollout
    record_file: str | None = None  # not offered
    replay_file: str | None = None  # not offered
    on_missing: Literal["drop", "live", "error"] = "drop"  # a sample without usable routes
    max_invalid_ratio: float = 0.05  # share of such samples that fails the step


@dataclass(frozen=True)
class Checkpoint:
    save_contents: list[str] = field(default_factory=lambda: ["model", "optimizer", "extra"])  # + hf_model
    load_contents: list[str] | None = None  # null = save_contents
    async_save: bool = False  # write while training goes on
    strict: bool = True  # refuse unknown or missing entries
    save_lora_only: bool = False  # adapters only
    mbridge_config: dict[str, Any] = field(default_factory=dict)  # bridge options


@dataclass(frozen=True)
class LengthLoss:
    coef: float = 0.0  # weight of the differentiable length loss; 0 = off
    free_len: int = 0  # response tokens that cost nothing


@dataclass(frozen=True)
class Actor:
    strategy: Strategy | None = None  # null = by engine; fsdp and fsdp2 both mean FSDP2
    ppo_mini_batch_size: int = 256  # prompts per optimizer step
    ppo_micro_batch_size_per_gpu: int | None = None  # sequences per forward/backward and rank
    use_dynamic_bsz: bool = False  # split by tokens instead
    ppo_max_token_len_per_gpu: int = 16384  # tokens per rank and micro-batch (x sp or cp)
    ppo_epochs: int = 1  # passes over each training batch
    shuffle: bool = False  # order of the mini-batches
    data_loader_seed: int | None = None  # seed of that order; null = trainer.seed
    clip_ratio: float | None = None  # fills the two bounds that are not given
    clip_ratio_low: float | None = None  # null = clip_ratio, else 0.2
    clip_ratio_high: float | None = None  # null = clip_ratio, else 0.2
    clip_ratio_c: float | None = 3.0  # dual clip; null = off
    loss_agg_mode: LossAggMode = "token-mean"  # how token losses become one number
    loss_scale_factor: int | None = None  # divisor of seq-mean-token-sum-norm; null = max_response_length
    entropy_coeff: float = 0.0  # weight of the entropy bonus
    calculate_entropy: bool = False  # entropy metric; a coefficient forces it
    use_kl_loss: bool = False  # KL to the reference in the loss
    kl_loss_coef: float = 0.001  # its weight
    kl_loss_type: KlType = "low_var_kl"  # kl=k1, mse=k2, low_var_kl=k3; a suffix + takes the gradient of k2
    policy_loss: PolicyLoss = field(default_factory=PolicyLoss)
    tau_pos: float = 1.0  # sapo: temperature for positive advantages
    tau_neg: float = 1.05  # sapo: temperature for negative advantages
    calculate_sum_pi_squared: bool = False  # for optimal_token_baseline
    use_torch_compile: bool = True  # compile hot functions
    router_replay: RouterReplay = field(default_factory=RouterReplay)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    use_prefix_grouper: bool = False  # one forward for a shared prompt
    profiler: Profiler = field(default_factory=Profiler)
    reuse_old_log_probs: Literal["auto", "never"] = "auto"  # auto = no pass where nobody reads it before the one update
    length_loss: LengthLoss = field(default_factory=LengthLoss)


@dataclass(frozen=True)
class FsdpActor(Actor):
    fsdp_config: FsdpEngine = field(default_factory=FsdpEngine)
    optim: FsdpOptim = field(default_factory=FsdpOptim)


@dataclass(frozen=True)
class MegatronActor(Actor):
    megatron: MegatronEngine = field(default_factory=MegatronEngine)
    optim: MegatronOptim = field(default_factory=MegatronOptim)


@dataclass(frozen=True)
class Ref:
    strategy: Strategy | None = None  # must equal the actor's
    use_torch_compile: bool | None = None  # null = the actor's
    log_prob_micro_batch_size_per_gpu: int | None = None  # sequences per forward and rank
    log_prob_use_dynamic_bsz: bool | None = None  # null = the actor's use_dynamic_bsz
    log_prob_max_token_len_per_gpu: int | None = None  # tokens; null = the actor's ppo_max_token_len_per_gpu
    profiler: Profiler = field(default_factory=Profiler)


@dataclass(frozen=True)
class FsdpRef(Ref):
    fsdp_config: FsdpEngine = field(default_factory=FsdpEngine)


@dataclass(frozen=True)
class MegatronRef(Ref):
    megatron: InheritedMegatronEngine = field(default_factory=InheritedMegatronEngine)


@dataclass(frozen=True)
class Critic:
    enable: bool | None = None  # null = only for adv_estimator gae
    strategy: Strategy | None = None  # must equal the actor's
    ppo_mini_batch_size: int | None = None  # prompts; null = the actor's
    ppo_micro_batch_size_per_gpu: int | None = None  # sequences per forward/backward and rank
    use_dynamic_bsz: bool | None = None  # null = the actor's
    ppo_max_token_len_per_gpu: int = 32768  # tokens per rank and micro-batch
    ppo_epochs: int | None = None  # null = the actor's
    shuffle: bool | None = None  # null = the actor's
    data_loader_seed: int | None = None  # null = the actor's
    cliprange_value: float | None = 0.5  # clip of the value loss; null = none
    loss_agg_mode: LossAggMode | None = None  # null = the actor's
    loss_scale_factor: int | None = None  # null = the actor's
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    nccl_timeout: int = 600  # seconds
    model: CriticModel = field(default_factory=CriticModel)
    profiler: Profiler = field(default_factory=Profiler)


@dataclass(frozen=True)
class FsdpCritic(Critic):
    fsdp: FsdpEngine = field(default_factory=FsdpEngine)
    optim: CriticFsdpOptim = field(default_factory=CriticFsdpOptim)


@dataclass(frozen=True)
class MegatronCritic(Critic):
    megatron: InheritedMegatronEngine = field(default_factory=InheritedMegatronEngine)
    optim: CriticMegatronOptim = field(default_factory=CriticMegatronOptim)
