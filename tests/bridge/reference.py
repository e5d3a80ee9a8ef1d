"""A forward pass on Megatron-Core tensors in plain torch: what each live name means, independent of `bridge`.

Legend: T tokens, H hidden, A query heads, G key-value groups, D head size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def logits(live: dict[str, Tensor], config: dict, tokens_T: Tensor) -> Tensor:
    """[T, V] logits of one sequence, from the tensors of an unsplit model without fused norms."""
    eps = config["rms_norm_eps"]
    x = live["embedding.word_embeddings.weight"][tokens_T]
    for i in range(config["num_hidden_layers"]):
        layer = {n.removeprefix(f"decoder.layers.{i}."): t for n, t in live.items() if f".layers.{i}." in n}
        x = x + attention(layer, config, rms_norm(x, layer["input_layernorm.weight"], eps))
        gate, up = F.linear(rms_norm(x, layer["pre_mlp_layernorm.weight"], eps), layer["mlp.linear_fc1.weight"]).chunk(
            2, dim=-1
        )
        x = x + F.linear(F.silu(gate) * up, layer["mlp.linear_fc2.weight"])
    head = live.get("output_layer.weight", live["embedding.word_embeddings.weight"])
    return F.linear(rms_norm(x, live["decoder.final_layernorm.weight"], eps), head)[:, : config["vocab_size"]]


def attention(layer: dict[str, Tensor], config: dict, x_TH: Tensor) -> Tensor:
    heads, groups, size = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    bias = layer.get("self_attention.linear_qkv.bias")
    fused = F.linear(x_TH, layer["self_attention.linear_qkv.weight"], bias).view(len(x_TH), groups, -1)
    q, k, v = fused.split([heads // groups * size, size, size], dim=-1)
    q_TAD = q.reshape(len(x_TH), heads, size)
    if "self_attention.q_layernorm.weight" in layer:
        q_TAD = rms_norm(q_TAD, layer["self_attention.q_layernorm.weight"], config["rms_norm_eps"])
        k = rms_norm(k, layer["self_attention.k_layernorm.weight"], config["rms_norm_eps"])
    theta = config["rope_parameters"]["rope_theta"]
    q_ATD, k_GTD, v_GTD = rotate(q_TAD, theta).transpose(0, 1), rotate(k, theta).transpose(0, 1), v.transpose(0, 1)
    repeat = heads // groups
    out = F.scaled_dot_product_attention(
        q_ATD, k_GTD.repeat_interleave(repeat, 0), v_GTD.repeat_interleave(repeat, 0), is_causal=True
    )
    return F.linear(out.transpose(0, 1).reshape(len(x_TH), -1), layer["self_attention.linear_proj.weight"])


def rotate(x_TAD: Tensor, theta: float) -> Tensor:
    """Rotary embedding on the two halves of each head."""
    half = x_TAD.shape[-1] // 2
    angle = torch.arange(len(x_TAD))[:, None] * theta ** (-torch.arange(half) / half)
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    a, b = x_TAD[..., :half], x_TAD[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def rms_norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * gain
