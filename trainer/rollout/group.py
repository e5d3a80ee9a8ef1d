"""Room 2, rollout: prompts out to the replicas, samples back as they finish.

A replica that dies or falls silent costs time, not the step: a fresh one takes its place, gets the current weights and
answers the prompts that were still open. What the lost one had finished is kept.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from engines.base import Prompt, Sample, SamplingParams
from engines.transport import Address
from trainer.cluster import Lost, WorkerFailed, WorkerGroup

log = logging.getLogger(__name__)

# Losses in one round of generation, per replica: more means that replacing does not help.
MAX_LOSSES = 2


class RolloutGroup:
    """The rollout replicas seen as one engine.

    address    where they fetch weights
    receivers  processes of one replica that fetch them
    idle_s     how long a replica may go without finishing a sample
    restore    gives the named replicas the trainer's present weights, and `hold`s them; the loop sets it
    """

    def __init__(self, group: WorkerGroup, address: Address, receivers: int, idle_s: float) -> None:
        self.group, self.address, self.receivers, self._idle_s = group, address, receivers, idle_s
        self.restore: Callable[[Sequence[int]], None] | None = None
        self.losses = 0  # replicas replaced so far
        self._held = dict.fromkeys(group.indices, -1)  # weight version of each replica

    @property
    def version(self) -> int:
        """Of the oldest weights that a replica holds."""
        return min(self._held.values())

    def hold(self, replicas: Sequence[int], version: int) -> None:
        """Note that these replicas hold weights `version`."""
        self._held.update(dict.fromkeys(replicas, version))

    def generate(self, prompts: list[Prompt], sampling: SamplingParams) -> Iterator[Sample]:
        """n samples per prompt in order of completion. A sample made with other weights than its replica was asked
        for is an error: training on it would silently be off-policy."""
        self._restore_blank()
        streams, shares = self.group.streams("generate", self._idle_s), self._shares(prompts)
        for index, share in shares.items():
            streams.open(index, share, sampling, self._held[index])
        missing = {(prompt.uid, number) for prompt in prompts for number in range(sampling.n)}
        losses = 0
        for index, item in streams:
            if isinstance(item, Lost):
                losses += 1
                if losses > MAX_LOSSES * len(self.group):
                    raise WorkerFailed(f"{losses} rollout replicas were lost in one round; the last: {item.why}")
                self._replace(index, item)
                self._restore_blank()
                unfinished = {uid for uid, _ in missing}
                shares[index] = [prompt for prompt in shares[index] if prompt.uid in unfinished]
                streams.open(index, shares[index], sampling, self._held[index])
                continue
            self._check(item, self._held[index])
            if (item.uid, item.index) in missing:  # else it was finished before its replica was lost, and made again
                missing.remove((item.uid, item.index))
                yield item
        if missing:
            raise RuntimeError(
                f"got no sample {sorted(missing)[:3]}, {len(missing)} missing in all; expected n={sampling.n} for each "
                f"of {len(prompts)} prompts"
            )

    def _shares(self, prompts: list[Prompt]) -> dict[int, list[Prompt]]:
        return {index: prompts[number :: len(self.group)] for number, index in enumerate(self.group.indices)}

    def _check(self, sample: Sample, version: int) -> None:
        if sample.weight_version != version:
            raise RuntimeError(
                f"got sample {sample.uid}/{sample.index} from weight version {sample.weight_version}; "
                f"expected version {version}: the rollout answered with stale weights"
            )

    def _replace(self, index: int, lost: Lost) -> None:
        log.warning("%s; a fresh replica takes its place", lost.why)
        self.losses += 1
        self.group.respawn(index)
        self._held[index] = -1

    def _restore_blank(self) -> None:
        """Give fresh replicas their weights."""
        blank = [index for index, version in self._held.items() if version < 0]
        if blank:
            assert self.restore is not None, "nobody can give a fresh replica its weights"
            self.restore(blank)

    def each(self, method: str, *args: Any) -> None:
        """Call all replicas. Whoever is found dead is replaced; the fresh one is awake and gets weights in time."""
        try:
            self.group.call(method, *args)
        except WorkerFailed as failure:
            self.replace_dead(failure)

    def replace_dead(self, failure: WorkerFailed) -> None:
        """Replace the replicas that the failure found dead; any other failure is raised again."""
        dead = [index for name, index in failure.dead if name == self.group.name]
        if not dead or len(dead) < len(failure.dead):
            raise failure
        for index in dead:
            self._replace(index, Lost(f"{self.group.name} {index} died"))
