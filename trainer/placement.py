"""Who sits where: training ranks and rollout replicas on the devices of the cluster, up and connected.

Colocated roles share their devices and take turns; a rollout of its own runs beside the trainer, on its own pool of
`rollout.nnodes` x `rollout.n_gpus_per_node` devices.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from engines.device import get_device
from engines.spec import RolloutEngineSpec, TrainEngineSpec
from trainer.cluster import Cluster, Pool, WorkerGroup, wait
from trainer.rollout.group import RolloutGroup
from trainer.workers import RolloutWorker, SyncSpec, TrainWorker


@dataclass(frozen=True)
class Placement:
    """Processes and how they share the machine.

    train, replicas     training ranks, rollout replicas
    replica_devices     devices of one replica (tensor parallel)
    separate            the rollout has its own pool
    several_nodes       ranks reach each other over the network, not over the loopback
    """

    train: int
    replicas: int
    replica_devices: int
    separate: bool
    several_nodes: bool = False

    @property
    def bundles(self) -> int:
        """What the cluster must hold."""
        return self.train + (self.replicas * self.replica_devices if self.separate else 0)

    def threads(self) -> tuple[int, int]:
        """(per training rank, per replica): roles that take turns have all cores in their turn."""
        cores = len(os.sched_getaffinity(0))
        if self.separate:
            each = max(1, cores // (self.train + self.replicas))
            return each, each
        return max(1, cores // self.train), max(1, cores // self.replicas)


@dataclass(frozen=True)
class Roles:
    """What the processes are told."""

    actor: TrainEngineSpec
    reference: TrainEngineSpec | None
    critic: TrainEngineSpec | None
    rollout: RolloutEngineSpec
    sync: SyncSpec


def start_workers(cluster: Cluster, place: Placement, roles: Roles, idle_s: float) -> tuple[WorkerGroup, RolloutGroup]:
    """Both groups, ready to work; `idle_s` bounds the silence of a replica."""
    device = get_device(roles.actor.device)
    train_place = cluster.place(Pool(place.train, device.ray_resource))
    train_threads, rollout_threads = place.threads()
    train = cluster.spawn(
        "train",
        TrainWorker,
        train_place,
        [(rank, place.train, train_threads, roles.actor, roles.reference, roles.critic) for rank in range(place.train)],
        share=1.0 if place.separate else 0.5,
    )
    # A replica over several devices cannot sit in bundles of one: it is told which of the trainer's it may see.
    shown = not place.separate and place.replica_devices > 1 and device.visibility_variable is not None
    visible = train.call("visible_devices") if shown else []
    arguments = []
    for replica in range(place.replicas):
        own = visible[replica * place.replica_devices : (replica + 1) * place.replica_devices]
        devices = (device.visibility_variable, ",".join(own)) if shown else None
        arguments.append((replica, rollout_threads, roles.rollout, roles.sync, devices))
    rollout_place = (
        cluster.place(Pool(place.replicas, device.ray_resource, place.replica_devices))
        if place.separate
        else train_place
    )
    share = float(place.replica_devices) if place.separate else 0.0 if shown else 0.5
    # Bundles hold one device each where roles are colocated: a replica starts in the first of its own.
    stride = 1 if place.separate else place.replica_devices
    rollout = cluster.spawn("rollout", RolloutWorker, rollout_place, arguments, share, stride)
    rendezvous = train.only([0]).call("rendezvous", place.several_nodes)[0]
    _, receivers = wait(train.start("build", rendezvous), rollout.start("receivers"))
    address = next(each for each in train.call("open_sync", roles.sync) if each is not None)
    return train, RolloutGroup(rollout, address, receivers[0], idle_s)
