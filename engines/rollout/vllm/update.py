"""New weights into a running vLLM model, in place, and the proof that every one of them arrived.

vLLM's own reload says what it loaded, but not enough: a fused target (qkv_proj, gate_up_proj, an expert's w13) that
got one of its parts counts as loaded and keeps uninitialised rows. So its three parts are called here one by one, and
between loading and finalising each module's counter of written elements is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info, is_deferred_attention_layer

from engines.rollout.vllm.platform import Platform

DERIVED = ("W_UV", "W_UK_T")  # computed from kv_b_proj, never sent


def update(model: nn.Module, model_config: Any, platform: Platform, stream: Iterable[tuple[str, Tensor]]) -> None:
    """Write a full set of Hugging Face tensors into the model.

    A tensor of `stream` need not outlive the next one: it is copied. ValueError names what was unknown, doubled,
    missing or written in part; nothing may be generated then until a full update has succeeded, which mends it.
    """
    expected = {name for name, _ in model.named_parameters()}
    platform.before_update(model)
    initialize_layerwise_reload(model)
    tied = model_config.hf_config.tie_word_embeddings
    incoming = _Incoming(stream, skip=("lm_head.weight",) if tied else ())
    problems: list[str] = []
    try:
        written = set(model.load_weights(incoming))
        problems += incomplete(model, written, expected, tied)
    except (KeyError, ValueError, AttributeError) as error:
        problems.append(f"{incoming.last} was refused by {type(model).__name__} ({type(error).__name__}: {error})")
        for _ in incoming:  # its producers may be collective
            pass
    finally:
        finalize_layerwise_reload(model, model_config)
    problems += [f"{name} came twice" for name in incoming.doubled]
    if problems:
        raise ValueError(
            f"got an update that does not fit the rollout model: {'; '.join(sorted(problems))}; expected every "
            "parameter exactly once; use the same config.json and override_config on both sides"
        )
    platform.after_update(model)


class _Incoming:
    """The stream as vLLM may have it: names seen once, tensors that stay as they are until their layer is complete."""

    def __init__(self, stream: Iterable[tuple[str, Tensor]], skip: tuple[str, ...]) -> None:
        self._stream, self._skip = iter(stream), skip
        self._seen: set[str] = set()
        self.doubled: list[str] = []
        self.last = "nothing"

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self._stream:
            self.last = name
            if name in self._seen:
                self.doubled.append(name)
                continue
            self._seen.add(name)
            if name not in self._skip:
                yield name, tensor.clone()


def incomplete(model: nn.Module, written: set[str], expected: set[str], tied: bool) -> list[str]:
    """What is missing, in words. Called after loading and before finalising.

    Complete modules were processed on the way and count nothing any more; attention layers own nothing that is sent.
    """
    found = [
        f"{name} is missing"
        for name in sorted(expected - written)
        if name.rpartition(".")[2] not in DERIVED and not (tied and name.startswith("lm_head"))
    ]
    for name, module in model.named_modules():
        info = get_layerwise_info(module)
        if not info.can_load() or is_deferred_attention_layer(module):
            continue
        total = info.load_numel_total
        if isinstance(module, VocabParallelEmbedding):  # its rows are padded; nobody sends those
            total = module.shard_indices.num_org_elements * module.embedding_dim
        if 0 < info.load_numel < total:
            found.append(f"{name} got {info.load_numel} of {total} elements")
    return found
