"""Reading fp8 blocks and fused experts as the plain tensors they stand for."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from bridge.hf_writer import HfWriter
from bridge.safetensors_io import HfCheckpoint
from bridge.source import open_source

QUANTISED = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
# 2 heads of 448 rows = 3.5 blocks each; 4.5 blocks of rows; blocks that end short on both sides.
SHAPES = {"kv_b_proj": (896, 320), "kv_a_proj_with_mqa": (576, 200), "small": (5, 7)}
EXPERTS = "model.layers.1.mlp.experts"


def write(folder: Path, tensors: dict[str, Tensor], quantisation: dict | None = QUANTISED) -> Path:
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = {"model_type": "tiny"} | ({} if quantisation is None else {"quantization_config": quantisation})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def fp8(shape: tuple[int, int], seed: int = 0) -> dict[str, Tensor]:
    """Random values, and scales that differ strongly from block to block."""
    generator = torch.Generator().manual_seed(seed)
    blocks = tuple(math.ceil(size / 128) for size in shape)
    return {
        "weight": torch.randn(shape, generator=generator).mul_(50).to(torch.float8_e4m3fn),
        "weight_scale_inv": torch.rand(blocks, generator=generator) + 0.01,
    }


def by_index(quantised: dict[str, Tensor]) -> Tensor:
    """The definition, element by element: q[i, j] * scale[i // 128, j // 128]."""
    rows, columns = (torch.arange(size) // 128 for size in quantised["weight"].shape)
    scales = quantised["weight_scale_inv"].float()[rows][:, columns]
    return (quantised["weight"].float() * scales).to(torch.bfloat16)


@pytest.fixture(scope="module")
def quantised() -> dict[str, dict[str, Tensor]]:
    return {name: fp8(shape, seed) for seed, (name, shape) in enumerate(SHAPES.items())}


@pytest.fixture(scope="module")
def folder(tmp_path_factory, quantised) -> Path:
    tensors = {f"{name}.{kind}": tensor for name, pair in quantised.items() for kind, tensor in pair.items()}
    plain = {"norm.weight": torch.arange(6, dtype=torch.bfloat16), "gate.bias": torch.arange(4, dtype=torch.float32)}
    return write(tmp_path_factory.mktemp("fp8"), tensors | plain)


def test_fp8_appears_as_bfloat16_beside_plain_tensors(folder, quantised):
    source = open_source(folder)
    assert set(source.names()) == {f"{name}.weight" for name in SHAPES} | {"norm.weight", "gate.bias"}
    for name, shape in SHAPES.items():
        assert source.shape(f"{name}.weight") == shape and source.dtype(f"{name}.weight") is torch.bfloat16
        read = source.read(f"{name}.weight")
        assert read.dtype is torch.bfloat16 and torch.equal(read, by_index(quantised[name]))
    assert source.read("norm.weight").tolist() == [0, 1, 2, 3, 4, 5]
    assert source.dtype("norm.weight") is torch.bfloat16 and source.dtype("gate.bias") is torch.float32


def test_hand_computed_values_across_a_block_edge(tmp_path):
    weight = torch.full((130, 129), 2.0).to(torch.float8_e4m3fn)
    scales = torch.tensor([[0.5, 3.0], [0.25, 7.0]])
    source = open_source(write(tmp_path, {"a.weight": weight, "a.weight_scale_inv": scales}))
    corner = source.read("a.weight", (slice(127, 129), slice(126, 129)))
    assert corner.tolist() == [[1.0, 1.0, 6.0], [0.5, 0.5, 14.0]]


CUTS = {
    "second head": ("kv_b_proj", (slice(448, 896),)),
    "inside one block": ("kv_b_proj", (slice(130, 140),)),
    "on block edges": ("kv_b_proj", (slice(128, 384),)),
    "short last block": ("kv_a_proj_with_mqa", (slice(512, 576),)),
    "columns": ("kv_b_proj", (slice(None), slice(160, 320))),
    "columns inside a block": ("kv_a_proj_with_mqa", (slice(None), slice(129, 131))),
    "rows and columns": ("kv_b_proj", (slice(100, 300), slice(100, 300))),
    "nothing": ("kv_b_proj", (slice(448, 448),)),
    "from the end": ("kv_b_proj", (slice(-448, None),)),
}


@pytest.mark.parametrize("cut", CUTS)
def test_an_fp8_slice_equals_the_slice_of_the_whole(folder, quantised, cut):
    name, slices = CUTS[cut]
    assert torch.equal(open_source(folder).read(f"{name}.weight", slices), by_index(quantised[name])[slices])


@pytest.mark.parametrize(
    ("name", "slices", "read"),
    [
        ("kv_b_proj", None, 896 * 320 + 7 * 3 * 4),
        ("kv_b_proj", (slice(448, 896),), 448 * 320 + 4 * 3 * 4),  # rows 448.. begin inside block 3
        ("kv_b_proj", (slice(0, 128), slice(0, 129)), 128 * 129 + 1 * 2 * 4),
        ("kv_b_proj", (slice(None), slice(160, 320)), 896 * 160 + 7 * 2 * 4),
        ("kv_a_proj_with_mqa", None, 576 * 200 + 5 * 2 * 4),  # 576 rows: 5 rows of scales
        ("kv_a_proj_with_mqa", (slice(512, 576),), 64 * 200 + 1 * 2 * 4),
        ("norm", (slice(1, 3),), 2 * 2),
    ],
)
def test_bytes_read_counts_values_and_the_scales_of_their_blocks(folder, name, slices, read):
    source = open_source(folder)
    source.read(f"{name}.weight", slices)
    assert source.bytes_read == read


def test_scales_may_be_bfloat16_and_blocks_of_any_size(tmp_path):
    weight = torch.ones(4, 3).to(torch.float8_e4m3fn)
    scales = torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.bfloat16)
    quantisation = {**QUANTISED, "weight_block_size": [3, 2]}
    source = open_source(write(tmp_path, {"a.weight": weight, "a.weight_scale_inv": scales}, quantisation))
    assert source.read("a.weight").tolist() == [[1, 1, 2]] * 3 + [[3, 3, 4]]


def without(name: str) -> dict[str, Tensor | None]:
    return {name: None}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (without("a.weight_scale_inv"), r"a\.weight: without a\.weight_scale_inv"),
        (without("a.weight"), r"a\.weight_scale_inv: a scale without tensor"),
        ({"a.weight": torch.ones(200, 130)}, r"a\.weight_scale_inv: a scale for an unquantised tensor"),
        ({"a.weight_scale_inv": torch.ones(1, 2)}, r"a\.weight_scale_inv: torch.float32 \[1, 2\].*\[2, 2\]"),
        ({"a.weight_scale_inv": torch.ones(2, 2, dtype=torch.float64)}, r"a\.weight_scale_inv: torch.float64"),
        ({"a.weight": torch.ones(200, 130).to(torch.float8_e5m2)}, r"a\.weight: torch.float8_e5m2"),
        ({"a.weight": torch.ones(8, 200, 130).to(torch.float8_e4m3fn)}, r"a\.weight: .*\[8, 200, 130\]"),
    ],
)
def test_fp8_tensors_that_cannot_be_read_are_named(tmp_path, change, named):
    tensors = {f"{name}.{kind}": tensor for name in ("a", "b") for kind, tensor in fp8((200, 130)).items()} | change
    folder = write(tmp_path, {name: tensor for name, tensor in tensors.items() if tensor is not None})
    with pytest.raises(ValueError, match=named) as error:
        open_source(folder)
    assert "b.weight" not in str(error.value) and "got 1 problem(s)" in str(error.value)


