"""Room 2, rollout: prompts out to the replicas, samples back as they finish, each checked for its version."""

from __future__ import annotations

from collections.abc import Iterator

from engines.base import Prompt, Sample, SamplingParams
from engines.transport.shm import Address
from trainer.cluster import WorkerGroup


class RolloutGroup:
    """The rollout replicas seen as one engine. `address` is where they fetch weights."""

    def __init__(self, group: WorkerGroup, address: Address) -> None:
        self.group = group
        self.address = address

    def generate(self, prompts: list[Prompt], sampling: SamplingParams, version: int) -> Iterator[Sample]:
        """n samples per prompt in order of completion. A sample made with other weights than `version` is an
        error: training on it would silently be off-policy."""
        replicas = len(self.group)
        shares = [(prompts[replica::replicas], sampling, version) for replica in range(replicas)]
        expected = sampling.n * len(prompts)
        received = 0
        for sample in self.group.stream("generate", shares):
            if sample.weight_version != version:
                raise RuntimeError(
                    f"got sample {sample.uid}/{sample.index} from weight version {sample.weight_version}; "
                    f"expected version {version}: the rollout answered with stale weights"
                )
            received += 1
            yield sample
        if received != expected:
            raise RuntimeError(f"got {received} samples; expected {len(prompts)} prompts x n={sampling.n} = {expected}")

    def sleep(self) -> None:
        self.group.call("sleep")

    def wake(self) -> None:
        self.group.call("wake")
