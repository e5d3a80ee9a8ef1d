"""One rank of the Ascend engine on the real MindSpeed, in a process of its own; see test_mindspeed_real.py.

python -m tests.engines.mindspeed_run MODEL STORE RANK WORLD RESULT unpacked|packed
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist

from tests.engines import fake_npu

SEQUENCES = [[5, 6, 7, 8, 9, 129, 12], [0, 100, 129, 4], list(range(20, 39))]
FLAGS = {
    "unpacked": {},
    "packed": {
        "use_fused_lightning_indexer": True,
        "use_fused_sparse_flash_attention": True,
        "use_fused_lightning_indexer_kl_loss": True,
        "optimizer_selection": "fused_torch_adamw",
    },
}


STEPS = 2
KEY_EPS = 1.000001e-6  # the layers have 1e-6: close enough for equal numbers, and told apart


def loss(output, batch, denominators):
    """Mean of -log p; first tokens have log p = 0."""
    from engines.metric import Metric

    value = -output.log_probs.sum() / denominators.tokens
    return value, {"loss": Metric("partial", value.item())}


def learn(engine) -> list[dict[str, float]]:
    """Loss and gradient norm of STEPS updates."""
    from engines.base import ForwardOptions
    from engines.batch import Denominators, TrainBatch

    batch, sizes = TrainBatch.pack(SEQUENCES), Denominators(float(sum(map(len, SEQUENCES))), float(len(SEQUENCES)))
    options = ForwardOptions(max_tokens=64)
    return [
        {key: metric.value for key, metric in engine.update(batch, loss, sizes, options, step).items()}
        for step in range(STEPS)
    ]


def optimizer_spec():
    from engines.spec import LrSchedule, OptimSpec

    return OptimSpec(LrSchedule(1e-3), weight_decay=0.1)


def run(model: str, rank: int, world: int, path: str) -> dict[str, Any]:
    from engines import TRAIN_ENGINES
    from engines.base import ForwardOptions
    from engines.batch import TrainBatch
    from engines.spec import MegatronSpec, ModelSpec, TrainEngineSpec

    optim = optimizer_spec() if path == "packed" else None
    backend = MegatronSpec(
        dtype="float32", tensor_model_parallel_size=world, indexer_k_norm_eps=KEY_EPS, mindspeed=FLAGS[path]
    )
    module, name = TRAIN_ENGINES["megatron", "npu"].split(":")
    early = [name for name in sys.modules if name.split(".")[0] in ("megatron", "mindspeed")]
    engine = getattr(import_module(module), name)(TrainEngineSpec("megatron", "cpu", ModelSpec(model), backend, optim))
    live = engine.models[0]
    result = {
        "early": early,
        "attention": type(live.decoder.layers[1].self_attention).__name__,
        "shapes": {name: tuple(p.shape) for name, p in live.named_parameters()},
        "split": {name: vars(p).get("tensor_model_parallel", False) for name, p in live.named_parameters()},
        "key_norm": vars(live.decoder.layers[1].self_attention.core_attention.indexer.k_norm)["eps"],
        "trained": {name for name, p in live.named_parameters() if p.requires_grad},
    }
    engine.load(model)
    if path == "unpacked":
        ids = torch.tensor([SEQUENCES[2]])
        with torch.no_grad():
            result["logits"] = live(ids, torch.arange(ids.shape[1])[None], None)[0]
        result["export"] = {name: tensor.clone() for name, tensor in engine.hf_weights()}
        return result
    result["log_probs"] = engine.log_probs(TrainBatch.pack(SEQUENCES), ForwardOptions(max_tokens=64)).log_probs
    result["steps"] = learn(engine)
    result["export"] = {name: tensor.clone() for name, tensor in engine.hf_weights()}
    return result


def main() -> None:
    model, store, rank, world, result, path = sys.argv[1:]
    fake_npu.install()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, int(world)), rank=int(rank), world_size=int(world))
    torch.save(run(model, int(rank), int(world), path) | {"argv": sys.argv[1:]}, result)


if __name__ == "__main__":
    main()
