"""`python3 -m bridge plan` and `convert`: real models planned without weights, small checkpoints through files."""

from __future__ import annotations

import json
import math
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
from bridge.cli.main import main
from scripts.make_tiny import write_tokenizer
from tests.bridge.fake import dense_config, hf_shapes
from tests.tiny import write_tiny_model

_EXPERTS = {"n_routed_experts": 256, "n_shared_experts": 1, "first_k_dense_replace": 3, "moe_intermediate_size": 2048}
_GLM_5 = _EXPERTS | {
    "model_type": "glm_moe_dsa",
    "vocab_size": 154880,
    "hidden_size": 6144,
    "intermediate_size": 12288,
    "num_hidden_layers": 78,
    "num_attention_heads": 64,
    "q_lora_rank": 2048,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "v_head_dim": 256,
    "index_n_heads": 32,
    "index_head_dim": 128,
    "index_topk": 2048,
}
_DEEPSEEK = _EXPERTS | {
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
REAL: dict[str, dict[str, Any]] = {
    "GLM-5": _GLM_5,
    "GLM-5.2": _GLM_5 | {"index_topk_freq": 4, "index_skip_topk_offset": 3},
    "DeepSeek-V3.2": _DEEPSEEK
    | {"model_type": "deepseek_v32", "index_n_heads": 64, "index_head_dim": 128, "index_topk": 2048},
    "DeepSeek-V3": _DEEPSEEK | {"model_type": "deepseek_v3"},
    "Qwen3-30B-A3B": {
        "model_type": "qwen3_moe",
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
    },
    "GLM-4.5": {
        "model_type": "glm4_moe",
        "vocab_size": 151552,
        "hidden_size": 5120,
        "intermediate_size": 12288,
        "moe_intermediate_size": 1536,
        "num_hidden_layers": 92,
        "num_attention_heads": 96,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "n_routed_experts": 160,
        "n_shared_experts": 1,
        "first_k_dense_replace": 3,
        "attention_bias": True,
        "use_qk_norm": True,
    },
}
# Tensors, parameters of the transformers model, correction biases (buffers there), layout
COUNTS = {
    "GLM-5": (59_079, 743_911_199_232, 19_200, "--tp 8 --pp 4 --ep 32 --absorb"),
    "GLM-5.2": (58_794, 743_377_000_704, 19_200, "--tp 8 --pp 4 --ep 32 --absorb"),
    "DeepSeek-V3.2": (45_700, 671_877_929_216, 14_848, "--tp 8 --pp 4 --ep 16 --etp 2"),
    "DeepSeek-V3": (45_395, 671_026_404_352, 14_848, "--tp 16 --ep 64"),
    "Qwen3-30B-A3B": (18_867, 30_532_122_624, 0, "--tp 4 --ep 8 --pp 2 --vpp 3"),
    "GLM-4.5": (44_189, 352_797_814_784, 14_240, "--tp 8 --pp 4 --ep 16"),
}


def write_config(folder: Path, config: dict[str, Any]) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return path


def run(command: str, *words: str | Path) -> int:
    return main(
        [command, *(part for word in words for part in ([str(word)] if isinstance(word, Path) else word.split()))]
    )


def plan(path: Path, options: str) -> dict[str, Any]:
    report = path.parent / "plan.json"
    assert run("plan", "--hf", path, options, "--json", report) == 0
    return json.loads(report.read_text())


def copied_parameters(config: dict[str, Any]) -> int:
    """What every tensor-parallel rank holds whole: norms, routers with their biases, indexers."""
    hidden, depth = config["hidden_size"], config["num_hidden_layers"]
    experts = config.get("n_routed_experts", 0)
    sparse = depth - config.get("first_k_dense_replace", 0)
    if "kv_lora_rank" in config:
        attention = config["q_lora_rank"] + config["kv_lora_rank"]
    else:
        attention = 2 * config["head_dim"]
    router = config["num_experts"] * hidden if "num_experts" in config else experts * hidden + experts
    full = 21 if "index_topk_freq" in config else depth
    heads, size = config.get("index_n_heads", 0), config.get("index_head_dim", 0)
    indexer = heads * size * config.get("q_lora_rank", 0) + size * hidden + 2 * size + heads * hidden
    return hidden * (2 * depth + 1) + attention * depth + router * sparse + indexer * full


@pytest.mark.parametrize("name", REAL)
def test_plans_of_real_models_count_what_transformers_counts(tmp_path, capsys, name):
    config, (tensors, parameters, biases, options) = REAL[name], COUNTS[name]
    report = plan(write_config(tmp_path, config), options)
    assert report["hf_tensors"] == tensors
    assert report["hf_parameters"] == parameters + biases
    assert f"{tensors:,} tensors, {parameters + biases:,} parameters" in capsys.readouterr().out

    sizes, stages = report["layout"], report["stages"]
    layers = [span for stage in stages for span in stage["layers"]]
    assert sorted(layer for start, stop in layers for layer in range(start, stop)) == list(
        range(config["num_hidden_layers"])
    )
    count = config.get("num_experts") or config["n_routed_experts"]
    sparse = config["num_hidden_layers"] - config.get("first_k_dense_replace", 0)
    experts = sparse * count * 3 * config["moe_intermediate_size"] * config["hidden_size"]
    assert sum(stage["expert_parameters"] for stage in stages) * sizes["ep"] * sizes["etp"] == experts
    dense = sum(stage["parameters"] - stage["expert_parameters"] for stage in stages) * sizes["tp"]
    multiple = 128 * sizes["tp"]
    padding = 2 * config["hidden_size"] * (-config["vocab_size"] % multiple)
    surplus = (sizes["tp"] - 1) * copied_parameters(config) + padding
    assert dense - surplus == parameters + biases - experts
    # bfloat16, and correction biases in float32
    assert (
        sum(stage["weight_bytes"] for stage in stages) == 2 * sum(stage["parameters"] for stage in stages) + 2 * biases
    )


def test_plan_of_glm_5_takes_seconds(tmp_path, capsys):
    report = plan(write_config(tmp_path, REAL["GLM-5"]), "--tp 8 --pp 4 --ep 32 --absorb --world 1024")
    assert report["seconds"] < 20 and report["ranks_per_copy"] == 128
    assert report["layout"] == {"tp": 8, "pp": 4, "vpp": 1, "ep": 32, "etp": 1}
    assert [stage["layers"] for stage in report["stages"]] == [[[0, 20]], [[20, 40]], [[40, 59]], [[59, 78]]]
    assert "20,20,19,19; choose others with --layers" in report["note"]
    # fp32 gradients; master weights and two moments spread over 32 copies of dense weights and 8 of experts
    for stage in report["stages"]:
        experts = stage["expert_parameters"]
        assert stage["gradient_bytes"] == 4 * stage["parameters"]
        assert stage["optimizer_bytes"] == 12 * experts // 8 + 12 * (stage["parameters"] - experts) // 32
    out = capsys.readouterr().out
    assert "no weight files to compare with" in out and "128 ranks hold one copy" in out


def test_stages_of_glm_52_start_on_layers_with_an_indexer(tmp_path, capsys):
    path = write_config(tmp_path, REAL["GLM-5.2"])
    chosen = plan(path, "--pp 4 --ep 64")["stages"]
    assert [stage["layers"][0][0] for stage in chosen] == [0, 18, 38, 58]
    assert plan(path, "--pp 4 --ep 64 --layers 18,20,20,20")["stages"] == chosen
    assert run("plan", "--hf", path, "--pp 4 --layers 20,20,19,19") == 1
    assert "start on layers [20, 40, 59]" in capsys.readouterr().err


def test_extra_prediction_layers_add_one_layer_to_the_last_stage(tmp_path):
    path = write_config(tmp_path, REAL["DeepSeek-V3"] | {"num_nextn_predict_layers": 1})
    with_mtp, without = (plan(path, f"--pp 4 --ep 64 --layers 16,16,16,13 {mtp}") for mtp in ("--mtp", ""))
    layer = with_mtp["hf_parameters"] - without["hf_parameters"]
    experts = 256 * 3 * 2048 * 7168
    attention = 7168 * (1536 + 576) + 1536 * 128 * 192 + 512 * 128 * 256 + 128 * 128 * 7168 + 1536 + 512
    # one whole layer; its norms and those of embedding, hidden state and output; a projection of [embedding ; hidden]
    assert layer == attention + experts + 3 * 2048 * 7168 + 256 * 7168 + 256 + 5 * 7168 + 2 * 7168 * 7168
    stages = [(a["parameters"], b["parameters"]) for a, b in zip(with_mtp["stages"], without["stages"], strict=True)]
    assert all(a == b for a, b in stages[:-1])
    embedding = 129280 * 7168  # a multiple of 128 rows; looked up again on the last stage
    assert stages[-1][0] - stages[-1][1] == embedding + (layer - experts) + experts // 64


def write_index(folder: Path, names: list[str]) -> None:
    weight_map = {name: f"model-0000{1 + number % 2}-of-00002.safetensors" for number, name in enumerate(names)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize("options", [{}, {"mtp": 1, "mtp_copies": True, "fp8": True, "dtype": "bfloat16"}], ids=str)
def test_names_are_checked_against_an_index_without_its_files(tmp_path, capsys, options):
    folder = write_tiny_model(tmp_path, "deepseek_v32", **options)
    names = list(load_file(folder / "model.safetensors"))
    (folder / "model.safetensors").unlink()
    write_index(folder, names)
    for mtp in ("", "--mtp") if "mtp" in options else ("",):
        assert run("plan", "--hf", folder, "--tp 2 --ep 2 --vocab-multiple 8", mtp) == 0
        assert "the names of the index are exactly the plan's" in capsys.readouterr().out
    wrong = "model.layers.1.mlp.experts.7.down_projection.weight"
    write_index(
        folder, [wrong if name == wrong.replace("ection", "") else name for name in names if "norm.weight" not in name]
    )
    assert run("plan", "--hf", folder) == 1
    error = capsys.readouterr().err
    assert f"{wrong.replace('ection', '')}: missing (nearest: {wrong})" in error
    assert f"{wrong}: unknown to this family (nearest: {wrong.replace('ection', '')})" in error
    assert "model.layers.2.self_attn.q_a_layernorm.weight: missing" in error


def test_a_folder_with_files_is_checked_to_shapes_and_dtypes(tmp_path, capsys):
    folder = write_tiny_model(tmp_path, "qwen3_moe")
    assert plan(folder / "config.json", "--ep 4")["checked_against"] is None
    assert run("plan", "--hf", folder, "--ep 4") == 0
    assert "names, shapes and dtypes of the weight files are exactly the plan's" in capsys.readouterr().out
    stored = load_file(folder / "model.safetensors")
    stored["model.norm.weight"] = torch.zeros(81)
    save_file(stored, folder / "model.safetensors")
    assert run("plan", "--hf", folder) == 1
    assert "model.norm.weight: shape [81], expected [80]" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "options", "messages"),
    [
        ("GLM-5", "--tp 7", ["linear_q_down_proj.weight [2048, 6144]: cannot be cut into 7", "change --tp"]),
        ("Qwen3-30B-A3B", "--tp 3", ["linear_qkv.weight [5120, 2048]: cannot be cut into 3", "change --tp"]),
        ("Qwen3-30B-A3B", "--ep 8 --etp 5", ["linear_fc1.weight [1536, 2048]: cannot be cut into 5", "change --etp"]),
        ("Qwen3-30B-A3B", "--ep 3", ["got 128 experts for 3 expert-parallel ranks", "expert_model_parallel_size"]),
        ("Qwen3-30B-A3B", "--pp 5 --vpp 2", ["48 layers for 5 pipeline stages", "set the layers of each stage"]),
        ("Qwen3-30B-A3B", "--pp 2 --layers 20,20", ["[20, 20]", "40 together", "add up to 48"]),
        ("GLM-5.2", "--pp 2", ["start on layers [39]", "such as 38,40"]),
        ("GLM-5", "--absorb --fused-norms", ["absorbed attention with fused norms"]),
        (
            "GLM-4.5",
            "--tp 4 --pp 4 --ep 16 --world 48",
            ["--world 48 for copies of 64 ranks (experts)", "change --world"],
        ),
    ],
)
def test_what_does_not_fit_names_what_to_change(tmp_path, capsys, name, options, messages):
    assert run("plan", "--hf", write_config(tmp_path, REAL[name]), options) == 1
    error = capsys.readouterr().err
    assert error.startswith("bridge plan: ") and all(message in error for message in messages), error


