"""A run over two nodes of a Ray cluster (two node processes on this machine): ranks meet over the network address, and
weights travel by process-group broadcast, since shared memory ends at a machine."""

import os

import pytest
from ray.cluster_utils import Cluster

from tests.runs import Run, metrics, overrides, write_inputs

pytestmark = [pytest.mark.gloo, pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture
def two_nodes(monkeypatch):
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    cluster.add_node(num_cpus=1)
    cluster.wait_for_nodes()
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    yield cluster
    cluster.shutdown()


def test_a_run_on_two_nodes_learns(tmp_path, two_nodes):
    inputs = write_inputs(tmp_path)
    sizes = ("trainer.nnodes=2", "trainer.n_gpus_per_node=1", "trainer.total_training_steps=3", "trainer.save_freq=3")
    run = Run(overrides(inputs, tmp_path / "run", "fsdp", *sizes))
    status, output = run.wait()
    assert status == 0, output
    rows = metrics(tmp_path / "run")
    assert [row["training/global_step"] for row in rows] == ["0", "1", "2", "3"]
    for row in rows[1:]:
        assert float(row["training/rollout_probs_diff_max"]) < 1e-5
        assert float(row["perf/update_weights_gbps"]) > 0
    assert os.environ["RAY_ADDRESS"] == two_nodes.address
