"""Reading slices and refusing damaged folders; writing folders that other libraries read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from bridge import HfCheckpoint, HfWriter, hf_writer

TENSORS = {
    "a": torch.arange(24, dtype=torch.float32).view(4, 6),
    "b": torch.arange(7, dtype=torch.bfloat16),
    "c": torch.tensor(3.0),
}


def write(folder: Path, index: dict[str, str] | None = None) -> Path:
    """One file, or two files `x` (a) and `y` (b, c) with an index."""
    if index is None:
        save_file(TENSORS, folder / "model.safetensors")
    else:
        save_file({"a": TENSORS["a"]}, folder / "x.safetensors")
        save_file({"b": TENSORS["b"], "c": TENSORS["c"]}, folder / "y.safetensors")
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return folder


INDEX = {"a": "x.safetensors", "b": "y.safetensors", "c": "y.safetensors"}


@pytest.mark.parametrize("index", [None, INDEX])
def test_reads_whole_tensors_and_slices_and_counts_their_bytes(tmp_path, index):
    checkpoint = HfCheckpoint(write(tmp_path, index))
    assert sorted(checkpoint.names()) == ["a", "b", "c"]
    assert all(torch.equal(checkpoint.read(name), tensor) for name, tensor in TENSORS.items())
    assert checkpoint.bytes_read == 24 * 4 + 7 * 2 + 4
    assert checkpoint.shape("a") == (4, 6) and checkpoint.dtype("b") is torch.bfloat16
    assert torch.equal(checkpoint.read("a", (slice(1, 3),)), TENSORS["a"][1:3])
    assert torch.equal(checkpoint.read("a", (slice(None), slice(2, 4))), TENSORS["a"][:, 2:4])
    assert checkpoint.bytes_read == 24 * 4 + 7 * 2 + 4 + 2 * 6 * 4 + 4 * 2 * 4


def test_reading_never_changes_the_file(tmp_path):
    write(tmp_path)
    HfCheckpoint(tmp_path).read("a").zero_()
    assert torch.equal(HfCheckpoint(tmp_path).read("a"), TENSORS["a"])


def raw_file(path: Path, header: dict, data: bytes) -> None:
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def test_reads_a_tensor_at_an_offset_its_dtype_cannot_view(tmp_path):
    header = {
        "x": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
        "y": {"dtype": "F32", "shape": [2], "data_offsets": [1, 9]},
    }
    raw_file(tmp_path / "model.safetensors", header, b"\x07" + torch.tensor([1.5, -2.0]).numpy().tobytes())
    assert HfCheckpoint(tmp_path).read("y").tolist() == [1.5, -2.0]


@pytest.mark.parametrize("cut", [1, 60, 10**6])
def test_a_truncated_file_is_named(tmp_path, cut):
    write(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-cut] if cut < 1000 else b"abc")
    with pytest.raises(ValueError, match=r"model\.safetensors.*truncated or damaged"):
        HfCheckpoint(tmp_path)


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]},
        {"dtype": "F32", "shape": [2]},
        7,
    ],
)
def test_a_header_that_contradicts_itself_is_named(tmp_path, entry):
    raw_file(tmp_path / "model.safetensors", {"x": entry}, bytes(12))
    with pytest.raises(ValueError, match=r"model\.safetensors"):
        HfCheckpoint(tmp_path)


def test_index_and_files_must_agree(tmp_path):
    with pytest.raises(ValueError, match=r"y\.safetensors with tensors \['c'\]"):
        HfCheckpoint(write(tmp_path, {"a": "x.safetensors", "b": "y.safetensors"}))
    with pytest.raises(ValueError, match=r"without \['d'\]"):
        HfCheckpoint(write(tmp_path, {**INDEX, "d": "y.safetensors"}))
    with pytest.raises(ValueError, match=r"no file .*z\.safetensors"):
        HfCheckpoint(write(tmp_path, {**INDEX, "d": "z.safetensors"}))


def test_a_folder_without_safetensors_is_explained(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(ValueError, match=r"without model\.safetensors"):
        HfCheckpoint(tmp_path)


def test_writer_splits_into_shards_with_an_index(tmp_path):
    tensors = {"a": TENSORS["a"], "c": TENSORS["c"], "b": TENSORS["b"]}
    with HfWriter(tmp_path, max_shard_bytes=100) as writer:
        for name, tensor in tensors.items():
            writer.add(name, tensor)
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    assert sorted(path.name for path in tmp_path.iterdir()) == [first, second, "model.safetensors.index.json"]
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index == {"metadata": {"total_size": 96 + 4 + 14}, "weight_map": {"a": first, "c": first, "b": second}}
    loaded = load_file(tmp_path / first) | load_file(tmp_path / second)
    assert loaded.keys() == tensors.keys() and all(torch.equal(loaded[name], tensors[name]) for name in loaded)


def test_writer_makes_one_plain_file_when_one_is_enough(tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text("{}")  # an older, sharded model in the same folder
    (tmp_path / "model-00001-of-00002.safetensors").write_bytes(b"old")
    writer = HfWriter(tmp_path)
    writer.add("b", TENSORS["a"].T)  # not contiguous
    writer.finish()
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert torch.equal(file.get_tensor("b"), TENSORS["a"].T)


def test_writer_starts_a_shard_when_the_header_is_full(tmp_path, monkeypatch):
    monkeypatch.setattr(hf_writer, "HEADER_BYTES", 1024)
    tensors = {f"layer.{i}.weight": torch.full((3,), float(i)) for i in range(40)}
    with HfWriter(tmp_path) as writer:
        for name, tensor in tensors.items():
            writer.add(name, tensor)
    checkpoint = HfCheckpoint(tmp_path)
    assert len(list(tmp_path.glob("model-*"))) > 2
    assert all(torch.equal(checkpoint.read(name), tensor) for name, tensor in tensors.items())


def test_writer_keeps_every_dtype_viewable(tmp_path):
    with HfWriter(tmp_path) as writer:
        writer.add("odd", torch.ones(3, dtype=torch.bfloat16))
        writer.add("wide", torch.ones(2, dtype=torch.float32))
    assert torch.equal(HfCheckpoint(tmp_path).read("wide"), torch.ones(2))
    assert len(list(tmp_path.glob("model-*.safetensors"))) == 2


def test_writer_restores_source_dtypes_and_copies_what_a_model_folder_needs(tmp_path):
    source, target = tmp_path / "source", tmp_path / "target"
    (source / "additional_chat_templates").mkdir(parents=True)
    save_file({"router": torch.ones(2), "weight": torch.ones(2, dtype=torch.bfloat16)}, source / "model.safetensors")
    (source / "config.json").write_text('{"vocab_size": 130, "quantization_config": {"quant_method": "fp8"}}')
    for name in (
        "generation_config.json",
        "tokenizer.json",
        "chat_template.jinja",
        "additional_chat_templates/tool.jinja",
        "modeling.py",
    ):
        (source / name).write_text("{}")
    (source / "optimizer.pt").write_bytes(b"x")
    with HfWriter(target, source) as writer:
        writer.add("router", torch.full((2,), 2.0, dtype=torch.bfloat16))
        writer.add("weight", torch.full((2,), 2.0, dtype=torch.bfloat16))
    written = HfCheckpoint(target)
    assert written.dtype("router") is torch.float32 and written.dtype("weight") is torch.bfloat16
    assert json.loads((target / "config.json").read_text()) == {"vocab_size": 130}
    names = {str(path.relative_to(target)) for path in target.rglob("*") if path.is_file()}
    assert names == {"config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja", "modeling.py",
                     "additional_chat_templates/tool.jinja", "model.safetensors"}  # fmt: skip


def test_writer_errors_leave_nothing_behind(tmp_path):
    with pytest.raises(ValueError, match="got a twice"), HfWriter(tmp_path, max_shard_bytes=10) as writer:
        writer.add("a", TENSORS["a"])
        writer.add("b", TENSORS["b"])
        writer.add("a", TENSORS["a"])
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError, match="two folders"):
        HfWriter(write(tmp_path), tmp_path)
