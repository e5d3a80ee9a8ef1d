"""Mixture-of-experts models through live ranks: every expert layout loads the reference and exports the source."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn

from bridge import Bridge, Groups, Layout, RopeRows, gather
from bridge.live import live_tensors
from bridge.models import local_experts
from bridge.offline import OfflineModel
from bridge.predict import Form
from tests.bridge.fake import module_tree, write_folder
from tests.bridge.families import config_of, expected, plan, random_weights
from tests.ranks import run_ranks

WORLD = 4
CASES = {
    "qwen3_moe": (config_of("qwen3_moe"), Form(vocab_multiple=8)),
    "qwen3_moe_stacked": (config_of("qwen3_moe"), Form(vocab_multiple=8, experts="stacked")),
    "glm4_moe_fused": (config_of("glm4_moe"), Form(vocab_multiple=8, fused_norms=True, experts="grouped", mtp=True)),
    "glm_moe_dsa": (
        config_of("glm_moe_dsa", tie_word_embeddings=True, indexer_types=["full"] * 4),
        Form(vocab_multiple=8, absorb=True, mtp=True),
    ),
}
LAYOUTS = (
    {"ep": 2},
    {"ep": 4},
    {"tp": 2, "ep": 2},
    {"tp": 2, "etp": 2},
    {"tp": 2, "ep": 2, "etp": 2},
    {"tp": 4, "ep": 2},
    {"pp": 2, "ep": 2},
    {"tp": 2, "pp": 2, "ep": 2},
    {"pp": 4},
)


def groups_of(rank: int, layout: Layout) -> Groups:
    """As Megatron-Core numbers ranks: stage after stage; in a stage tp fastest, and for experts etp, then ep. Every
    rank creates every group."""
    stage = WORLD // layout.pp

    def pick(members: list[list[int]]) -> dist.ProcessGroup | None:
        made = [dist.new_group(ranks) if len(ranks) > 1 else None for ranks in members]
        return next(group for group, ranks in zip(made, members, strict=True) if rank in ranks)

    def blocks(size: int) -> list[list[int]]:
        return [list(range(start, start + size)) for start in range(0, WORLD, size)]

    return Groups(
        tp=pick(blocks(layout.tp)),
        pp=pick([list(range(start, WORLD, stage)) for start in range(stage)]),
        expert=pick(blocks(layout.axes["expert"])),
    )


def tree_of(model: OfflineModel, stage: int) -> nn.Module:
    """The stage's module tree; stacked experts as the two matrices that hold them."""
    (chunk,) = model.stages[stage]
    tensors = {live.name: torch.zeros(live.shape, dtype=live.dtype) for live in chunk.live}
    for name in [name for name in tensors if re.search(r"experts\.weight[12]\.0$", name)]:
        base = name.removesuffix(".0")
        own = [tensors.pop(key) for key in list(tensors) if key.rsplit(".", 1)[0] == base]
        size = sum(tensor.numel() for tensor in own)
        width = model.config["hidden_size"]
        shape = (width, size // width) if base.endswith("1") else (size // width, width)
        tensors[base] = torch.zeros(shape, dtype=model.dtype)
    biases = {name: tensors.pop(name) for name in list(tensors) if name.endswith("expert_bias")}
    tree = module_tree(tensors)
    for name, bias in biases.items():
        path, leaf = name.rsplit(".", 1)
        tree.get_submodule(path).register_buffer(leaf, bias)
        tree.get_submodule(path).register_buffer("local_tokens_per_expert", torch.ones(8))
    return tree


def round_trips(rank: int, world: int, folder: str) -> list[str]:
    """'case layout' for each full export this rank received and found equal to the source."""
    gather.DIRECT_BYTES = 2000  # some of these small shards travel alone, some together; test_parallel.py packs all
    found = []
    for sizes in LAYOUTS:
        stage, position = divmod(rank, WORLD // sizes.get("pp", 1))
        layout = Layout.at(position, stage, **sizes)
        groups = groups_of(rank, layout)
        for case, (config, form) in CASES.items():
            model = plan(config, form, **sizes)
            hf = load_file(f"{folder}/{case}/model.safetensors")
            tree, first = tree_of(model, stage), model.layers[stage][0].start
            for tensor in (*tree.parameters(), *tree.buffers()):
                tensor.data.fill_(torch.nan)
            bridge = Bridge(config, [tree], layout, groups, [first], bucket_bytes=60_000)
            report = bridge.load(f"{folder}/{case}")
            live = dict(live_tensors([tree], [first], local_experts(config, layout.ep), config["hidden_size"]))
            for name, tensor in live.items():
                want = expected(model, hf, layout, re.sub(r"(weight[12])\.(\d+)$", _as_grouped, name), model.dtype)
                assert torch.equal(tensor, want), f"{case} {layout}: {name}"
            assert not any(parameter.isnan().any() for parameter in tree.parameters())
            assert report.left_out == {}, report
            for everywhere in (False, True):
                got = [(name, tensor.clone()) for name, tensor in bridge.hf_weights(source_only=not everywhere)]
                if not everywhere and not layout.is_source:
                    assert got == []
                    continue
                assert [name for name, _ in got] == list(bridge.plan.hf_shapes)
                assert dict(got).keys() == hf.keys() and all(torch.equal(tensor, hf[name]) for name, tensor in got)
                found.append(f"{case} {sizes}")
    return found


def _as_grouped(stacked: re.Match[str]) -> str:
    return f"linear_fc{stacked[1][-1]}.weight{stacked[2]}"


@pytest.mark.gloo
def test_every_expert_layout_loads_the_reference_and_exports_the_source(tmp_path):
    for case, (config, form) in CASES.items():
        write_folder(tmp_path / case, config, random_weights(plan(config, form)))
    results = run_ranks(round_trips, WORLD, str(tmp_path), timeout=400)
    copies = sum(WORLD // Layout.at(0, **sizes).stage_ranks // sizes.get("pp", 1) for sizes in LAYOUTS)
    assert sum(map(len, results)) == (copies + WORLD * len(LAYOUTS)) * len(CASES)


def test_stacked_experts_are_reinterpreted_memory(tmp_path):
    """weight1 [H, n * 2F] is (n, H, 2F) in memory: a slice of its columns is no expert."""
    config = config_of("qwen3_moe", num_hidden_layers=1, mlp_only_layers=[], num_experts=2)
    model = plan(config, Form(vocab_multiple=8, experts="stacked"), dtype=torch.float32)
    hf = random_weights(model, torch.float32)
    tree = tree_of(model, 0)
    bridge = Bridge(config, [tree], Layout(), Groups(), [0])
    bridge.load(write_folder(tmp_path, config, hf))
    experts = tree.decoder.layers._modules["0"].mlp.experts
    hidden, inner = config["hidden_size"], config["moe_intermediate_size"]
    assert experts.weight1.shape == (hidden, 2 * 2 * inner) and experts.weight2.shape == (2 * inner, hidden)
    for number, (fc1, fc2) in enumerate(
        zip(experts.weight1.view(2, hidden, -1), experts.weight2.view(2, -1, hidden), strict=True)
    ):
        prefix = f"model.layers.0.mlp.experts.{number}."
        assert torch.equal(fc1.T, torch.cat([hf[f"{prefix}{part}_proj.weight"] for part in ("gate", "up")]))
        assert torch.equal(fc2.T, hf[f"{prefix}down_proj.weight"])
    assert all(torch.equal(tensor, hf[name]) for name, tensor in bridge.hf_weights())


def test_indexer_rows_of_another_order_travel_both_ways(tmp_path):
    config = config_of("glm_moe_dsa", num_nextn_predict_layers=0)
    model = plan(config, Form(vocab_multiple=8))
    hf = random_weights(model)
    write_folder(tmp_path, config, hf)
    tree = tree_of(model, 0)
    bridge = Bridge(config, [tree], Layout(), Groups(), [0], indexer_rows=RopeRows.named("last-interleaved"))
    bridge.load(Path(tmp_path))
    held = tree.get_submodule("decoder.layers.0.self_attention.core_attention.indexer")
    source = hf["model.layers.0.self_attn.indexer.wk.weight"]
    assert torch.equal(held.linear_wk.weight, torch.cat([source[8:], source[:8]]))
    assert all(torch.equal(tensor, hf[name]) for name, tensor in bridge.hf_weights())


def test_a_correction_bias_in_a_narrow_dtype_is_refused():
    config = config_of("deepseek_v3")
    tree = tree_of(plan(config, Form(vocab_multiple=8, mtp=True)), 0).bfloat16()
    with pytest.raises(ValueError, match=r"expert_bias: live dtype torch\.bfloat16, expected torch\.float32"):
        Bridge(config, [tree], Layout(), Groups(), [0])
