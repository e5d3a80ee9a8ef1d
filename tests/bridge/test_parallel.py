"""The same weights through every layout: live tensors as the reference, exported bytes equal to the file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from bridge import Bridge, Groups, Layout
from tests.bridge.fake import dense_config, live_reference, module_tree, random_weights, write_folder
from tests.ranks import run_ranks

WORLD = 4
LAYOUTS = ((2, 1), (1, 2), (2, 2), (4, 1))  # tp, pp; the rest of the ranks are copies
VOCAB = {1: 136, 2: 144, 4: 160}  # 130 rows padded to a multiple of 8 per rank
CASES = {
    "llama": dense_config(),
    "llama_tied": dense_config(tied=True),
    "qwen2_one_group": dense_config("qwen2", num_key_value_heads=1),
    "qwen3_tied": dense_config("qwen3", tied=True),
}


def make_groups(rank: int, tp: int, pp: int) -> tuple[Layout, Groups]:
    """Ranks count tp fastest, pp slowest. Every rank creates every group."""
    copies = WORLD // tp // pp

    def pick(members: list[list[int]]) -> dist.ProcessGroup | None:
        groups = [dist.new_group(ranks) for ranks in members] if len(members[0]) > 1 else [None] * len(members)
        return next(group for group, ranks in zip(groups, members, strict=True) if rank in ranks)

    stride = tp * copies
    tp_group = pick([list(range(start, start + tp)) for start in range(0, WORLD, tp)])
    pp_group = pick([list(range(start, WORLD, stride)) for start in range(stride)])
    return Layout(tp=tp, pp=pp, tp_rank=rank % tp, pp_rank=rank // stride), Groups(tp=tp_group, pp=pp_group)


def build(
    config: dict, hf: dict[str, Tensor], layout: Layout, groups: Groups, **options: int
) -> tuple[Bridge, torch.nn.Module, dict[str, Tensor]]:
    """Stage 0 of two holds layer 0, stage 1 the rest."""
    stages = {1: [range(3)], 2: [range(1), range(1, 3)]}[layout.pp]
    layers = stages[layout.pp_rank]
    first, last = layout.pp_rank == 0, layout.pp_rank == layout.pp - 1
    vocab = VOCAB[layout.tp]
    reference = live_reference(config, hf, layout.tp, layout.tp_rank, layers, first, last, vocab)
    chunk = module_tree(reference)
    return Bridge(config, [chunk], layout, groups, [layers[0]], **options), chunk, reference


def round_trip(rank: int, world: int, folder: str) -> int:
    """Load and export every case on every layout; returns the number of exports checked."""
    checked = 0
    for tp, pp in LAYOUTS:
        layout, groups = make_groups(rank, tp, pp)
        for case, config in CASES.items():
            hf = random_weights(config)
            where = f"{case} tp{tp} pp{pp} rank {rank}"
            bridge, chunk, reference = build(config, hf, layout, groups, bucket_bytes=40_000)
            report = bridge.load(f"{folder}/{case}")
            for name, value in chunk.named_parameters():
                assert torch.equal(value, reference[name]), f"{where}: {name}"
            padding = sum(
                value[value.abs().sum(1) == 0].numel()
                for name, value in reference.items()
                if "word_emb" in name or "output_layer" in name
            )
            assert report.bytes_read == 4 * (sum(value.numel() for value in reference.values()) - padding), where
            for source_only in (True, False):
                got = [(name, tensor.clone()) for name, tensor in bridge.hf_weights(source_only)]
                if source_only and not layout.is_source:
                    assert got == [], where
                    continue
                assert [name for name, _ in got] == list(bridge.plan.hf_shapes), where
                assert dict(got).keys() == hf.keys() and len(got) == len(hf), where
                for name, tensor in got:
                    assert torch.equal(tensor, hf[name]), f"{where}: {name}"
                checked += 1
    return checked


@pytest.mark.gloo
def test_every_layout_loads_the_reference_and_exports_the_source(tmp_path: Path):
    for case, config in CASES.items():
        write_folder(tmp_path / case, config, random_weights(config))
    checked = run_ranks(round_trip, WORLD, str(tmp_path))
    # with everyone receiving each rank exports each case; the sources once more: rank 0 on the four layouts,
    # rank 1 as the second copy of pp2, rank 2 as the second copy of tp2
    assert checked == [(4 + sources) * len(CASES) for sources in (4, 1, 1, 0)]
