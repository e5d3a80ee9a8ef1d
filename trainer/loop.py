"""The loop: six rooms in order.

1 prompts -> 2 rollout -> 3 reward -> 4 advantage -> 5 update -> 6 weight sync
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from engines.base import ForwardOptions, Prompt, SamplingParams
from engines.batch import TrainBatch
from engines.metric import Metric, Metrics
from trainer import checkpoint, cluster
from trainer.advantage import AdvantageOptions, compute_advantages
from trainer.advantage_input import AdvantageInput
from trainer.batching import build_batch, mini_batches
from trainer.cluster import Cluster
from trainer.config import Config, fingerprint
from trainer.consistency import ConsistencyMonitor, probability_difference
from trainer.console import Console
from trainer.dumps import rollout_rows, write_jsonl
from trainer.loss import PolicyLoss
from trainer.metrics import MetricLog
from trainer.policy import Policy
from trainer.prompts import PromptEncoder, PromptItem, PromptSource
from trainer.reward import RewardManager
from trainer.rollout import RolloutGroup
from trainer.routing import RouteOptions, Routes, check_routes
from trainer.scored import Scored
from trainer.step_metrics import response_metrics, step_performance
from trainer.validation import ValRecord, sample_table, summarise, write_samples

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Plan:
    """Everything the loop does that the configuration decides, translated once."""

    total_steps: int
    sampling: SamplingParams
    val_sampling: SamplingParams
    score: ForwardOptions
    score_reference: ForwardOptions | None
    update: ForwardOptions
    advantage: AdvantageOptions
    loss: PolicyLoss
    routes: RouteOptions | None = None


@dataclass(frozen=True)
class Rooms:
    """What the loop runs through: data, workers and instruments."""

    prompts: PromptSource
    val_prompts: PromptSource
    encoder: PromptEncoder
    rewards: RewardManager
    cluster: Cluster
    policy: Policy
    rollout: RolloutGroup
    monitor: ConsistencyMonitor
    console: Console
    metrics: MetricLog


class Trainer:
    """Runs the rooms. Built by trainer/build.py; `resume_from` is a complete checkpoint or None."""

    def __init__(self, config: Config, plan: Plan, rooms: Rooms, run_dir: Path, resume_from: Path | None) -> None:
        self.config, self.plan, self.run_dir, self.resume_from = config, plan, run_dir, resume_from
        self.prompts, self.encoder, self.rewards = rooms.prompts, rooms.encoder, rooms.rewards
        self.policy, self.rollout, self.cluster = rooms.policy, rooms.rollout, rooms.cluster
        self.monitor, self.console, self.metrics = rooms.monitor, rooms.console, rooms.metrics
        self.val_prompts = rooms.val_prompts
        self.global_step = 0
        self.nonfinite_in_a_row = 0
        self.timings: dict[str, float] = {}

    # --- the loop ---------------------------------------------------------------------------------------------

    def fit(self) -> None:
        settings = self.config.trainer
        self._resume()
        self.sync_weights()
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
            items = self.prompts.next_batch()  # 1 prompts
            scored = self.generate_and_score(items)  # 2 rollout, 3 reward: scoring runs while others still decode
            scored, routes = self.take_routes(scored)
            with self._training_turn():
                batch, metrics = self.score_log_probs(scored, routes)
                metrics |= self.compute_advantages(batch, scored)  # 4 advantage
                metrics |= self.update_policy(batch, len(items))  # 5 update
            self.global_step += 1
            self.sync_weights()  # 6 weight sync
        self._dump(batch, scored)
        return self._row(metrics | response_metrics(scored), batch.num_tokens) | self.rewards.take_metrics()

    # --- the rooms --------------------------------------------------------------------------------------------

    def generate_and_score(self, items: list[PromptItem], validation: bool = False) -> list[Scored]:
        """All samples of the prompts in prompt order, each with its reward."""
        sampling = self.plan.val_sampling if validation else self.plan.sampling
        by_uid = {item.uid: item for item in items}
        pending = {}
        prompts = [Prompt(item.uid, item.token_ids) for item in items]
        name = "validation" if validation else "rollout"
        with self._phase(name, "testing" if validation else "gen", len(items) * sampling.n) as advance:
            for sample in self.rollout.generate(prompts, sampling, self.global_step):
                text, item = self.encoder.decode(sample.response_ids), by_uid[sample.uid]
                future = self.rewards.submit(
                    text, item.row, response_length=len(sample.response_ids), think_open=item.think_open
                )
                pending[sample.uid, sample.index] = (sample, text, future)
                advance()
        with self._phase("reward", "testing" if validation else "reward"):
            scored = [
                Scored(item, sample, text, future.result())
                for item in items
                for sample, text, future in (pending[item.uid, index] for index in range(sampling.n))
            ]
        self._check_failed(scored)
        return scored

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
        with self._phase("old log-probs", "old_log_prob"):
            metrics = self.policy.score(batch, self.plan.score, self.plan.score_reference)
        difference: Metrics = {}
        if self.config.actor_rollout_ref.rollout.calculate_log_probs:
            difference = probability_difference(
                batch.tokens["old_log_probs"], batch.tokens["rollout_log_probs"], batch.tokens["response_mask"]
            )
        for warning in self.monitor.check(self.global_step + 1, difference):
            log.warning(warning)
        entropy_T = batch.tokens.pop("entropy")[batch.tokens["response_mask"].bool()]
        entropy = {"actor/entropy": Metric("mean", float(entropy_T.double().sum()), entropy_T.numel())}
        return batch, metrics | difference | entropy | (routes.metrics if routes is not None else {})

    def compute_advantages(self, batch: TrainBatch, scored: list[Scored]) -> Metrics:
        with self._phase("advantages", "adv"):
            scores = [each.result.score if each.counts else None for each in scored]
            samples = AdvantageInput.from_batch(batch, scores, [each.item.uid for each in scored])
            result = compute_advantages(self.config.algorithm.adv_estimator, samples, self.plan.advantage)
            batch.tokens["advantages"] = result.advantages_T
        return result.metrics

    def update_policy(self, batch: TrainBatch, num_prompts: int) -> Metrics:
        """ppo_epochs passes over the mini-batches, one optimizer step each."""
        actor = self.config.actor_rollout_ref.actor
        rows = []
        for epoch in range(actor.ppo_epochs):
            seed = actor.data_loader_seed + self.global_step * actor.ppo_epochs + epoch if actor.shuffle else None
            rows += mini_batches(num_prompts, self.plan.sampling.n, actor.ppo_mini_batch_size, seed)
        with self._phase("update", "update_actor"):
            metrics = self.policy.update(batch, rows, self.plan.loss, self.plan.update, self.global_step)
        metrics["mask/final_mask_sum_eq_0"] = Metric("last", float(not batch.tokens["loss_mask"].any()))
        metrics.pop("actor/entropy", None)  # the pass before the updates has measured it on all tokens
        self._check_finite(metrics)
        return metrics

    def sync_weights(self) -> None:
        """Training ranks -> rollout replicas; both ends verify and stamp version `global_step`."""
        with self._phase("weight sync", "update_weights"):
            push = self.policy.group.start("push_weights", self.global_step)
            pull = self.rollout.group.start("pull_weights", self.rollout.address, self.global_step)
            cluster.wait(push, pull)
            self.policy.offload()

    @contextmanager
    def _training_turn(self) -> Iterator[None]:
        """Colocated roles take turns on the devices: the rollout frees its caches, the trainer comes back from
        the host (where the configuration sent it). After the next sync it leaves again."""
        self.rollout.sleep()
        self.policy.onload()
        yield
        self.rollout.wake()

    # --- around the loop --------------------------------------------------------------------------------------

    def validate(self) -> dict[str, float]:
        """Accuracy on the validation files with their own sampling (greedy unless val_kwargs say otherwise)."""
        records: list[ValRecord] = []
        for items in self.val_prompts.validation_batches(self.config.data.val_batch_size or len(self.val_prompts)):
            records += [val_record(each) for each in self.generate_and_score(items, validation=True)]
        if self.config.trainer.validation_data_dir:
            write_samples(Path(self.config.trainer.validation_data_dir) / f"val_{self.global_step}.jsonl", records)
        if self.config.trainer.log_val_generations > 0:
            columns, rows = sample_table(records, self.config.trainer.log_val_generations)
            self.console.samples(f"validation samples at step {self.global_step}", columns, rows)
        scoring = {f"val-{name}": value for name, value in self.rewards.take_metrics().items()}
        return summarise(records) | scoring

    def save(self, row: dict[str, float]) -> Path:
        """Checkpoint of everything that the next step depends on; `row` are the metrics of this one."""
        contents = self.config.actor_rollout_ref.actor.checkpoint.save_contents
        state = {
            "step": self.global_step,
            "cursor": self.prompts.state_dict(),
            "monitor": self.monitor.state_dict(),
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

        with self._phase("checkpoint", "save_checkpoint"):
            keep = self.config.trainer.max_actor_ckpt_to_keep
            return checkpoint.save(self.run_dir, self.global_step, state, write, keep)

    def close(self) -> None:
        self.rewards.close()
        self.cluster.shutdown()
        self.metrics.close()

    def _resume(self) -> None:
        if self.resume_from is None:
            return
        state = checkpoint.read_state(self.resume_from)
        with self._phase("restore", "restore"):
            self.policy.restore(self.resume_from / "actor")
        self.global_step = state["step"]
        self.prompts.load_state_dict(state["cursor"], allow_changed_files=self.config.data.allow_changed_files)
        self.monitor.load_state_dict(state["monitor"])
        self.nonfinite_in_a_row = state["nonfinite_in_a_row"]
        if self.global_step not in self.metrics.csv.steps:  # killed after the save, before the row was written
            self.metrics.write(state["metrics"])
        self.console.say(f"resumed from {self.resume_from}: next is step {self.global_step + 1}")

    def _check_failed(self, scored: list[Scored]) -> None:
        """A few answers that cannot be scored are left out; many mean that scoring is broken."""
        failed = [each for each in scored if each.result.failed]
        limit = self.config.reward.max_failed_frac
        if len(failed) > limit * len(scored):
            last = failed[-1]
            raise RuntimeError(
                f"got {len(failed)} of {len(scored)} answers that could not be scored; expected at most "
                f"reward.max_failed_frac={limit:g}; the last one, {last.item.uid}: {last.result.reason} "
                f"{dict(last.result.extra)}; mend the scorer or raise the limit"
            )

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


def val_record(scored: Scored) -> ValRecord:
    sample, result, row = scored.sample, scored.result, scored.item.row
    return ValRecord(
        uid=scored.item.uid,
        tag=row.tag,
        id=row.id,
        index=sample.index,
        prompt=row.messages[-1].content,
        answer=scored.text,
        pred=result.pred,
        gold=row.ground_truth,
        acc=result.acc,
        score=result.score,
        reason=result.reason,
        length=len(sample.response_ids),
        finish_reason=sample.finish_reason,
        failed=result.failed,
    )
