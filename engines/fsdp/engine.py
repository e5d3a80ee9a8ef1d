"""The FSDP2 training engine: a transformers model, sharded, on packed sequences. cpu, cuda and npu."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from bridge import open_source
from engines.base import ForwardOptions, LossFn, TrainEngine
from engines.batch import Denominators, PolicyOutput, TrainBatch, ValueOutput
from engines.device import get_device
from engines.fsdp.checkpoint import restore_shard, save_shard, shard_file
from engines.fsdp.fused import use_fused_operators
from engines.fsdp.optimizer import ShardedAdamW
from engines.fsdp.shard import build_mesh, frees_after_forward, reshard, shard
from engines.fsdp.weights import full_tensors, load_shards
from engines.hf_model import build_on_meta, dtype_of, materialize, packed_log_probs, packed_values
from engines.hf_routing import Routing
from engines.metric import Metrics, merge, optimizer_metrics
from engines.microbatch import split
from engines.rng import seed_everything
from engines.routes import RoutePass
from engines.scores import empty_scores, put_back, put_back_values
from engines.spec import FsdpSpec, TrainEngineSpec
from engines.value_head import ValueSource


class FsdpEngine(TrainEngine):
    """Every rank is a data-parallel rank; global rank 0 hands out the weights."""

    def __init__(self, spec: TrainEngineSpec) -> None:
        assert isinstance(spec.backend, FsdpSpec), f"FsdpEngine needs an FsdpSpec, got {type(spec.backend).__name__}"
        self.spec = spec
        self.backend: FsdpSpec = spec.backend
        self.compute_dtype = dtype_of(self.backend.param_dtype, "mixed_precision.param_dtype")
        if self.compute_dtype == torch.float16:
            raise ValueError(
                "got param_dtype=float16; expected bfloat16 or float32 (there is no loss scaling in this engine); "
                "set fsdp_config.dtype=bfloat16"
            )
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.dp_rank, self.dp_size = self.rank, self.world
        self.is_output_rank, self.is_weight_source = True, self.rank == 0
        seed_everything(spec.seed)
        self.mesh = build_mesh(spec.device, self.backend.fsdp_size)
        self.model = build_on_meta(spec.model, dtype_of(self.backend.model_dtype, "model_dtype"))
        if spec.model.gradient_checkpointing:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
        if get_device(spec.device).operators is not None:
            use_fused_operators(self.model, get_device(spec.device).operators)
        shard(self.model, self.mesh, self.backend)
        materialize(self.model, "cpu" if self.backend.offload_policy else self.device)
        for buffer in self.model.buffers():  # FSDP offloads parameters only
            buffer.data = buffer.to(self.device)
        self.optimizer = ShardedAdamW(self.model, spec.optim, self._shard_group) if spec.optim else None

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        module = get_device(self.spec.device).module
        return torch.device("cpu") if module is None else torch.device(self.spec.device, module.current_device())

    @property
    def _shard_group(self) -> dist.ProcessGroup:
        return self.mesh["shard"].get_group()

    def load(self, hf_path: str | Path) -> None:
        source = open_source(hf_path)
        if self.spec.model.head == "value":
            hidden_size = self.model.get_output_embeddings().in_features
            source = ValueSource(source, hidden_size, self.spec.seed, tell=self.is_weight_source)
        load_shards(self.model, source, self.mesh["shard"].get_local_rank(), self.mesh["shard"].size())

    def log_probs(self, batch: TrainBatch, options: ForwardOptions) -> PolicyOutput:
        assert self.spec.model.head == "lm", "a value model has no log-probs: ask for its values"
        self.model.eval()
        scores = empty_scores(batch, options)
        routing = self._routing(options)
        with torch.no_grad(), nullcontext() if routing is None else routing.hooked():
            for rows, part in split(batch, options, dist.group.WORLD):
                if routing is not None:
                    routing.enter(rows, part, self.device)
                put_back(scores, batch, rows, part, self._forward(part, options))
        reshard(self.model)
        return replace(scores, routes=routing.recorded(batch) if options.record_routes else None)

    def values(self, batch: TrainBatch, options: ForwardOptions) -> Tensor:
        assert self.spec.model.head == "value", "a language model has no values: build it with head='value'"
        self.model.eval()
        values_T = torch.zeros(batch.num_tokens)
        with torch.no_grad():
            for rows, part in split(batch, options, dist.group.WORLD):
                put_back_values(values_T, batch, rows, part, self._forward(part, options).values)
        reshard(self.model)
        return values_T

    def update(
        self, batch: TrainBatch, loss: LossFn, denominators: Denominators, options: ForwardOptions, step: int
    ) -> Metrics:
        assert self.optimizer is not None, "this engine was built without an optimizer (reference model)"
        self.model.train()
        finite = torch.ones((), dtype=torch.bool, device=self.device)
        parts: list[Metrics] = []
        micro_batches = split(batch, options, dist.group.WORLD)
        routing = self._routing(options)
        with nullcontext() if routing is None else routing.hooked():
            for number, (rows, part) in enumerate(micro_batches):
                self._keep_gathered(number < len(micro_batches) - 1)
                if routing is not None:
                    routing.enter(rows, part, self.device)
                output = self._forward(part, options)
                value, metrics = loss(output, part.to(self.device), denominators)
                finite &= torch.isfinite(value.detach())
                value.backward()
                if rows:
                    parts.append(metrics)
        if options.replay_routes:
            parts.append(routing.metrics())
        lr = self.spec.optim.schedule.at(step)
        norm, applied = self.optimizer.step(lr, finite)
        return merge(parts) | optimizer_metrics(self.spec.role, norm, lr, applied, self.dp_rank)

    def _routing(self, options: ForwardOptions) -> Routing | None:
        """What controls the routers in this pass; None leaves them alone. ValueError for a dense model."""
        routes = RoutePass.of(options)
        return None if routes is None else Routing(routes, self.model)

    def _keep_gathered(self, more: bool) -> None:
        """Weights that are not dropped after forward also stay gathered between micro-batches.

        Gradients are always reduced per micro-batch: their memory stays that of one shard.
        """
        if not frees_after_forward(self.mesh, self.backend):
            self.model.set_reshard_after_backward(not more)
        self.model.set_is_last_backward(not more)

    def _forward(self, batch: TrainBatch, options: ForwardOptions) -> PolicyOutput | ValueOutput:
        """Log-probs (and entropy), or values, of one packed micro-batch, on the compute device."""
        if self.spec.model.head == "value":
            return ValueOutput(packed_values(self.model, batch, self.device))
        wanted = options.entropy or options.entropy_grad
        output = packed_log_probs(
            self.model, batch, self.device, options.temperature, entropy=wanted, squares=options.sum_pi_squared
        )
        if output.entropy is not None and not options.entropy_grad:
            output = replace(output, entropy=output.entropy.detach())
        return output

    def hf_weights(self) -> Iterator[tuple[str, Tensor]]:
        return full_tensors(self.model, self.compute_dtype, self._shard_group, emit=self.is_weight_source)

    def save(self, directory: Path) -> None:
        path = shard_file(Path(directory), self.rank, self.world)
        save_shard(path, self.model, self.optimizer, self._layout(), self.spec.device)

    def restore(self, directory: Path) -> None:
        path = shard_file(Path(directory), self.rank, self.world)
        restore_shard(path, self.model, self.optimizer, self._layout(), self.spec.device)

    def _layout(self) -> dict:
        return {
            "engine": "fsdp",
            "ranks": self.world,
            "fsdp_size": self.mesh["shard"].size(),
            "model_dtype": self.backend.model_dtype,
            "model_type": self.model.config.model_type,
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "optimizer": self.optimizer is not None,
        }

    def offload(self) -> None:
        if self.spec.device == "cpu" or self.backend.offload_policy:
            return
        if self.backend.param_offload:
            self.model.to("cpu")
        if self.backend.optimizer_offload and self.optimizer is not None:
            self.optimizer.move_state("cpu")
        get_device(self.spec.device).synchronize()
        get_device(self.spec.device).empty_cache()

    def onload(self) -> None:
        if self.spec.device == "cpu" or self.backend.offload_policy:
            return
        if self.backend.param_offload:
            self.model.to(self.device)
        if self.backend.optimizer_offload and self.optimizer is not None:
            self.optimizer.move_state(self.device)

    def close(self) -> None:
        self.model = self.optimizer = None
        get_device(self.spec.device).empty_cache()
