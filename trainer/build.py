"""From configuration to a ready Trainer: everything cheap first, so that bad input ends before a worker starts."""

from __future__ import annotations

import logging
import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from engines import check_train_engine
from engines.device import get_device
from trainer import checkpoint, wiring, wiring_credit, wiring_critic, wiring_loss
from trainer.cluster import Cluster
from trainer.config import Config, Loaded, diff, fingerprint, save_config
from trainer.config.schema_reward import SCORER_FIELDS
from trainer.consistency import ConsistencyLimits, ConsistencyMonitor
from trainer.credit.advantage import find_estimator
from trainer.credit.sample_weights import check_difficulties
from trainer.loop import Plan, Rooms, Trainer
from trainer.placement import Roles, start_workers
from trainer.prompts import PromptSource, read_sources, report_text, write_report
from trainer.report.console import Console
from trainer.report.metrics import MetricLog
from trainer.reward import SCORED_DOMAINS, SPARE_S, TIMEOUT_S, CustomSpec, DomainSpec, OverlongSpec, RewardManager
from trainer.update.critic import Critic
from trainer.update.loss import PolicyLoss
from trainer.update.policy import Policy

log = logging.getLogger(__name__)
REPOSITORY = Path(__file__).resolve().parent.parent

# A resumed run that differs here would not be the same experiment; trainer.resume_allow_changes permits it.
# Shards are read by the ranks that wrote them: the layout cannot change at all.
LAYOUT = (
    "trainer.nnodes",
    "trainer.n_gpus_per_node",
    *(
        f"actor_rollout_ref.actor.megatron.{name}"
        for name in (
            "tensor_model_parallel_size",
            "pipeline_model_parallel_size",
            "virtual_pipeline_model_parallel_size",
            "context_parallel_size",
            "expert_model_parallel_size",
            "expert_tensor_parallel_size",
            "use_distributed_optimizer",
            "dtype",
            "override_transformer_config",
        )
    ),
    *(f"actor_rollout_ref.actor.fsdp_config.{name}" for name in ("fsdp_size", "model_dtype")),
)
IDENTITY = (
    "model_engine",
    "actor_rollout_ref.model.path",
    "actor_rollout_ref.rollout.n",
    "actor_rollout_ref.rollout.seed",
    "data.train_files",
    "data.train_batch_size",
    "data.max_prompt_length",
    "data.max_response_length",
    "data.seed",
    "trainer.seed",
)


def build(loaded: Loaded) -> Trainer:
    """Read data, prepare the run folder, start the cluster, and put the rooms together."""
    config = loaded.config
    settings = config.trainer
    check_reach(config)
    run_dir = Path(settings.default_local_dir)
    resume_from = checkpoint.find(run_dir, settings.resume_mode, settings.resume_from_path)
    data = read_sources(config, _domains(config), _scorers(config))
    device = get_device(config.derived.device).kind
    eos = wiring.eos_token_ids(config.actor_rollout_ref.model.path, data.encoder.tokenizer.eos_token_id)
    plan = _plan(config, data.train, eos)
    actor = wiring.actor_spec(config, device, plan.total_steps)
    reference = wiring.reference_spec(config, device)
    critic = wiring_critic.critic_spec(config, device, plan.total_steps)
    for spec in filter(None, (actor, reference, critic)):
        check_train_engine(spec)

    if resume_from is None:
        set_aside(run_dir)
    else:
        check_identity(config, resume_from)
        for folder in checkpoint.abandon_after(run_dir, checkpoint.read_state(resume_from)["step"]):
            log.warning("going on from %s; the later checkpoint is now %s", resume_from, folder)
    run_dir.mkdir(parents=True, exist_ok=True)
    save_config(loaded, run_dir)
    log.info(report_text(write_report(run_dir, data.train, data.validation, config.data.length_bucket)))
    resume_step = checkpoint.read_state(resume_from)["step"] if resume_from else 0
    metrics = MetricLog(run_dir, tuple(settings.logger), resume_step)
    console = Console(enabled="console" in settings.logger)

    with ExitStack() as undo, console.phase("starting workers", {}, "start"):
        rewards = _rewards(config, {row.domain for source in (data.train, data.validation) for row in source.rows})
        undo.callback(rewards.close)
        place = wiring.placement(config)
        cluster = Cluster(place.bundles, _worker_env(config), dict(config.ray_kwargs.ray_init.runtime_env))
        undo.callback(cluster.shutdown)
        roles = Roles(actor, reference, critic, wiring.rollout_spec(config, device), wiring.sync_spec(config, device))
        train, rollout = start_workers(cluster, place, roles, float(config.actor_rollout_ref.nccl_timeout))
        policy = Policy(train, settings.balance_batch)
        rooms = Rooms(
            prompts=data.train,
            val_prompts=data.validation,
            encoder=data.encoder,
            rewards=rewards,
            cluster=cluster,
            policy=policy,
            critic=None if critic is None else Critic(policy.ranks, wiring_critic.critic_plan(config)),
            rollout=rollout,
            monitor=ConsistencyMonitor(_consistency(config)),
            console=console,
            metrics=metrics,
        )
        undo.pop_all()  # from here on Trainer.close does it
    return Trainer(config, plan, rooms, run_dir, resume_from)


