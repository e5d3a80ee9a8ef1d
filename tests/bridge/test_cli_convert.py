"""`python3 -m bridge convert`: small checkpoints through files, there and back."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from bridge import HfCheckpoint, open_source
from scripts.make_tiny import write_tokenizer
from tests.bridge.fake import dense_config, hf_shapes
from tests.bridge.test_cli import run, write_config
from tests.tiny import write_tiny_model


def assert_same(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    assert [n for n in got if got[n].dtype != want[n].dtype or not torch.equal(got[n], want[n])] == []


def folder_tensors(folder: Path) -> dict[str, Tensor]:
    source = HfCheckpoint(folder)
    return {name: source.read(name).clone() for name in source.names()}


def config_in(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


SMALL = "--vocab-multiple 8"


@pytest.mark.parametrize(
    ("kind", "options", "layout"),
    [
        (
            "glm_moe_dsa",
            {"mtp": 1, "mtp_copies": True, "dtype": "bfloat16"},
            "--tp 2 --pp 2 --layers 2,1 --ep 2 --absorb --mtp",
        ),
        ("deepseek_v32", {}, "--tp 4 --ep 2 --etp 2 --whole-down --indexer-rows last-interleaved"),
        ("glm4_moe", {"mtp": 1}, "--tp 2 --ep 4 --experts grouped --mtp --mtp-inner mtp_model_layer. --fused-norms"),
        ("qwen3_tied", {}, "--tp 4 --pp 3"),
    ],
    ids=lambda value: value if isinstance(value, str) and "-" not in value else "",
)
def test_there_and_back_is_bit_equal(tmp_path, kind, options, layout):
    hf = write_tiny_model(tmp_path / "hf", kind, **options)
    write_tokenizer(hf)
    assert run("convert", "--hf", hf, "--out", tmp_path / "mcore", SMALL, layout) == 0
    assert run("convert", "--mcore", tmp_path / "mcore", "--out", tmp_path / "back") == 0
    assert_same(folder_tensors(tmp_path / "back"), load_file(hf / "model.safetensors"))
    assert config_in(tmp_path / "back") == config_in(hf)
    text = "the quick brown fox"
    assert AutoTokenizer.from_pretrained(tmp_path / "back")(text) == AutoTokenizer.from_pretrained(hf)(text)


def test_shards_to_shards_equal_those_written_directly(tmp_path):
    """From the split form on two ranks to the combined one on four expert ranks, and back."""
    split, combined = "--tp 2 --ep 2 --absorb", "--ep 4 --pp 3"
    hf = write_tiny_model(tmp_path / "hf", "glm_moe_dsa", dtype="bfloat16")
    for name, layout in (("split", split), ("combined", combined)):
        assert run("convert", "--hf", hf, "--out", tmp_path / name, SMALL, layout) == 0
    keys = [set(load_file(next((tmp_path / name).glob("tp00-pp00-*")))) for name in ("split", "combined")]
    assert any("linear_k_up_proj" in key for key in keys[0]) and not any("linear_kv_up" in key for key in keys[0])
    assert any("linear_kv_up_proj" in key for key in keys[1]) and not any("linear_k_up" in key for key in keys[1])
    for source, target, layout in (("split", "combined", combined), ("combined", "split", split)):
        out = tmp_path / f"{target}_again"
        assert run("convert", "--mcore", tmp_path / source, "--to mcore --out", out, SMALL, layout) == 0
        manifests = [json.loads((folder / "manifest.json").read_text()) for folder in (tmp_path / target, out)]
        assert manifests[0] == manifests[1]  # with the checksum of every file


def test_fp8_becomes_bfloat16_and_config_json_forgets_it(tmp_path, capsys):
    hf = write_tiny_model(tmp_path / "hf", "deepseek_v3", dtype="bfloat16", fp8=True, hidden_size=160, mtp=1)
    stored, want = load_file(hf / "model.safetensors"), {}
    for name, tensor in stored.items():
        if tensor.dtype is torch.float8_e4m3fn:
            rows, columns = (torch.arange(size) // 128 for size in tensor.shape)
            want[name] = (tensor.float() * stored[f"{name}_scale_inv"][rows][:, columns]).bfloat16()
        elif not name.endswith("_scale_inv"):
            want[name] = tensor
    assert len(want) < len(stored) and "quantization_config" in config_in(hf)
    assert run("convert", "--hf", hf, "--to hf --out", tmp_path / "plain") == 0
    assert_same(folder_tensors(tmp_path / "plain"), want)
    assert config_in(tmp_path / "plain") == {k: v for k, v in config_in(hf).items() if k != "quantization_config"}
    # by way of shards, the same
    assert run("convert", "--hf", hf, "--out", tmp_path / "mcore", SMALL, "--tp 2 --ep 2 --mtp") == 0
    assert run("convert", "--mcore", tmp_path / "mcore", "--out", tmp_path / "back") == 0
    assert_same(folder_tensors(tmp_path / "back"), want)
    assert "quantization_config" not in config_in(tmp_path / "back")


def test_untrained_prediction_layers_are_carried_over_or_dropped(tmp_path, capsys):
    hf = write_tiny_model(tmp_path / "hf", "glm4_moe", mtp=1, mtp_copies=True)
    stored = load_file(hf / "model.safetensors")
    kept = {name: tensor for name, tensor in stored.items() if not name.startswith("model.layers.3.")}
    assert run("convert", "--hf", hf, "--to hf --out", tmp_path / "carried") == 0
    assert_same(folder_tensors(tmp_path / "carried"), stored)
    assert config_in(tmp_path / "carried")["num_nextn_predict_layers"] == 1

    assert run("convert", "--hf", hf, "--to hf --drop-mtp --out", tmp_path / "dropped") == 0
    assert run("convert", "--hf", hf, "--out", tmp_path / "mcore", SMALL) == 0
    assert "left out 46 tensors: extra prediction (MTP) layers, not trained" in capsys.readouterr().out
    assert run("convert", "--mcore", tmp_path / "mcore", "--out", tmp_path / "back") == 0
    assert "num_nextn_predict_layers=0 into config.json" in capsys.readouterr().out
    for name in ("dropped", "back"):
        assert_same(folder_tensors(tmp_path / name), kept)
        assert config_in(tmp_path / name)["num_nextn_predict_layers"] == 0
        assert_loads(tmp_path / name)


def assert_loads(folder: Path) -> torch.nn.Module:
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    return model


def test_many_tensors_become_several_files_that_transformers_loads(tmp_path):
    hf = write_tiny_model(tmp_path / "hf", "qwen3_moe", num_experts=64)
    write_tokenizer(hf)
    (hf / "generation_config.json").write_text(json.dumps({"temperature": 0.5}))
    out = tmp_path / "out"
    assert run("convert", "--hf", hf, "--out", tmp_path / "mcore", SMALL, "--tp 2 --ep 4") == 0
    assert run("convert", "--mcore", tmp_path / "mcore", "--out", out) == 0
    files = sorted(path.name for path in out.glob("*.safetensors"))
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert files[0] == f"model-00001-of-0000{len(files)}.safetensors" and len(files) >= 2
    assert {name: file for file in files for name in load_file(out / file)} == index["weight_map"]
    want = load_file(hf / "model.safetensors")
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in want.values())
    assert_same(folder_tensors(out), want)
    assert config_in(out) == config_in(hf) and AutoConfig.from_pretrained(out).num_experts == 64
    assert AutoTokenizer.from_pretrained(out).chat_template
    model, reference = assert_loads(out), AutoModelForCausalLM.from_pretrained(hf)
    assert model.generation_config.temperature == 0.5
    tokens = torch.arange(3, 27)[None]
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, reference(tokens).logits)


def test_a_folder_in_use_and_broken_shards_are_refused(tmp_path, capsys):
    hf = write_tiny_model(tmp_path / "hf", "llama")
    assert run("convert", "--hf", hf, "--out", tmp_path / "mcore", SMALL) == 0
    assert run("convert", "--hf", hf, "--out", tmp_path / "mcore", SMALL) == 1
    assert "choose another --out" in capsys.readouterr().err
    assert run("convert", "--mcore", tmp_path / "mcore", "--out", hf) == 1
    assert "which is not empty" in capsys.readouterr().err
    (shard,) = (tmp_path / "mcore").glob("*.safetensors")
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    assert run("convert", "--mcore", tmp_path / "mcore", "--out", tmp_path / "back") == 1
    assert f"{shard.name}: content changed" in capsys.readouterr().err
    assert not (tmp_path / "back").exists()


MEASURE = """
import json, sys, threading, time
from bridge.cli.main import main