@pytest.mark.parametrize("quantisation", [None, {"quant_method": "fp8"}])
@pytest.mark.parametrize("kind", ["weight", "weight_scale_inv"])
def test_fp8_without_block_size_is_refused(tmp_path, quantisation, kind):
    folder = write(tmp_path, {f"a.{kind}": fp8((200, 130))[kind]}, quantisation)
    with pytest.raises(ValueError, match=rf"got a\.{kind} in .*weight_block_size"):
        open_source(folder)


def test_other_quantisations_are_refused(tmp_path):
    folder = write(tmp_path, {"a.qweight": torch.ones(2, dtype=torch.int32)}, {"quant_method": "gptq"})
    with pytest.raises(ValueError, match="'gptq'; expected fp8"):
        open_source(folder)


def fused(experts: int = 3, inner: int = 5, hidden: int = 4) -> dict[str, Tensor]:
    """No two values equal: any wrong offset shows."""
    gate_up = torch.arange(experts * 2 * inner * hidden, dtype=torch.float32).view(experts, 2 * inner, hidden)
    down = -1 - torch.arange(experts * hidden * inner, dtype=torch.float32).view(experts, hidden, inner)
    return {f"{EXPERTS}.gate_up_proj": gate_up, f"{EXPERTS}.down_proj": down}