def report_data(config: Config) -> str:
    """Read and check all data, write the report into the run folder, and return it as text. Starts nothing."""
    check_reach(config)
    data = read_sources(config, _domains(config), _scorers(config))
    run_dir = Path(config.trainer.default_local_dir)
    return report_text(write_report(run_dir, data.train, data.validation, config.data.length_bucket))


def set_aside(run_dir: Path) -> None:
    """A fresh start never mixes with, or deletes, an earlier run's files: the old folder gets a number."""
    if not (run_dir / "metrics.csv").exists() and not checkpoint.checkpoints(run_dir):
        return
    number = 1
    while (aside := run_dir.with_name(f"{run_dir.name}.old-{number}")).exists():
        number += 1
    run_dir.rename(aside)
    log.warning("%s holds an earlier run and resume_mode does not continue it: moved to %s", run_dir, aside)


def check_identity(config: Config, resume_from: Path) -> None:
    """Print what differs from the run that wrote the checkpoint; refuse what would make it another experiment."""
    allowed = set(config.trainer.resume_allow_changes)
    refused = []
    if checkpoint.read_state(resume_from)["fingerprint"] == fingerprint(config):
        return
    for key, old, new in diff(resume_from / "config" / "resolved.yaml", config):
        fixed = _within(key, LAYOUT) or (_within(key, IDENTITY) and key not in allowed)
        if fixed:
            refused.append(f"  {key}: {old!r} in the checkpoint, {new!r} now")
        else:
            log.warning("resuming with another %s: %r -> %r", key, old, new)
    if refused:
        raise ValueError(
            f"got a configuration that differs from the one of {resume_from}:\n" + "\n".join(refused) + "\n"
            "expected the same model, data, lengths, n, seeds and parallel layout; restore them, or (not for the "
            "layout) name the keys in trainer.resume_allow_changes=[…], or start anew with resume_mode=disable"
        )


def _within(key: str, names: tuple[str, ...]) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in names)


def check_reach(config: Config) -> None:
    """What the configuration allows for later and this release cannot do on this machine."""
    path = Path(config.actor_rollout_ref.model.path)
    if not (path / "config.json").is_file():
        raise ValueError(
            f"got actor_rollout_ref.model.path={path}; expected a local model directory with config.json; "
            "download the model first: weights are never fetched at run time"
        )


def _scorers(config: Config) -> dict:
    """Which domains can be scored: all by the user's function, or those it is limited to beside the built-in ones."""
    function = config.reward.custom_reward_function
    if function.path is not None and function.domains is None:
        return {"custom_reward": True}
    built_in = [domain for domain in SCORED_DOMAINS if domain != "llm_judge" or domain in config.rewards]
    return {"scorers": (*built_in, *(function.domains or ()))}


