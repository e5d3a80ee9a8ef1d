"""Room 6, weight sync: training ranks -> rollout replicas, stamped with a version that both ends agree on.

On shared devices the two sides take turns: the rollout's weights come back, are overwritten, the trainer leaves for the
host (where the configuration sends it), and only then the rollout gets the memory for its cache.
"""

from __future__ import annotations

from collections.abc import Sequence

from engines.transport import Sent
from trainer import cluster
from trainer.cluster import WorkerFailed
from trainer.rollout.group import RolloutGroup
from trainer.update.policy import Policy

ATTEMPTS = 3  # updates that may lose replicas in a row


class WeightSync:
    def __init__(self, policy: Policy, rollout: RolloutGroup) -> None:
        self.policy, self.rollout = policy, rollout

    def update(self, version: int) -> Sent:
        """Every replica holds the policy's present weights, called `version`; returns what one of them received."""
        self.rollout.each("wake", "weights")
        sent = self.send(self.rollout.group.indices, version)
        self.policy.offload()
        self.rollout.each("wake", "cache")
        return sent

    def restore(self, replicas: Sequence[int], version: int) -> None:
        """The same to replicas that came up in the middle of a step."""
        self.policy.onload()
        self.send(replicas, version)
        self.policy.offload()

    def send(self, replicas: Sequence[int], version: int) -> Sent:
        """Whoever dies on the way is replaced and served again, a few times."""
        for _ in range(ATTEMPTS):
            group = self.rollout.group.only(replicas)
            push = self.policy.group.start("push_weights", version, len(replicas) * self.rollout.receivers)
            pull = group.start("pull_weights", self.rollout.address, version)
            try:
                sent, _ = cluster.wait(push, pull)
                self.rollout.hold(replicas, version)
                return next(each for each in sent if each is not None)
            except WorkerFailed as failure:
                self.rollout.replace_dead(failure)
                held = dict(zip(replicas, self.rollout.group.only(replicas).call("weight_version"), strict=True))
                self.rollout.hold([index for index in replicas if held[index] == version], version)
                replicas = [index for index in replicas if held[index] != version]
        raise RuntimeError(f"got {ATTEMPTS} failed weight updates in a row; expected one that reaches every replica")
