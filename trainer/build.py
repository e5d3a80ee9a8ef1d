"""From configuration to a ready Trainer: everything cheap first, so that bad input ends before a worker starts."""

from __future__ import annotations

import logging
import os
from contextlib import ExitStack
from pathlib import Path

from engines import check_train_engine
from engines.device import get_device
from engines.spec import RolloutEngineSpec, TrainEngineSpec
from engines.transport.shm import Address
from trainer import checkpoint, wiring
from trainer.advantage import AdvantageOptions, find_estimator
from trainer.cluster import Cluster, Pool, WorkerGroup, wait
from trainer.config import Config, Loaded, diff, fingerprint, save_config
from trainer.consistency import ConsistencyLimits, ConsistencyMonitor
from trainer.console import Console
from trainer.loop import Plan, Rooms, Trainer
from trainer.loss import LossOptions, PolicyLoss
from trainer.metrics import MetricLog
from trainer.policy import Policy
from trainer.prompts import PromptEncoder, PromptSource, load_rows, load_tokenizer, write_report
from trainer.reward import SCORED_DOMAINS, CustomSpec, DomainSpec, OverlongSpec, RewardManager
from trainer.rollout import RolloutGroup
from trainer.workers import RolloutWorker, TrainWorker

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
    tokenizer = load_tokenizer(config.actor_rollout_ref.model.path, config.data.trust_remote_code)
    encoder = PromptEncoder(tokenizer, dict(config.data.apply_chat_template_kwargs))
    prompts, val_prompts = _prompts(config, encoder, "train"), _prompts(config, encoder, "val")
    device = get_device(config.derived.device).kind
    eos = wiring.eos_token_ids(config.actor_rollout_ref.model.path, tokenizer.eos_token_id)
    plan = _plan(config, prompts, eos)
    actor = wiring.actor_spec(config, device, plan.total_steps)
    reference = wiring.reference_spec(config, device)
    for spec in filter(None, (actor, reference)):
        check_train_engine(spec)

    if resume_from is None:
        set_aside(run_dir)
    else:
        check_identity(config, resume_from)
        for folder in checkpoint.abandon_after(run_dir, checkpoint.read_state(resume_from)["step"]):
            log.warning("going on from %s; the later checkpoint is now %s", resume_from, folder)
    run_dir.mkdir(parents=True, exist_ok=True)
    save_config(loaded, run_dir)
    write_report(run_dir, prompts, val_prompts)
    resume_step = checkpoint.read_state(resume_from)["step"] if resume_from else 0
    metrics = MetricLog(run_dir, tuple(settings.logger), resume_step)
    console = Console(enabled="console" in settings.logger)

    with ExitStack() as undo, console.phase("starting workers", {}, "start"):
        rewards = _rewards(config)
        undo.callback(rewards.close)
        cluster = Cluster(_processes(config), _worker_env(config), dict(config.ray_kwargs.ray_init.runtime_env))
        undo.callback(cluster.shutdown)
        train, rollout, address = _start_workers(config, cluster, actor, reference, wiring.rollout_spec(config, device))
        rooms = Rooms(
            prompts=prompts,
            val_prompts=val_prompts,
            encoder=encoder,
            rewards=rewards,
            cluster=cluster,
            policy=Policy(train, settings.balance_batch),
            rollout=RolloutGroup(rollout, address),
            monitor=ConsistencyMonitor(_consistency(config)),
            console=console,
            metrics=metrics,
        )
        undo.pop_all()  # from here on Trainer.close does it
    return Trainer(config, plan, rooms, run_dir, resume_from)


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
    nodes = max(config.trainer.nnodes, config.actor_rollout_ref.rollout.nnodes)
    if nodes > 1:
        raise ValueError(
            f"got {nodes} nodes; expected 1: weights travel to the rollout through the shared memory of one machine, "
            "other transports are not built yet; set trainer.nnodes=1"
        )


def _prompts(config: Config, encoder: PromptEncoder, part: str) -> PromptSource:
    data = config.data
    is_train = part == "train"
    rows = load_rows(
        list(data.train_files if is_train else data.val_files),
        dataset_dir=data.dataset_dir,
        prompt_key=data.prompt_key,
        reward_fn_key=data.reward_fn_key,
        files_key=f"data.{part}_files",
        domains=_domains(config),
        **_scorers(config),
        max_samples=data.train_max_samples if is_train else data.val_max_samples,
        missing_id=data.missing_id,
        duplicate_ids=data.duplicate_ids,
        max_line_bytes=data.max_line_bytes,
        max_reported_errors=data.max_reported_errors,
    )
    return PromptSource(
        rows,
        encoder,
        batch_size=data.train_batch_size if is_train else 1,
        shuffle=data.shuffle if is_train else data.validation_shuffle,
        seed=data.seed if data.seed is not None else config.trainer.seed,
        max_prompt_length=data.max_prompt_length,
        truncation=data.truncation,
        filter_overlong=data.filter_overlong_prompts,
    )


