"""The Megatron-Core training engine: TP with sequence parallelism, PP, DP, on packed sequences."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor, nn

from bridge import Bridge, LoadReport, RopeRows, open_source
from engines.base import ForwardOptions, LossFn, TrainEngine
from engines.batch import Denominators, PolicyOutput, TrainBatch, ValueOutput
from engines.device import get_device
from engines.megatron import build, checkpoint, cpu, imports, optimizer, parallel  # noqa: F401
from engines.megatron.forward import MicroBatch, PackedInput, pack, run_chunk, score, score_values
from engines.megatron.layers.dsa.loss import set_token_weights
from engines.megatron.megatron_bridge import MegatronBridge, choose_bridge
from engines.megatron.offload import HostCopy
from engines.megatron.routing import Routing
from engines.metric import Metrics, merge, optimizer_metrics
from engines.microbatch import split
from engines.rng import seed_everything
from engines.routes import RoutePass, RouteShape
from engines.scores import empty_scores, put_back, put_back_values
from engines.spec import MegatronSpec, TrainEngineSpec
from engines.value_head import ValueSource

log = logging.getLogger(__name__)


class MegatronEngine(TrainEngine):
    """One rank of a Megatron-Core model. Global rank 0 hands out the weights."""

    def __init__(self, spec: TrainEngineSpec) -> None:
        assert isinstance(spec.backend, MegatronSpec), f"expected a MegatronSpec, got {type(spec.backend).__name__}"
        self.spec = spec
        self.backend: MegatronSpec = spec.backend
        self.hf = build.read_hf_config(spec.model)
        self._bridge_kind = choose_bridge(self.backend.bridge, self.hf)  # before anything is built
        if spec.device == "cpu":
            cpu.adapt()
        seed_everything(spec.seed)
        parallel.initialise(spec)
        self.dp_rank = parallel_state.get_data_parallel_rank()
        self.dp_size = parallel_state.get_data_parallel_world_size()
        self.is_output_rank = parallel.is_output_rank()
        self.is_weight_source = dist.get_rank() == 0
        self.config = build.transformer_config(self.hf, spec.model, self.backend, spec.device)
        with cpu.construction() if spec.device == "cpu" else contextlib.nullcontext():
            self._build()
        self._bridge = self._build_bridge()
        self.load_report: LoadReport | None = None
        self._host_copies = {"param": HostCopy(), "grad": HostCopy(keep=False), "optimizer": HostCopy()}

    def _build(self) -> None:
        """Bare chunks for names and weights, wrapped ones to run, and the optimizer if asked for."""
        self.models = self._build_models()
        if self.spec.optim is None:
            for model in self.models:
                model.requires_grad_(False)
            self.chunks: list[nn.Module] = list(self.models)
            self.optimizer = None
            return
        self.chunks = optimizer.wrap(self.config, self.models, self.backend)
        self.optimizer = optimizer.build_optimizer(self.chunks, self.spec.optim, self.backend)
        # Gradients are sums already: finalize must not divide them by a token count.
        self.config.finalize_model_grads_func = lambda chunks, num_tokens, **kwargs: finalize_model_grads(
            chunks, None, **kwargs
        )

    def _build_models(self) -> list[nn.Module]:
        return build.build_chunks(self.config, self.hf, self.backend)

    def _build_bridge(self) -> Bridge | MegatronBridge:
        if self._bridge_kind == "megatron_bridge":
            return MegatronBridge(self.spec.model, self.models, self.spec.device)
        stages = self.backend.virtual_pipeline_model_parallel_size
        layout = parallel.layout(self.backend)
        offsets = [
            get_transformer_layer_offset(self.config, vp_stage=stage) for stage in (range(stages) if stages else [None])
        ]
        return Bridge(
            self.hf,
            self.models,
            layout=layout,
            groups=parallel.groups(layout),
            layer_offsets=offsets,
            indexer_rows=self._indexer_rows(),
        )

    def _indexer_rows(self) -> RopeRows | None:
        """How the layers order the rows of an indexer's heads; None: as the file does."""
        return None

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        module = get_device(self.spec.device).module
        return torch.device("cpu") if module is None else torch.device(self.spec.device, module.current_device())

    def load(self, hf_path: str | Path) -> None:
        source = hf_path
        if self.spec.model.head == "value":
            source = ValueSource(open_source(hf_path), self.hf["hidden_size"], self.spec.seed, self.is_weight_source)
        self.load_report = self._bridge.load(source)
        self._tell_loading(hf_path)
        if self.optimizer is not None:
            # Otherwise the first step would bring back the main weights of the empty model.
            self.optimizer.reload_model_params()

    def _tell_loading(self, hf_path: str | Path) -> None:
        """What a user should know of it, once."""
        if self.load_report is None or not self.is_weight_source:
            return
        for reason, count in self.load_report.left_out.items():
            log.info("%s: %d tensors left out: %s", hf_path, count, reason)
        if self.load_report.rounding is not None:
            name, difference = self.load_report.rounding
            log.info("%s: weights rounded to the model's dtype, at most by %.3g (%s)", hf_path, difference, name)

    def log_probs(self, batch: TrainBatch, options: ForwardOptions) -> PolicyOutput:
        assert self.spec.model.head == "lm", "a value model has no log-probs: ask for its values"
        for chunk in self.chunks:
            chunk.eval()
        micro_batches = self._micro_batches(batch, options)

        def collect(inputs: PackedInput, logits_1PV: Tensor, non_loss_data: bool) -> PolicyOutput:
            return score(logits_1PV, inputs, options, self.hf["vocab_size"])

        routing = self._routing(micro_batches, options)
        with torch.no_grad():
            outputs = self._run(micro_batches, lambda micro: collect, routing, forward_only=True)
        scores = empty_scores(batch, options)
        for micro, output in zip(micro_batches, outputs, strict=False):  # outputs exist on the last stage only
            put_back(scores, batch, micro.rows, micro.batch, output)
        return replace(scores, routes=routing.recorded(batch) if options.record_routes else None)

    def values(self, batch: TrainBatch, options: ForwardOptions) -> Tensor:
        assert self.spec.model.head == "value", "a language model has no values: build it with head='value'"
        for chunk in self.chunks:
            chunk.eval()
        micro_batches = self._micro_batches(batch, options)

        def collect(inputs: PackedInput, values_1C1: Tensor, non_loss_data: bool) -> Tensor:
            return score_values(values_1C1, inputs).values

        with torch.no_grad():
            outputs = self._run(micro_batches, lambda micro: collect, None, forward_only=True)
        values_T = torch.zeros(batch.num_tokens)
        for micro, output_T in zip(micro_batches, outputs, strict=False):  # outputs exist on the last stage only
            put_back_values(values_T, batch, micro.rows, micro.batch, output_T)
        return values_T

    def update(
        self, batch: TrainBatch, loss: LossFn, denominators: Denominators, options: ForwardOptions, step: int
    ) -> Metrics:
        assert self.optimizer is not None, "this engine was built without an optimizer (reference model)"
        for chunk in self.chunks:
            chunk.train()
        optimizer.zero_grad(self.chunks, self.optimizer)
        micro_batches = self._micro_batches(batch, options)
        finite = torch.ones((), dtype=torch.bool, device=self.device)
        parts: list[Metrics] = []

        def evaluate(micro: MicroBatch, inputs: PackedInput, logits_1PV: Tensor) -> tuple[Tensor, Tensor, None]:
            if self.spec.model.head == "value":
                output: PolicyOutput | ValueOutput = score_values(logits_1PV, inputs)
            else:
                output = score(logits_1PV, inputs, options, self.hf["vocab_size"])
            value, metrics = loss(output, inputs.batch, denominators)
            finite.logical_and_(torch.isfinite(value.detach()))
            if micro.rows:
                parts.append(metrics)
            return value, torch.ones((), dtype=torch.int, device=value.device), None

        routing = self._routing(micro_batches, options)
        tokens = denominators.tokens if self._trains_indexer() else None
        self._run(micro_batches, lambda micro: partial(evaluate, micro), routing, forward_only=False, tokens=tokens)
        if options.replay_routes:
            parts.append(routing.metrics(self.dp_rank))
        lr = self.spec.optim.schedule.at(step)
        norm, applied = optimizer.step(self.optimizer, self.spec.optim, lr, finite)
        return merge(parts) | optimizer_metrics(self.spec.role, norm, lr, applied, self.dp_rank)

    def _micro_batches(self, batch: TrainBatch, options: ForwardOptions) -> list[MicroBatch]:
        """The same number on every DP rank; with virtual stages a multiple of the pipeline size, as the
        interleaved schedule demands."""
        parts = split(batch, options, parallel_state.get_data_parallel_group())
        if self.backend.virtual_pipeline_model_parallel_size:
            missing = -len(parts) % self.backend.pipeline_model_parallel_size
            parts += [([], batch.select([0]).masked()) for _ in range(missing)]
        return [MicroBatch(rows, part, part.tokens.pop("routes", None)) for rows, part in parts]

    def _routing(self, micro_batches: list[MicroBatch], options: ForwardOptions) -> Routing | None:
        """What controls the routers in this pass; None leaves them alone. ValueError for a dense model."""
        routes = RoutePass.of(options)
        if routes is None:
            return None
        return Routing(routes, self.models, RouteShape.of(self.hf), micro_batches, self.config.sequence_parallel)

    def _run(
        self,
        micro_batches: list[MicroBatch],
        on_logits: Callable[[MicroBatch], Callable],
        routing: Routing | None,
        forward_only: bool,
        tokens: float | None = None,
    ) -> list[Any]:
        """Drive the pipeline schedule. `on_logits(micro)` gives what is called with (packed input, logits) on
        the last stage; its results come back in the order of the micro-batches, and nothing elsewhere. `tokens`
        is the denominator of a trained indexer's own loss."""
        multiple = self.backend.tensor_model_parallel_size if self.config.sequence_parallel else 1

        def forward_step(work: Iterator[tuple[int, MicroBatch]], chunk: nn.Module) -> tuple[Tensor, Callable]:
            number, micro = next(work)
            inputs = self._pack(micro.batch, multiple)
            if routing is not None:
                routing.enter(number, inputs.cut)
            if tokens is not None:
                mask_T = inputs.batch.tokens["loss_mask"] / tokens
                set_token_weights(inputs.sequences, inputs.cut.local(mask_T))
            output = run_chunk(chunk, inputs)
            if routing is not None:
                routing.follow(number, output)
            return output, partial(on_logits(micro), inputs)

        with contextlib.nullcontext() if routing is None else routing.hooked():
            return get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=[iter(enumerate(micro_batches)) for _ in self.chunks],
                model=self.chunks,
                num_microbatches=len(micro_batches),
                seq_length=max(micro.batch.num_tokens for micro in micro_batches),  # a hint; shapes are exchanged
                micro_batch_size=1,
                forward_only=forward_only,
                collect_non_loss_data=forward_only,
            )

    def _trains_indexer(self) -> bool:
        options = self.config.attention_options.indexer
        return options is not None and options.loss_coeff > 0 and self.spec.device != "npu"

    def _pack(self, batch: TrainBatch, multiple: int) -> PackedInput:
        return pack(batch, multiple, self.device)

    def hf_weights(self) -> Iterator[tuple[str, Tensor]]:
        if parallel.holds_first_copy(parallel.layout(self.backend)):
            yield from self._bridge.hf_weights(source_only=True)

    def save(self, directory: Path) -> None:
        checkpoint.save(directory, self._layout(), self.models, self.optimizer, self.spec.device)

    def restore(self, directory: Path) -> None:
        checkpoint.restore(directory, self._layout(), self.models, self.optimizer, self.spec.device)

    def _layout(self) -> dict[str, Any]:
        return {
            "engine": "megatron",
            "ranks": dist.get_world_size(),
            **parallel.sizes(self.backend),
            "dtype": self.backend.dtype,
            "use_distributed_optimizer": self.backend.use_distributed_optimizer,
            "optimizer": self.optimizer is not None,
            "model_type": self.hf["model_type"],
            "parameters": sum(p.numel() for model in self.models for p in model.parameters()),
        }

    def offload(self) -> None:
        if self.backend.param_offload:
            self._host_copies["param"].offload(p for model in self.models for p in model.parameters())
        if self.optimizer is not None and self.backend.grad_offload:
            self._host_copies["grad"].offload(optimizer.grad_buffers(self.chunks))
        if self.optimizer is not None and self.backend.optimizer_offload:
            self._host_copies["optimizer"].offload(optimizer.state_tensors(self.optimizer, self.models))
        get_device(self.spec.device).empty_cache()

    def onload(self) -> None:
        for copy in self._host_copies.values():
            copy.onload()

    def close(self) -> None:
        self.models, self.chunks, self.optimizer, self._bridge = [], [], None, None
        parallel.release()
        get_device(self.spec.device).empty_cache()
