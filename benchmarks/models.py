"""Random bf16 models of a realistic shape for the weight benchmarks: a dense one and a mixture of experts.

Both hold about 0.635 GB, so their GB/s can be compared: `write_dense(folder)` is a Qwen3 of 0.3B parameters,
`write_moe(folder)` a Qwen3-MoE with 64 small experts in each layer, that is 50 times as many tensors.
Only config.json and the weight files are written; torch and safetensors are all that is needed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

Shape = tuple[int, ...]

FILE_BYTES = 200_000_000  # size at which a new weight file is begun

_COMMON = dict(
    vocab_size=32000,
    num_hidden_layers=16,
    rms_norm_eps=1e-6,
    rope_theta=1000000.0,
    hidden_act="silu",
    attention_bias=False,
    attention_dropout=0.0,
    initializer_range=0.02,
    max_position_embeddings=4096,
    tie_word_embeddings=False,
    use_sliding_window=False,
    torch_dtype="bfloat16",
    bos_token_id=1,
    eos_token_id=2,
)
DENSE = dict(
    _COMMON,
    model_type="qwen3",
    architectures=["Qwen3ForCausalLM"],
    hidden_size=1024,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
    intermediate_size=3072,
)
MOE = dict(
    _COMMON,
    model_type="qwen3_moe",
    architectures=["Qwen3MoeForCausalLM"],
    hidden_size=256,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=64,
    intermediate_size=1024,  # of dense layers; there are none
    num_experts=64,
    num_experts_per_tok=8,
    moe_intermediate_size=376,  # makes the bytes those of DENSE
    norm_topk_prob=True,
    decoder_sparse_step=1,
    mlp_only_layers=[],
    router_aux_loss_coef=0.001,
    output_router_logits=False,
)


def write_dense(folder: Path | str) -> Path:
    """A random Qwen3 of 0.3B parameters: 16 layers, hidden size 1024, vocabulary 32000, untied head."""
    return write_model(folder, DENSE)


def write_moe(folder: Path | str) -> Path:
    """A random Qwen3-MoE with the bytes of the dense model: 16 layers of 64 experts, hidden size 256."""
    return write_model(folder, MOE)


def shapes(config: dict) -> dict[str, Shape]:
    """Hugging Face name -> shape of every tensor that `config` describes, in file order."""
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    found: dict[str, Shape] = {"model.embed_tokens.weight": (vocab, hidden)}
    for layer in range(config["num_hidden_layers"]):
        found |= {f"model.layers.{layer}.{name}": shape for name, shape in _layer(config).items()}
    return found | {"model.norm.weight": (hidden,), "lm_head.weight": (vocab, hidden)}


def _layer(config: dict) -> dict[str, Shape]:
    hidden, size = config["hidden_size"], config["head_dim"]
    heads, groups = config["num_attention_heads"] * size, config["num_key_value_heads"] * size
    attention = {
        "input_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (heads, hidden),
        "self_attn.k_proj.weight": (groups, hidden),
        "self_attn.v_proj.weight": (groups, hidden),
        "self_attn.o_proj.weight": (hidden, heads),
        "self_attn.q_norm.weight": (size,),
        "self_attn.k_norm.weight": (size,),
        "post_attention_layernorm.weight": (hidden,),
    }
    if "num_experts" not in config:
        return attention | _mlp("mlp", hidden, config["intermediate_size"])
    experts = {"mlp.gate.weight": (config["num_experts"], hidden)}
    for expert in range(config["num_experts"]):
        experts |= _mlp(f"mlp.experts.{expert}", hidden, config["moe_intermediate_size"])
    return attention | experts


def _mlp(prefix: str, hidden: int, inner: int) -> dict[str, Shape]:
    return {
        f"{prefix}.gate_proj.weight": (inner, hidden),
        f"{prefix}.up_proj.weight": (inner, hidden),
        f"{prefix}.down_proj.weight": (hidden, inner),
    }


def write_model(folder: Path | str, config: dict, seed: int = 0) -> Path:
    """config.json, weight files of about FILE_BYTES and their index; norms are ones, all else N(0, 0.02)."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    files = list(_files(shapes(config)))
    generator = torch.Generator().manual_seed(seed)
    weight_map = {}
    for number, part in enumerate(files, start=1):
        file = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        save_file({name: _draw(shape, generator) for name, shape in part.items()}, folder / file, {"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": total_bytes(config)}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    return folder


def total_bytes(config: dict) -> int:
    """Bytes of all weights in bf16."""
    return sum(_bytes(shape) for shape in shapes(config).values())


def _files(wanted: dict[str, Shape]) -> Iterator[dict[str, Shape]]:
    part: dict[str, Shape] = {}
    size = 0
    for name, shape in wanted.items():
        if part and size + _bytes(shape) > FILE_BYTES:
            yield part
            part, size = {}, 0
        part[name] = shape
        size += _bytes(shape)
    yield part


def _bytes(shape: Shape) -> int:
    return 2 * torch.Size(shape).numel()


def _draw(shape: Shape, generator: torch.Generator) -> Tensor:
    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.bfloat16)
    return torch.empty(shape, dtype=torch.bfloat16).normal_(std=0.02, generator=generator)