def _domains(config: Config) -> dict[str, DomainSpec]:
    return {
        name: DomainSpec(
            tags=tuple(domain.tag_included),
            world_size=domain.world_size or 0,
            timeout_s=domain.timeout_s or _timeout_s(config, name),
            score_map=tuple(domain.score_map),
            options=_code_options(config)
            if name == "code_sandbox"
            else {field: vars(domain)[field] for field in SCORER_FIELDS.get(name, ())},
        )
        for name, domain in config.rewards.items()
    }


def _timeout_s(config: Config, domain: str) -> float:
    if domain == "code_sandbox":
        return config.reward.code_sandbox.row_s + SPARE_S
    return TIMEOUT_S.get(domain, DomainSpec.timeout_s)


def _code_options(config: Config) -> dict[str, Any]:
    service = config.reward.sandbox_fusion
    remote = {"url": service.url, "max_concurrent": service.max_concurrent, "memory_limit_mb": service.memory_limit_mb}
    sandbox = config.reward.code_sandbox
    return {**vars(sandbox), "isolation": sandbox.isolation, "mode": sandbox.mode, **remote}


def _rewards(config: Config, domains_of_rows: set[str]) -> RewardManager:
    reward = config.reward
    function = reward.custom_reward_function
    custom = None
    if function.path is not None:
        custom = CustomSpec(
            path=function.path,
            name=function.name,
            reward_kwargs=dict(function.reward_kwargs),
            domains=tuple(function.domains) if function.domains is not None else None,
            timeout_s=reward.timeout_s,
        )
    buffer = reward.reward_kwargs["overlong_buffer_cfg"]
    overlong = OverlongSpec(**buffer, max_resp_len=reward.reward_kwargs["max_resp_len"]) if buffer["enable"] else None
    domains = _domains(config)
    if "code_sandbox" in domains_of_rows - domains.keys():  # by a built-in tag; the start must try the sandbox out
        options = _code_options(config)
        domains["code_sandbox"] = DomainSpec(timeout_s=_timeout_s(config, "code_sandbox"), options=options)
    return RewardManager(domains, custom, num_workers=reward.num_workers, overlong=overlong)


def _plan(config: Config, prompts: PromptSource, eos: tuple[int, ...]) -> Plan:
    find_estimator(config.algorithm.adv_estimator)  # a wrong name fails here, not after the first rollout
    credit = wiring_credit.credit_options(config, wiring_loss.correction_options(config))
    if credit.weights.difficulty == "field":
        check_difficulties(prompts.rows)
    steps = config.trainer.total_training_steps
    if steps is None:
        steps = prompts.batches_in(config.trainer.total_epochs)
    loss = wiring_loss.loss_options(config)
    log.info(wiring_loss.clip_text(loss))
    return Plan(
        total_steps=steps,
        sampling=wiring.sampling(config, eos),
        val_sampling=wiring.validation_sampling(config, eos),
        score=wiring.old_log_prob_options(config),
        score_reference=wiring.reference_options(config),
        update=wiring.update_options(config),
        routes=wiring.route_options(config),
        separate=wiring.is_separate(config),
        **wiring.pace(config),
        credit=credit,
        remax=config.algorithm.adv_estimator == "remax",
        filter=wiring_credit.dynamic_sampling(config),
        loss=PolicyLoss(loss),
        loss_kl=wiring_loss.loss_kl(config),
    )


def _consistency(config: Config) -> ConsistencyLimits:
    limits = config.trainer.consistency
    return ConsistencyLimits(healthy_mean=limits.mean, patience=limits.patience, fail_mean=limits.fail_mean)


def _worker_env(config: Config) -> dict[str, str]:
    python_path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH", "")]))
    return {
        "PYTHONPATH": python_path,
        "TOKENIZERS_PARALLELISM": "false",
        **{name: str(value) for name, value in config.trainer.env.items()},
    }
