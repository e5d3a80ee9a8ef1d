"""The loop: six rooms in order.

1 prompts -> 2 rollout -> 3 reward -> 4 advantage -> 5 update -> 6 weight sync
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from engines.base import ForwardOptions, SamplingParams
from engines.batch import TrainBatch
from engines.metric import Metric, Metrics
from trainer import checkpoint
from trainer.batching import build_batch, mini_batches
from trainer.cluster import Cluster
from trainer.config import Config, fingerprint
from trainer.consistency import ConsistencyMonitor, probability_difference
from trainer.credit.assign import CreditOptions, CreditState, assign_credit
from trainer.credit.length_penalty import penalise_scores
from trainer.kl_control import KlControl, KlController, mean_kl
from trainer.prompts import PromptEncoder, PromptSource
from trainer.report.console import Console
from trainer.report.dumps import rollout_rows, write_jsonl
from trainer.report.metrics import MetricLog
from trainer.report.step_metrics import response_metrics, spread, step_performance
from trainer.reward import RewardManager
from trainer.rollout.ahead import Ahead, InTurn
from trainer.rollout.collect import Collected, Collector
from trainer.rollout.group import RolloutGroup
from trainer.rollout.group_filter import DynamicSampling
from trainer.rollout.scored import Scored
from trainer.routing import RouteOptions, Routes, check_routes
from trainer.sync import WeightSync
from trainer.update.critic import Critic
from trainer.update.loss import PolicyLoss
from trainer.update.policy import Policy
from trainer.validation.validator import Validator

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Plan:
    """Everything the loop does that the configuration decides, translated once."""

    total_steps: int
    sampling: SamplingParams
    val_sampling: SamplingParams
    score: ForwardOptions | None
    score_reference: ForwardOptions | None
    update: ForwardOptions
    credit: CreditOptions
    loss: PolicyLoss
    loss_kl: KlControl | None = None
    routes: RouteOptions | None = None
    remax: bool = False  # every prompt also gets a greedy answer
    filter: DynamicSampling | None = None
    separate: bool = False  # the rollout has devices of its own
    ahead: int = 0  # batches that are generated before they are needed
    sync_every: int = 1  # training steps

    @property
    def max_staleness(self) -> int:
        """Weight versions that a sample may be behind when it is trained on."""
        carried = self.filter.options.max_staleness if self.filter is not None and self.filter.options.carry_over else 0
        return self.ahead + self.sync_every - 1 + carried


@dataclass(frozen=True)
class Rooms:
    """What the loop runs through: data, workers and instruments."""

    prompts: PromptSource
    val_prompts: PromptSource
    encoder: PromptEncoder
    rewards: RewardManager
    cluster: Cluster
    policy: Policy
    critic: Critic | None
    rollout: RolloutGroup
    monitor: ConsistencyMonitor
    console: Console
    metrics: MetricLog


class Trainer:
    """Runs the rooms. Built by trainer/build.py; `resume_from` is a complete checkpoint or None."""

    def __init__(self, config: Config, plan: Plan, rooms: Rooms, run_dir: Path, resume_from: Path | None) -> None:
        self.config, self.plan, self.run_dir, self.resume_from = config, plan, run_dir, resume_from
        self.prompts, self.rewards = rooms.prompts, rooms.rewards
        self.policy, self.critic, self.rollout = rooms.policy, rooms.critic, rooms.rollout
        self.cluster = rooms.cluster
        self.monitor, self.console, self.metrics = rooms.monitor, rooms.console, rooms.metrics
        self.collector = Collector(
            rooms.prompts,
            rooms.encoder,
            rooms.rollout,
            rooms.rewards,
            Console(enabled=False) if plan.ahead else rooms.console,
            plan.sampling,
            plan.filter,
            plan.remax,
            config.reward.max_failed_frac,
        )
        self.collected_state = self.collector.state_dict()
        self.validator = Validator(
            config, rooms.val_prompts, self.collector, plan.val_sampling, plan.sampling, self.console, run_dir
        )
        self.source = Ahead(self.collector.collect, plan.ahead) if plan.ahead else InTurn(self.collector.collect)
        self.sync = WeightSync(self.policy, self.rollout)
        self.rollout.restore = self._restore_weights
        self.credit = CreditState(plan.credit)
        self.loss_kl = KlController(plan.loss_kl) if plan.loss_kl is not None else None
        # What a step leaves to the next, beside weights and data; it goes into every checkpoint.
        self.memory = {"credit": self.credit, "validation": self.validator, "monitor": self.monitor}
        if self.loss_kl is not None:
            self.memory["loss_kl"] = self.loss_kl
        self.global_step = 0
        self.nonfinite_in_a_row = 0
        self.timings: dict[str, float] = {}

    # --- the loop ---------------------------------------------------------------------------------------------

    def fit(self) -> None:
        settings = self.config.trainer
        self._resume()
        self.sync_weights()
        if self.config.reward.report.enable and self.global_step == 0:
            self.validator.report_rewards()
        if settings.val_only or (settings.val_before_train and self.global_step == 0):
            self._report(self.validate())
        while self.global_step < self.plan.total_steps and not settings.val_only:
            row = self.step()
            if self._due(settings.test_freq):
                row |= self.validate()
            if self._due(settings.save_freq):
                self.save(row)
            self._report(row)
        self._summary()

    def step(self) -> dict[str, float]:
        """One cycle. Rollouts of step k+1 come from the policy that step k leaves behind."""
        self.timings = {}
        with self._phase("step", "step"):
            collected = self.next_samples()  # 1 prompts, 2 rollout, 3 reward
            scored, routes = self.take_routes(collected.scored)
            with self._training_turn():
                batch, metrics = self.score_log_probs(scored, routes)
                metrics |= self.compute_advantages(batch, scored, collected.greedy)  # 4 advantage
                metrics |= self.update_critic(batch, collected.num_prompts)  # 5 update
                metrics |= self.update_policy(batch, collected.num_prompts)
            self.global_step += 1
            if self.global_step % self.plan.sync_every == 0:
                self.sync_weights()  # 6 weight sync
        self._dump(batch, scored)
        metrics |= collected.metrics | response_metrics(scored)
        counted = metrics.get("critic/score/mean")
        self.validator.note_training(None if counted is None else counted.value)
        return self._row(metrics, batch.num_tokens) | self.rewards.take_metrics()

    # --- the rooms --------------------------------------------------------------------------------------------

    def next_samples(self) -> Collected:
        """One step's samples; those of the next begin under the weights the rollout holds now, if it may run ahead."""
        with self._waiting():
            collected = self.source.take()
        self.source.refill()
        self.timings |= collected.timings
        self.collected_state = collected.state
        ages = [self.global_step - each.sample.weight_version for each in collected.scored]
        if max(ages) > self.plan.max_staleness:
            raise RuntimeError(
                f"got samples {max(ages)} weight versions old at step {self.global_step + 1}; expected at most "
                f"{self.plan.max_staleness}: the rollout missed an update"
            )
        collected.metrics |= spread("training/staleness", ages)
        collected.scored = penalise_scores(collected.scored, self.plan.credit.length_penalty, self.global_step)
        return collected

    def take_routes(self, scored: list[Scored]) -> tuple[list[Scored], Routes | None]:
        """The routes to replay, if they come from the rollout, and the samples with those marked that have none."""
        if self.plan.routes is None:
            return scored, None
        routes = check_routes([each.sample for each in scored], self.plan.routes)
        for text in routes.invalid.values():
            log.warning("step %d: %s; on_missing=%s", self.global_step + 1, text, self.plan.routes.on_missing)
        dropped = routes.invalid if self.plan.routes.on_missing == "drop" else {}
        return [replace(each, routable=i not in dropped) for i, each in enumerate(scored)], routes

    def score_log_probs(self, scored: list[Scored], routes: Routes | None) -> tuple[TrainBatch, Metrics]:
        """Pack the samples and add log-probs of the training engine (and the reference)."""
        batch = build_batch([each.sample for each in scored])
        if routes is not None:
            batch.tokens["routes"] = torch.cat(routes.rows)
        batch.tokens["response_mask"] = batch.tokens["loss_mask"].clone()
        for row, each in enumerate(scored):
            if not each.counts:
                batch.tokens["loss_mask"][batch.cu_seqlens[row] : batch.cu_seqlens[row + 1]] = 0.0
        self.plan.loss.prepare_batch(batch, [each.item.uid for each in scored])
        with self._phase("old log-probs", "old_log_prob"):
            metrics = self.policy.score(batch, self.plan.score, self.plan.score_reference)
        if self.critic is not None:
            with self._phase("values", "values"), self.critic.turn():
                self.critic.values(batch)
        if routes is not None:
            metrics |= routes.metrics
        if self.plan.score is None:  # nobody reads the old policy before the update
            return batch, metrics
        difference: Metrics = {}
        if self.config.actor_rollout_ref.rollout.calculate_log_probs:
            difference = probability_difference(
                batch.tokens["old_log_probs"], batch.tokens["rollout_log_probs"], batch.tokens["response_mask"]
            )
        if all(each.sample.weight_version == self.global_step for each in scored):  # else they must differ
            for warning in self.monitor.check(self.global_step + 1, difference):
                log.warning(warning)
        entropy_T = batch.tokens.pop("entropy")[batch.tokens["response_mask"].bool()]
        entropy = {"actor/entropy": Metric("mean", float(entropy_T.double().sum()), entropy_T.numel())}
        return batch, metrics | difference | entropy

    def compute_advantages(self, batch: TrainBatch, scored: list[Scored], greedy: dict[str, float | None]) -> Metrics:
        with self._phase("advantages", "adv"):
            baselines = [greedy.get(each.item.uid) for each in scored] if self.plan.remax else None
            return assign_credit(
                batch, scored, self.plan.credit, self.credit, step=self.global_step, greedy_scores=baselines
            )

    def update_critic(self, batch: TrainBatch, num_prompts: int) -> Metrics:
        """The value model, where there is one, learns what the samples were worth."""
        if self.critic is None:
            return {}
        with self._phase("critic", "update_critic"), self.critic.turn():
            rows = self.critic.plan.rows(num_prompts, self.plan.sampling.n, self.global_step)
            return self.critic.update(batch, rows, self.global_step)

    def update_policy(self, batch: TrainBatch, num_prompts: int) -> Metrics:
        """ppo_epochs passes over the mini-batches, one optimizer step each; none while the critic warms up."""
        if self.critic is not None and not self.critic.plan.actor_learns(self.global_step):
            return {}
        actor = self.config.actor_rollout_ref.actor
        rows = []
        for epoch in range(actor.ppo_epochs):
            seed = actor.data_loader_seed + self.global_step * actor.ppo_epochs + epoch if actor.shuffle else None
            rows += mini_batches(num_prompts, self.plan.sampling.n, actor.ppo_mini_batch_size, seed)
        loss = self.plan.loss
        if self.loss_kl is not None:
            loss = loss.with_kl_coef(self.loss_kl.coefficient(self.global_step))
        with self._phase("update", "update_actor"):
            metrics = self.policy.update(batch, rows, loss, self.plan.update, self.global_step)
        if self.loss_kl is not None and self.plan.loss_kl.type == "adaptive":
            self.loss_kl.update(mean_kl(batch, loss.options.kl_loss_type), len(batch))
        metrics["mask/final_mask_sum_eq_0"] = Metric("last", float(not batch.tokens["loss_mask"].any()))
        if self.plan.score is not None:
            metrics.pop("actor/entropy", None)  # the pass before the updates has measured it on all tokens
        else:
            for warning in self.monitor.check(self.global_step + 1, metrics):
                log.warning(warning)
        self._check_finite(metrics)
        return metrics

    def sync_weights(self) -> None:
        """The rollout gets the weights of version `global_step`; both ends verify."""
        with self._rollout_paused(), self._phase("weight sync", "update_weights"):
            sent = self.sync.update(self.global_step)
        seconds = self.timings["timing_s/update_weights"]
        self.timings["perf/update_weights_gbps"] = sent.nbytes / seconds / 1e9

    @contextmanager
    def _rollout_paused(self) -> Iterator[None]:
        """Nothing is being generated inside."""
        with ExitStack() as stack:
            with self._waiting():
                stack.enter_context(self.source.paused())
            yield

    def _waiting(self) -> AbstractContextManager:
        """Time that the trainer has nothing to do but wait for samples."""
        return self._phase("waiting for the rollout", "wait_rollout") if self.plan.ahead else nullcontext()

    def _restore_weights(self, replicas: Sequence[int]) -> None:
        """A replica came up in the middle of a step, perhaps while the trainer is in the middle of another."""
        self.source.on_trainer(lambda: self.sync.restore(replicas, self.global_step))

    @contextmanager
    def _training_turn(self) -> Iterator[None]:
        """Colocated roles take turns on the devices: the rollout frees its memory, the trainer comes back from the
        host (where the configuration sent it). With the next sync they change places again."""
        if not self.plan.separate:
            self.rollout.each("sleep")
        self.policy.onload()
        yield

    # --- around the loop --------------------------------------------------------------------------------------

    def validate(self) -> dict[str, float]:
        """Accuracy on the validation files, of the weights as they are now."""
        if self.rollout.version != self.global_step:  # an update that sync_every has put off
            self.sync_weights()
        with self._rollout_paused():
            return self.validator.run(self.global_step, self.timings)

    def save(self, row: dict[str, float]) -> Path:
        """Checkpoint of everything that the next step depends on; `row` are the metrics of this one."""
        contents = self.config.actor_rollout_ref.actor.checkpoint.save_contents
        state = {
            "step": self.global_step,
            "collector": self.collected_state,
            **{name: part.state_dict() for name, part in self.memory.items()},
            "nonfinite_in_a_row": self.nonfinite_in_a_row,
            "metrics": self._complete(row),
            "fingerprint": fingerprint(self.config),
        }

        def write(folder: Path) -> None:
            shutil.copytree(self.run_dir / "config", folder / "config")
            self.policy.onload()
            self.policy.save(folder / "actor")
            if "hf_model" in contents:
                self.policy.export_hf(folder / "hf_model", self.config.actor_rollout_ref.model.path)
            self.policy.offload()
            if self.critic is not None:
                self.critic.save(folder / "critic")
                if "hf_model" in self.config.critic.checkpoint.save_contents:
                    self.critic.export_hf(folder / "critic_hf_model", self.config.critic.model.path)

        with self._phase("checkpoint", "save_checkpoint"):
            keep = self.config.trainer.max_actor_ckpt_to_keep
            folder = checkpoint.save(self.run_dir, self.global_step, state, write, keep)
        self.validator.history.write()  # it names checkpoints, and some may have gone
        return folder

    def save_before_stopping(self) -> Path:
        """Where a run that cannot go on will be resumed: after its last complete step."""
        done = [path for step, path in checkpoint.checkpoints(self.run_dir) if step == self.global_step]
        return done[0] if done else self.save({})

    def close(self) -> None:
        self.source.close()
        self.rewards.close()
        self.cluster.shutdown()
        self.metrics.close()

    def _resume(self) -> None:
        if self.resume_from is None:
            return
        state = checkpoint.read_state(self.resume_from)
        with self._phase("restore", "restore"):
            self.policy.restore(self.resume_from / "actor")
            if self.critic is not None:
                self.critic.restore(self.resume_from / "critic")
        self.global_step = state["step"]
        self.collected_state = state["collector"]
        changed = self.config.data.allow_changed_files
        self.collector.load_state_dict(self.collected_state, allow_changed_files=changed)
        for name, part in self.memory.items():
            part.load_state_dict(state[name])
        self.nonfinite_in_a_row = state["nonfinite_in_a_row"]
        if self.global_step not in self.metrics.csv.steps:  # killed after the save, before the row was written
            self.metrics.write(state["metrics"])
        self.console.say(f"resumed from {self.resume_from}: next is step {self.global_step + 1}")

    def _check_finite(self, metrics: Metrics) -> None:
        """Stop after too many steps in a row without a finite gradient."""
        limits = self.config.trainer.nonfinite_grad
        skipped = metrics["actor/nonfinite_grad_steps"].value if "actor/nonfinite_grad_steps" in metrics else 0
        self.nonfinite_in_a_row = self.nonfinite_in_a_row + 1 if skipped else 0
        if not skipped:
            return
        text = (
            f"step {self.global_step + 1}: {skipped:.0f} optimizer steps had a gradient that is not finite and were "
            f"skipped ({self.nonfinite_in_a_row} training steps in a row)"
        )
        if limits.action == "raise" or self.nonfinite_in_a_row >= limits.max_consecutive:
            raise RuntimeError(
                f"{text}; expected finite gradients; lower actor.optim.lr or the clip range, or look at the samples; "
                f"the last checkpoints are in {self.run_dir}"
            )
        log.warning(text)

    def _phase(self, name: str, key: str, total: int | None = None) -> AbstractContextManager[Callable[[], None]]:
        return self.console.phase(name, self.timings, key, total)

    def _due(self, frequency: int) -> bool:
        """Every `frequency` steps and after the last one; never when it is not positive."""
        last = self.global_step == self.plan.total_steps
        return frequency > 0 and (last or self.global_step % frequency == 0)

    def _row(self, metrics: Metrics, num_tokens: int) -> dict[str, float]:
        values = {name: metric.value for name, metric in metrics.items()}
        memory = [*self.policy.group.call("memory_gb"), *self.rollout.group.call("memory_gb")]
        return values | step_performance(self.timings["timing_s/step"], num_tokens, len(self.policy.group), memory)

    def _complete(self, row: dict[str, float]) -> dict[str, float]:
        return {"training/global_step": self.global_step, "training/epoch": self.prompts.epoch} | row | self.timings

    def _report(self, row: dict[str, float]) -> None:
        self.console.step(self.metrics.write(self._complete(row)))

    def _dump(self, batch: TrainBatch, scored: list[Scored]) -> None:
        if self.config.trainer.rollout_data_dir:
            with self._phase("dump", "dump_rollout_generations"):
                path = Path(self.config.trainer.rollout_data_dir) / f"{self.global_step}.jsonl"
                write_jsonl(path, rollout_rows(batch, scored, self.global_step))

    def _summary(self) -> None:
        curve = self.metrics.plot()
        validation = self.metrics.csv.column("val_correct/all/mean")
        reward = self.metrics.csv.column("reward/mean")
        lines = [f"{len(reward)} training steps, model_engine={self.config.model_engine}"]
        if reward:
            lines.append(f"reward/mean            {reward[0][1]:.3f} -> {reward[-1][1]:.3f}")
        if validation:
            lines.append(f"val_correct/all/mean   {validation[0][1]:.3f} -> {validation[-1][1]:.3f}")
        lines += [f"metrics                {self.metrics.csv.path}", f"curve                  {curve}"]
        newest = checkpoint.checkpoints(self.run_dir)
        lines += [f"checkpoint             {newest[0][1]}"] if newest else []
        self.console.summary("done", lines)
