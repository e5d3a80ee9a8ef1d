"""The same weights through every layout: live tensors as the reference, exported bytes equal to the file."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from bridge import Bridge, Groups, Layout
from tests.bridge.fake import dense_config, live_reference, module_tree, random_weights, write_folder
from tests.ranks import run_ranks

WORLD = 4
BUCKET = 5 << 20
LAYOUTS = ((2, 1), (1, 2), (2, 2), (4, 1))  # tp, pp; the rest of the ranks are copies
VOCAB = {1: 136, 2: 144, 4: 160}  # 130 rows padded to a multiple of 8 per rank
CASES = {
    "llama": dense_config(),
    "llama_tied": dense_config(tied=True),
    "qwen2_one_group": dense_config("qwen2", num_key_value_heads=1),
    "qwen3_tied": dense_config("qwen3", tied=True),
}
SECOND_EMBEDDING = [CASES["llama"]]  # on the last of two stages, in models that train extra prediction layers


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
    depth = config["num_hidden_layers"]
    stages = {1: [range(depth)], 2: [range(1), range(1, depth)]}[layout.pp]
    layers = stages[layout.pp_rank]
    first, last = layout.pp_rank == 0, layout.pp_rank == layout.pp - 1
    vocab = VOCAB[layout.tp]
    reference = live_reference(
        config, hf, layout.tp, layout.tp_rank, layers, first, last, vocab, second_embedding=config in SECOND_EMBEDDING
    )
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


class Allocations(TorchDispatchMode):
    """Bytes of all memory newly seen under this mode: an upper bound of the peak."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self._seen = 0, set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self._seen |= {id_of(arg) for arg in args if isinstance(arg, Tensor)}
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.device.type == "cpu" and id_of(out) not in self._seen:
            self._seen.add(id_of(out))
            self.bytes += out.untyped_storage().nbytes()
        return out


def id_of(tensor: Tensor) -> int:
    return 0 if tensor.device.type == "meta" else tensor.untyped_storage().data_ptr()


def memory_of_export(rank: int, world: int) -> tuple[int, int]:
    """(bytes allocated, bytes exported) of one export of a 24 MB model at tp2 pp2, everyone receiving."""
    config = dense_config(hidden_size=256, intermediate_size=520, num_hidden_layers=12)
    layout, groups = make_groups(rank, 2, 2)
    bridge, _, _ = build(config, random_weights(config), layout, groups, bucket_bytes=BUCKET)
    with Allocations() as memory:
        exported = sum(tensor.numel() * 4 for _, tensor in bridge.hf_weights(source_only=False))
    return memory.bytes, exported


def close_early(rank: int, world: int) -> list[str]:
    """The source stops after three tensors; the next export of all ranks is complete."""
    config = CASES["llama"]
    hf = random_weights(config)
    layout, groups = make_groups(rank, 2, 2)
    bridge, chunk, reference = build(config, hf, layout, groups, bucket_bytes=40_000)
    with torch.no_grad():
        for name, value in chunk.named_parameters():
            value.copy_(reference[name])
    stream = bridge.hf_weights()
    seen = [name for name, _ in zip(range(3), stream, strict=False)] if layout.is_source else list(stream)
    stream.close()
    assert len(seen) == (3 if layout.is_source else 0)
    return [name for name, tensor in bridge.hf_weights() if torch.equal(tensor, hf[name])]


def all_on_one_rank(rank: int, world: int, folder: str) -> tuple[int, tuple[int, int], list[str]]:
    return round_trip(rank, world, folder), memory_of_export(rank, world), close_early(rank, world)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, tuple[int, int], list[str]]]:
    """One start of four processes serves all tests of this file."""
    folder = tmp_path_factory.mktemp("models")
    for case, config in CASES.items():
        write_folder(folder / case, config, random_weights(config))
    return run_ranks(all_on_one_rank, WORLD, str(folder))


@pytest.mark.gloo
def test_every_layout_loads_the_reference_and_exports_the_source(ranks):
    # with everyone receiving each rank exports each case; the sources once more: rank 0 on the four layouts,
    # rank 1 as the second copy of pp2, rank 2 as the second copy of tp2
    checked = [result[0] for result in ranks]
    assert checked == [(4 + sources) * len(CASES) for sources in (4, 1, 1, 0)]


@pytest.mark.gloo
def test_export_needs_one_bucket_and_the_tensor_it_yields(ranks):
    for _, (allocated, exported), _ in ranks:
        assert exported > 4 * BUCKET
        assert allocated < 1.05 * (BUCKET + 520 * 256 * 4)


@pytest.mark.gloo
def test_a_consumer_that_stops_early_leaves_no_rank_waiting(ranks):
    complete, *others = [result[2] for result in ranks]
    assert len(complete) == len(random_weights(CASES["llama"])) and others == [[], [], []]
