"""`python3 -m bridge plan`: real models without their weights, and what it says about layouts that do not fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from bridge.cli.main import main
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
        ("Qwen3-30B-A3B", "--pp 25 --vpp 2", ["48 layers for 25 stages of 2 chunks", "lower --pp or --vpp"]),
        ("Qwen3-30B-A3B", "--pp 2 --layers 20,20", ["[20, 20]", "40 together", "add up to 48"]),
        ("GLM-5.2", "--pp 2 --layers 39,39", ["start on layers [39]", "such as 38,40"]),
        ("GLM-5", "--absorb --fused-norms", ["absorbed attention with fused norms"]),
        ("Qwen3-30B-A3B", "--absorb", ["absorbed attention for a qwen3_moe"]),
        ("Qwen3-30B-A3B", "--mtp", ["num_nextn_predict_layers is 0 or absent"]),
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