def test_a_missing_folder_and_an_unknown_family_are_named(tmp_path, capsys):
    assert run("plan", "--hf", tmp_path / "nowhere") == 1
    assert "nowhere without config.json" in capsys.readouterr().err
    assert run("plan", "--hf", write_config(tmp_path, {"model_type": "gpt2"})) == 1
    assert "'gpt2'" in capsys.readouterr().err


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
        ("glm_moe_dsa", {"mtp": 1, "dtype": "bfloat16"}, "--tp 2 --pp 2 --layers 2,1 --ep 2 --absorb --mtp"),
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
    assert "copied 44 tensors of extra prediction (MTP) layers unchanged" in capsys.readouterr().out
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
    allowed = 3 * max(sizes) + (16 << 20)
    assert max(sizes) == 8 << 20 and sum(sizes) > 4 * allowed
    hf, mcore, back = (tmp_path / name for name in ("hf", "mcore", "back"))
    hf.mkdir()
    write_config(hf, config)
    save_file({n: torch.ones(s, dtype=torch.bfloat16) for n, s in shapes.items()}, hf / "model.safetensors")
    commands = [["--hf", hf, "--out", mcore, "--tp", 2], ["--mcore", mcore, "--out", back]]
    words = json.dumps([["convert", *map(str, command)] for command in commands])
    done = subprocess.run([sys.executable, "-c", MEASURE, words], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    peaks = json.loads(done.stdout.splitlines()[-1])
    assert max(peaks) < allowed, f"{peaks} bytes for {sum(sizes)} in tensors of {max(sizes)}"
    assert open_source(back).shape("model.norm.weight") == (1024,)