def _scorers(config: Config) -> dict:
    """Which domains can be scored: all by the user's function, or those it is limited to beside the built-in ones."""
    function = config.reward.custom_reward_function
    if function.path is not None and function.domains is None:
        return {"custom_reward": True}
    return {"scorers": (*SCORED_DOMAINS, *(function.domains or ()))}


def _domains(config: Config) -> dict[str, DomainSpec]:
    return {
        name: DomainSpec(
            tags=tuple(domain.tag_included),
            world_size=domain.world_size or 0,
            timeout_s=domain.timeout_s,
            score_map=tuple(domain.score_map),
            options={"answer": domain.answer, "require_box": domain.require_box},
        )
        for name, domain in config.rewards.items()
    }


def _rewards(config: Config) -> RewardManager:
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
    return RewardManager(_domains(config), custom, num_workers=reward.num_workers, overlong=overlong)


def _plan(config: Config, prompts: PromptSource, eos: tuple[int, ...]) -> Plan:
    actor = config.actor_rollout_ref.actor
    find_estimator(config.algorithm.adv_estimator)  # a wrong name fails here, not after the first rollout
    steps = config.trainer.total_training_steps
    if steps is None:
        steps = prompts.batches_in(config.trainer.total_epochs)
    loss = LossOptions(
        loss_mode=actor.policy_loss.loss_mode,
        clip_ratio_low=actor.clip_ratio_low,
        clip_ratio_high=actor.clip_ratio_high,
        clip_ratio_c=actor.clip_ratio_c,
        loss_agg_mode=actor.loss_agg_mode,
        loss_scale_factor=actor.loss_scale_factor or config.data.max_response_length,
        use_kl_loss=actor.use_kl_loss,
        kl_loss_coef=actor.kl_loss_coef,
        kl_loss_type=actor.kl_loss_type,
        entropy_coeff=actor.entropy_coeff,
        tau_pos=actor.tau_pos,
        tau_neg=actor.tau_neg,
        dro_beta=actor.policy_loss.dro_beta,
    )
    return Plan(
        total_steps=steps,
        sampling=wiring.sampling(config, eos),
        val_sampling=wiring.validation_sampling(config, eos),
        score=wiring.old_log_prob_options(config),
        score_reference=wiring.reference_options(config),
        update=wiring.update_options(config),
        routes=wiring.route_options(config),
        advantage=AdvantageOptions(
            norm_adv_by_std_in_grpo=config.algorithm.norm_adv_by_std_in_grpo,
            singleton="reward" if config.actor_rollout_ref.rollout.n == 1 else "zero",
        ),
        loss=PolicyLoss(loss),
    )


def _consistency(config: Config) -> ConsistencyLimits:
    limits = config.trainer.consistency
    return ConsistencyLimits(healthy_mean=limits.mean, patience=limits.patience, fail_mean=limits.fail_mean)


def _processes(config: Config) -> int:
    """Bundles to reserve: colocated rollout replicas live in those of the training ranks."""
    separate = 0 if config.actor_rollout_ref.hybrid_engine else config.derived.rollout_replicas
    return config.derived.world_size + separate


def _worker_env(config: Config) -> dict[str, str]:
    python_path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH", "")]))
    return {
        "PYTHONPATH": python_path,
        "TOKENIZERS_PARALLELISM": "false",
        **{name: str(value) for name, value in config.trainer.env.items()},
    }


def _start_workers(
    config: Config,
    cluster: Cluster,
    actor: TrainEngineSpec,
    reference: TrainEngineSpec | None,
    rollout_spec: RolloutEngineSpec,
) -> tuple[WorkerGroup, WorkerGroup, Address]:
    """Training ranks and rollout replicas, ready; and where the rollout side finds its weights."""
    world, replicas = config.derived.world_size, config.derived.rollout_replicas
    resource = get_device(actor.device).ray_resource
    sync = wiring.sync_spec(config)
    train_place = cluster.place(Pool(world, resource))
    # Colocated roles share the devices and take turns; separate ones own theirs.
    shared = config.actor_rollout_ref.hybrid_engine
    rollout_place = train_place if shared else cluster.place(Pool(replicas, resource))
    share = 0.5 if shared else 1.0
    threads = wiring.threads_per_process(world)
    train = cluster.spawn(
        "train", TrainWorker, train_place, [(rank, world, threads, actor, reference) for rank in range(world)], share
    )
    threads = wiring.threads_per_process(replicas)
    rollout = cluster.spawn(
        "rollout",
        RolloutWorker,
        rollout_place,
        [(index, threads, rollout_spec, sync) for index in range(replicas)],
        share,
    )
    rendezvous = train.start("rendezvous").wait()[0]
    wait(train.start("build", rendezvous), rollout.start("ready"))
    addresses = train.call("open_sync", replicas, sync)
    return train, rollout, next(address for address in addresses if address is not None)