def test_fused_experts_appear_one_by_one(tmp_path):
    tensors = fused()
    gate_up, down = tensors.values()
    source = open_source(write(tmp_path, tensors | {"norm.weight": torch.ones(4)}, None))
    wanted = {"norm.weight": torch.ones(4)}
    for e in range(3):
        wanted[f"{EXPERTS}.{e}.gate_proj.weight"] = gate_up[e, :5]
        wanted[f"{EXPERTS}.{e}.up_proj.weight"] = gate_up[e, 5:]
        wanted[f"{EXPERTS}.{e}.down_proj.weight"] = down[e]
    assert sorted(source.names()) == sorted(wanted)
    for name, tensor in wanted.items():
        assert source.shape(name) == tensor.shape and source.dtype(name) is torch.float32
        assert torch.equal(source.read(name), tensor)
    assert source.bytes_read == sum(tensor.nbytes for tensor in wanted.values())
    cut = (slice(None), slice(1, 3))
    assert torch.equal(source.read(f"{EXPERTS}.2.down_proj.weight", cut), down[2][:, 1:3])


def test_plain_and_fused_tensors_are_views_of_one_mapping(tmp_path):
    source = open_source(write(tmp_path, fused(), None))
    first, second = (source.read(f"{EXPERTS}.{e}.up_proj.weight") for e in (0, 1))
    assert second.data_ptr() - first.data_ptr() == 2 * 5 * 4 * 4
    assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()


def test_places_follow_the_file(tmp_path):
    source = open_source(write(tmp_path, fused(), None))
    assert source.names() == sorted(source.names(), key=source.place)
    assert len({source.place(name) for name in source.names()}) == 9


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({f"{EXPERTS}.1.up_proj.weight": torch.ones(5, 4)}, r"experts\.1\.up_proj\.weight: also in .*gate_up_proj"),
        ({f"{EXPERTS}.2.down_proj.weight": torch.ones(4, 5)}, r"experts\.2\.down_proj\.weight: also in .*down_proj"),
        (without(f"{EXPERTS}.down_proj"), r"experts\.gate_up_proj: without its down_proj"),
        (without(f"{EXPERTS}.gate_up_proj"), r"experts\.down_proj: without its gate_up_proj"),
        ({f"{EXPERTS}.gate_up_proj": torch.ones(3, 9, 4)}, r"gate_up_proj \[3, 9, 4\] beside down_proj \[3, 4, 5\]"),
        (
            {f"{EXPERTS}.gate_up_proj": torch.ones(3, 4, 10), f"{EXPERTS}.down_proj": torch.ones(3, 5, 4)},
            r"gate_up_proj \[3, 4, 10\]",  # the transposed form of other libraries
        ),
    ],
)
def test_fused_experts_that_cannot_be_split_are_named(tmp_path, change, named):
    tensors = fused() | change
    folder = write(tmp_path, {name: tensor for name, tensor in tensors.items() if tensor is not None}, None)
    with pytest.raises(ValueError, match=named):
        open_source(folder)


def test_a_plain_folder_reads_as_before_even_without_config(tmp_path):
    save_file({"a": torch.ones(2, 3)}, tmp_path / "model.safetensors")
    source = open_source(str(tmp_path))
    assert source.names() == ["a"] and source.directory == tmp_path
    assert torch.equal(source.read("a", (slice(1, 2),)), torch.ones(1, 3)) and source.bytes_read == 12


def test_the_writer_saves_fp8_as_bfloat16_and_experts_one_by_one(tmp_path):
    tensors = {f"a.{kind}": tensor for kind, tensor in fp8((200, 130)).items()}
    source_dir = write(tmp_path / "source", tensors | fused(), QUANTISED)
    source = open_source(source_dir)
    with HfWriter(tmp_path / "target", source_dir) as writer:
        for name in source.names():
            writer.add(name, source.read(name).double())
    target = HfCheckpoint(tmp_path / "target")
    assert sorted(target.names()) == sorted(source.names())
    for name in source.names():
        assert target.dtype(name) is source.dtype(name) and torch.equal(target.read(name), source.read(name))
    assert json.loads((tmp_path / "target/config.json").read_text()) == {"model_type": "tiny"}
