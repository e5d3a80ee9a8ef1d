"""The live side: which tensors of the Megatron-Core model chunks on this rank travel, under global names."""

from __future__ import annotations

import re
from collections.abc import Iterator

from torch import Tensor, nn

from bridge.rules import Live

LAYER = re.compile(r"(?<=decoder\.layers\.)\d+")
TRAVELS = "router.expert_bias"  # the one buffer that is part of the model; caches and token counts stay
STACKED = re.compile(r"\.experts\.weight([12])$")

# TransformerConfig fields that change names, row order or the meaning of a weight in a way no rule describes,
# with the values that do not.
PLAIN_OPTIONS = {
    "mla_down_proj_fusion": (False, None),
    "moe_single_grouped_weight": (False, None),
    "moe_mlp_glu_interleave_size": (None,),
    "moe_shared_expert_glu_interleave_size": (None,),
    "moe_latent_size": (None,),
    "attention_output_gate": (False, None),
    "layernorm_zero_centered_gamma": (False, None),
    "add_bias_linear": (False,),
}


def check_options(chunks: list[nn.Module]) -> None:
    """ValueError if a TransformerConfig found in the chunks sets an option the rules do not describe."""
    configs = {id(vars(m)["config"]): vars(m)["config"] for c in chunks for m in c.modules() if "config" in vars(m)}
    for config in configs.values():
        for option, plain in PLAIN_OPTIONS.items():
            if option in vars(config) and vars(config)[option] not in plain:
                raise ValueError(
                    f"got TransformerConfig.{option}={vars(config)[option]!r}; expected {plain[0]!r}, "
                    "because it changes what the weights mean and no conversion is known; "
                    "remove it from override_transformer_config"
                )


def live_tensors(
    chunks: list[nn.Module], layer_offsets: list[int], experts: int, width: int
) -> Iterator[tuple[str, Tensor]]:
    """(global name, tensor) of every parameter and travelling buffer.

    experts, width   experts of this rank and hidden size, to see single experts in stacked weights
    """
    assert len(chunks) == len(layer_offsets), f"{len(chunks)} chunks, {len(layer_offsets)} layer_offsets"
    for chunk, offset in zip(chunks, layer_offsets, strict=True):
        for name, tensor in (*chunk.named_parameters(), *chunk.named_buffers()):
            if isinstance(tensor, nn.Parameter) or name.endswith(TRAVELS):
                yield from unstack(global_name(name, offset), tensor, experts, width)


def unstack(name: str, tensor: Tensor, experts: int, width: int) -> Iterator[tuple[str, Tensor]]:
    """The old grouped layout holds all experts of a rank in two matrices of reinterpreted memory:
    weight1 [H, n * 2F] is (n, H, 2F) and weight2 [n * F, H] is (n, F, H), each expert transposed. Yields
    views [out, in] of single experts, named `...experts.weight1.{j}`; other tensors as they are."""
    found = STACKED.search(name)
    if found is None:
        yield name, tensor
        return
    if found[1] == "1":
        each = tensor.view(experts, width, -1)
    else:
        each = tensor.view(experts, -1, width)
    for number, expert in enumerate(each.transpose(1, 2)):
        yield f"{name}.{number}", expert


def global_name(name: str, offset: int) -> str:
    """Without wrapper prefixes, and with the layer number of the whole model instead of the chunk's."""
    while name.startswith("module."):
        name = name.removeprefix("module.")
    return LAYER.sub(lambda found: str(int(found[0]) + offset), name, count=1)


def describe(name: str, tensor: Tensor) -> Live:
    marked = tensor.tensor_model_parallel if hasattr(tensor, "tensor_model_parallel") else None
    return Live(name, tuple(tensor.shape), tensor.dtype, marked)
