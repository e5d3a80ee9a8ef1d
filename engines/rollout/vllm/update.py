"""New weights into a running vLLM model, in place, and the proof that every one of them arrived.

vLLM's own reload says what it loaded, but not enough: a fused target (qkv_proj, gate_up_proj, an expert's w13) that
got one of its parts counts as loaded and keeps uninitialised rows. So its three parts are called here one by one, and
between loading and finalising each module's counter of written elements is read.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info, is_deferred_attention_layer

from engines.rollout.vllm.inventory import Delivery, Inventory
from engines.rollout.vllm.latent import DERIVED, check_derived
from engines.rollout.vllm.platform import Platform

# It warns at every update of modules that own nothing that is sent; what is missing is found below.
logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)
# What vLLM's loaders raise for a tensor that they cannot place.
REFUSALS = (KeyError, IndexError, ValueError, AttributeError, AssertionError, RuntimeError)


def update(
    model: nn.Module, model_config: Any, platform: Platform, inventory: Inventory, stream: Iterable[tuple[str, Tensor]]
) -> None:
    """Write a full set of Hugging Face tensors into the model.

    A tensor of `stream` need not outlive the next one. ValueError names what was unknown, doubled, missing, of another
    shape or written in part; what the stream itself raises passes through. Nothing may be generated then until a full
    update has succeeded, which mends everything.
    """
    expected = {name for name, _ in model.named_parameters()}
    platform.before_update(model)
    initialize_layerwise_reload(model)
    delivery = Delivery(inventory, stream)
    problems: list[str] = []
    try:
        written = set(model.load_weights(iter(delivery)))
        problems = incomplete(model, written, expected, bool(inventory.ties))
    except REFUSALS as error:
        if delivery.broken:
            raise
        problems = [f"{delivery.last} was refused by {type(model).__name__} ({type(error).__name__}: {error})"]
        delivery.drain()
    finally:
        finalize_layerwise_reload(model, model_config)
    delivery.check("the update of the vLLM model")
    if problems:
        raise ValueError(
            f"got a vLLM model in which {'; '.join(problems)}; expected every element to be written: the names sent "
            "are those of config.json, so vLLM keeps this model in a form that is not known here; set rollout.name=hf"
        )
    platform.after_update(model)
    check_derived(model, delivery.kept)


def incomplete(model: nn.Module, written: set[str], expected: set[str], tied: bool) -> list[str]:
    """What was not written, in words. Called after loading and before finalising.

    Complete modules were processed on the way and count nothing any more; attention layers own nothing that is sent.
    """
    found = [
        f"{name} was not written"
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
