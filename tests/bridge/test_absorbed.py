"""Absorbed latent attention with the split weights computes what latent attention does with kv_b_proj.

A head's score q . (W_k c) equals (W_k^T q) . c, and its output sum_s p_s (W_v c_s) equals W_v (sum_s p_s c_s)
(arXiv 2405.04434, section 2.1.2): the latent is the one key and the one value of all heads.

Legend: T tokens, H hidden, A heads, N and P head dimensions without and with position, V value dimensions, C latent.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from bridge import Bridge, Groups, Layout, open_source
from bridge.offline import OfflineModel
from bridge.pipeline import stage_layers
from bridge.predict import Form
from bridge.shards import write_shards
from bridge.shards.manifest import file_name
from tests.bridge.fake import module_tree
from tests.bridge.families import config_of
from tests.bridge.reference import rms_norm, rotate

LAYER = "decoder.layers.0.self_attention."
SIZES = [(12, 28), (28, 12)]  # N, V


def model_of(config: dict[str, Any], absorb: bool, tp: int = 1) -> OfflineModel:
    form = Form(absorb=absorb, whole_down=True, vocab_multiple=8)
    return OfflineModel.make(config, form, Layout(tp=tp), stage_layers(1, 1), torch.float32)


def write_checkpoint(folder: Path, config: dict[str, Any]) -> dict[str, Tensor]:
    """config.json and weights with outputs of about 1."""
    generator = torch.Generator().manual_seed(0)
    shapes = model_of(config, absorb=False).plan.hf_shapes
    hf = {name: torch.randn(shape, generator=generator) / shape[-1] ** 0.5 for name, shape in shapes.items()}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(hf, folder / "model.safetensors")
    return hf


def load(folder: Path, config: dict[str, Any], absorb: bool) -> dict[str, Tensor]:
    """The attention's tensors in a live model of this form."""
    tensors = {t.key: torch.zeros(t.placed.live.shape) for t in model_of(config, absorb).tensors(0)}
    chunk = module_tree(tensors)
    Bridge(config, [chunk], Layout(), Groups(), [0]).load(folder)
    return attention_of({name: tensor.detach() for name, tensor in chunk.named_parameters()})


def attention_of(live: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(LAYER): tensor for name, tensor in live.items() if name.startswith(LAYER)}