def anonymous():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("RssAnon")) * 1024

def peak_of(arguments):
    done, peak, before = threading.Event(), [0], anonymous()
    def watch():
        while not done.is_set():
            peak[0] = max(peak[0], anonymous())
            time.sleep(0.001)
    watcher = threading.Thread(target=watch)
    watcher.start()
    assert main(arguments) == 0
    done.set()
    watcher.join()
    return peak[0] - before

print(json.dumps([peak_of(arguments) for arguments in json.loads(sys.argv[1])]))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's memory counters")
def test_memory_is_bounded_by_a_few_tensors_not_by_the_model(tmp_path):
    """Memory of its own, without pages of mapped files, which the system takes back when it needs them."""
    config = dense_config(
        vocab_size=2048, hidden_size=1024, intermediate_size=4096, num_hidden_layers=6, head_dim=256, dtype="bfloat16"
    )
    shapes = hf_shapes(config)
    sizes = [2 * math.prod(shape) for shape in shapes.values()]
    allowed = 3 * max(sizes) + (8 << 20)
    assert max(sizes) == 8 << 20 and sum(sizes) > 4 * allowed
    hf, mcore, back = (tmp_path / name for name in ("hf", "mcore", "back"))
    hf.mkdir()
    write_config(hf, config)
    save_file({n: torch.ones(s, dtype=torch.bfloat16) for n, s in shapes.items()}, hf / "model.safetensors")
    commands = [["--hf", hf, "--out", mcore, "--tp", 2], ["--mcore", mcore, "--out", back]]
    words = json.dumps([["convert", *map(str, command)] for command in commands])
    frees_at_once = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(1 << 20)}  # glibc would keep what was freed
    command = [sys.executable, "-c", MEASURE, words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=frees_at_once)
    assert done.returncode == 0, done.stderr
    peaks = json.loads(done.stdout.splitlines()[-1])
    assert max(peaks) < allowed, f"{peaks} bytes for {sum(sizes)} in tensors of {max(sizes)}"
    assert open_source(back).shape("model.norm.weight") == (1024,)