def latents(live: dict[str, Tensor], config: dict[str, Any], x_TH: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries without [T, A, N] and with position [T, A, P], the latent [T, C], the common key part [T, 1, P]."""
    q_TR = rms_norm(x_TH @ live["linear_q_down_proj.weight"].T, live["q_layernorm.weight"], 1e-6)
    down = x_TH @ live["linear_kv_down_proj.weight"].T
    c_TC, k_TP = down.split([config["kv_lora_rank"], config["qk_rope_head_dim"]], dim=-1)
    dims = [config["qk_nope_head_dim"], config["qk_rope_head_dim"]]
    q_TAN, q_TAP = (q_TR @ live["linear_q_up_proj.weight"].T).unflatten(-1, (-1, sum(dims))).split(dims, dim=-1)
    return q_TAN, rotate(q_TAP, 1e4), rms_norm(c_TC, live["kv_layernorm.weight"], 1e-6), rotate(k_TP[:, None], 1e4)


def probabilities(scores_ATS: Tensor, config: dict[str, Any]) -> Tensor:
    future = torch.ones(scores_ATS.shape[1:], dtype=torch.bool).triu(1)
    scale = (config["qk_nope_head_dim"] + config["qk_rope_head_dim"]) ** -0.5
    return (scores_ATS * scale).masked_fill(future, -torch.inf).softmax(-1)


def plain(live: dict[str, Tensor], config: dict[str, Any], x_TH: Tensor) -> Tensor:
    q_TAN, q_TAP, c_TC, k_T1P = latents(live, config, x_TH)
    dims = [config["qk_nope_head_dim"], config["v_head_dim"]]
    keys_values = (c_TC @ live["linear_kv_up_proj.weight"].T).unflatten(-1, (-1, sum(dims)))
    k_TAN, v_TAV = keys_values.split(dims, dim=-1)
    scores = torch.einsum("tan,san->ats", q_TAN, k_TAN) + torch.einsum("tap,sp->ats", q_TAP, k_T1P[:, 0])
    out_TAV = torch.einsum("ats,sav->tav", probabilities(scores, config), v_TAV)
    return out_TAV.flatten(1) @ live["linear_proj.weight"].T


def absorbed(live: dict[str, Tensor], config: dict[str, Any], x_TH: Tensor) -> Tensor:
    q_TAN, q_TAP, c_TC, k_T1P = latents(live, config, x_TH)
    k_ANC = live["linear_k_up_proj.weight"].unflatten(0, (-1, config["qk_nope_head_dim"]))
    v_AVC = live["linear_v_up_proj.weight"].unflatten(0, (-1, config["v_head_dim"]))
    q_TAC = torch.einsum("tan,anc->tac", q_TAN, k_ANC)
    scores = torch.einsum("tac,sc->ats", q_TAC, c_TC) + torch.einsum("tap,sp->ats", q_TAP, k_T1P[:, 0])
    out_TAC = torch.einsum("ats,sc->tac", probabilities(scores, config), c_TC)
    return torch.einsum("tac,avc->tav", out_TAC, v_AVC).flatten(1) @ live["linear_proj.weight"].T


@pytest.fixture(params=SIZES, ids=lambda sizes: f"N{sizes[0]}_V{sizes[1]}")
def checkpoint(request, tmp_path) -> tuple[Path, dict[str, Any], dict[str, Tensor]]:
    config = config_of(
        "deepseek_v3", num_hidden_layers=1, qk_nope_head_dim=request.param[0], v_head_dim=request.param[1]
    )
    (tmp_path / "hf").mkdir()
    return tmp_path / "hf", config, write_checkpoint(tmp_path / "hf", config)


def hidden_states() -> Tensor:
    return torch.randn(24, 80, generator=torch.Generator().manual_seed(1))


def test_absorbed_attention_equals_latent_attention(checkpoint):
    folder, config, hf = checkpoint
    whole, split = load(folder, config, absorb=False), load(folder, config, absorb=True)
    assert torch.equal(whole["linear_kv_up_proj.weight"], hf["model.layers.0.self_attn.kv_b_proj.weight"])
    want = plain(whole, config, hidden_states())
    assert want.abs().max() > 0.3
    assert (absorbed(split, config, hidden_states()) - want).abs().max() < 1e-5


def test_a_split_in_two_blocks_would_show(checkpoint):
    folder, config, hf = checkpoint
    rows = config["num_attention_heads"] * config["qk_nope_head_dim"]
    kv_b, split = hf["model.layers.0.self_attn.kv_b_proj.weight"], load(folder, config, absorb=True)
    blocks = split | {"linear_k_up_proj.weight": kv_b[:rows], "linear_v_up_proj.weight": kv_b[rows:]}
    want = plain(load(folder, config, absorb=False), config, hidden_states())
    assert (absorbed(blocks, config, hidden_states()) - want).abs().max() > 0.1


def test_the_halves_of_two_ranks_add_up_to_the_whole(checkpoint, tmp_path):
    folder, config, _ = checkpoint
    model = model_of(config, absorb=True, tp=2)
    write_shards(model, open_source(folder), tmp_path / "shards")
    ranks = [attention_of(load_file(tmp_path / "shards" / file_name(rank))) for rank in model.ranks()]
    sizes = {name: len(ranks[0][f"linear_{name}_up_proj.weight"]) for name in ("k", "v")}
    assert sizes == {"k": 2 * config["qk_nope_head_dim"], "v": 2 * config["v_head_dim"]}
    got = sum(absorbed(rank, config, hidden_states()) for rank in ranks)
    want = plain(load(folder, config, absorb=False), config, hidden_states())
    assert (got - want).abs().max() < 1e-5
