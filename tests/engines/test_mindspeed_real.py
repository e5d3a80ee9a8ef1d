"""The Ascend path on the real MindSpeed, short of the device: registry -> bootstrap -> repatch -> build -> bridge.

Needs a checkout of MindSpeed, branch core_r0.16.0, named by MINDSPEED_PATH, and the packages scipy and einops that
it imports. MindSpeed changes Megatron and torch for the whole process, so each run has processes of its own.
Of the device only stand-ins exist (fake_npu.py): this says nothing about kernels, speed or memory.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from engines import build_train_engine
from engines.spec import MegatronSpec, ModelSpec, TrainEngineSpec
from tests.engines.mindspeed_run import KEY_EPS, SEQUENCES, learn, optimizer_spec
from tests.ranks import run_ranks
from tests.tiny import write_tiny_model

ROOT = Path(__file__).resolve().parents[2]
CHECKOUT = os.environ.get("MINDSPEED_PATH", "")
ABSENT = [name for name in ("scipy", "einops") if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.mindspeed,
    pytest.mark.skipif(
        not Path(CHECKOUT, "mindspeed").is_dir() or CHECKOUT == "",
        reason="set MINDSPEED_PATH to a checkout of MindSpeed, branch core_r0.16.0",
    ),
    pytest.mark.skipif(bool(ABSENT), reason=f"MindSpeed imports {', '.join(ABSENT)}: pip install them"),
]
HEADS, LATENT, QUERY_LATENT, NOPE, ROPE, VALUE, HIDDEN = 4, 22, 36, 12, 8, 28, 80
INDEX_HEADS, INDEX_SIZE, VOCAB = 16, 20, 130


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("glm5"), "glm_moe_dsa")


def start(folder: Path, scratch: Path, path: str, world: int = 1) -> list[dict[str, Any]]:
    """The results of all ranks of one run, in order."""
    search = os.pathsep.join([CHECKOUT, str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": search, "OMP_NUM_THREADS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    environment["TORCH_EXTENSIONS_DIR"] = str(scratch / "extensions")  # MindSpeed tidies this folder when imported
    ranks = [
        subprocess.Popen(
            [
                *(
                    sys.executable,
                    "-m",
                    "tests.engines.mindspeed_run",
                    str(folder),
                    str(scratch / f"{path}{world}.store"),
                ),
                *(str(rank), str(world), str(scratch / f"{path}{world}.{rank}"), path),
            ],
            env=environment,
            cwd=scratch,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    try:
        for rank in ranks:
            _, errors = rank.communicate(timeout=200)
            assert rank.returncode == 0, errors[-6000:]
    finally:
        for rank in ranks:
            rank.kill()
    return [torch.load(scratch / f"{path}{world}.{rank}", weights_only=False) for rank in range(world)]


@pytest.fixture(scope="module")
def unpacked(folder, tmp_path_factory) -> dict[str, Any]:
    return start(folder, tmp_path_factory.mktemp("unpacked"), "unpacked")[0]


@pytest.fixture(scope="module")
def packed(folder, tmp_path_factory) -> dict[str, Any]:
    return start(folder, tmp_path_factory.mktemp("packed"), "packed")[0]


@pytest.fixture(scope="module")
def logits(folder) -> list[torch.Tensor]:
    """[tokens, vocabulary] of transformers per sequence."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        return [model(torch.tensor([ids])).logits[0] for ids in SEQUENCES]


def attention_shapes(tp: int) -> dict[str, tuple[int, ...]]:
    """Parameters of one absorbed, sparse attention layer, [out, in]; what is not divided is held by every rank."""
    indexer = "core_attention.indexer."
    return {
        "linear_q_down_proj.weight": (QUERY_LATENT, HIDDEN),
        "q_layernorm.weight": (QUERY_LATENT,),
        "linear_q_up_proj.weight": (HEADS * (NOPE + ROPE) // tp, QUERY_LATENT),
        "linear_kv_down_proj.weight": (LATENT + ROPE, HIDDEN),
        "kv_layernorm.weight": (LATENT,),
        "linear_k_up_proj.weight": (HEADS * NOPE // tp, LATENT),
        "linear_v_up_proj.weight": (HEADS * VALUE // tp, LATENT),
        "linear_proj.weight": (HIDDEN, HEADS * VALUE // tp),
        indexer + "linear_wq_b.weight": (INDEX_HEADS * INDEX_SIZE, QUERY_LATENT),
        indexer + "linear_wk.weight": (INDEX_SIZE, HIDDEN),
        indexer + "k_norm.weight": (INDEX_SIZE,),
        indexer + "k_norm.bias": (INDEX_SIZE,),
        indexer + "linear_weights_proj.weight": (INDEX_HEADS, HIDDEN),
    }


def layer(values: dict[str, Any], number: int) -> dict[str, Any]:
    prefix = f"decoder.layers.{number}.self_attention."
    return {name.removeprefix(prefix): value for name, value in values.items() if name.startswith(prefix)}


def test_the_absorbed_layer_is_built_with_its_names_and_shapes(unpacked):
    assert unpacked["early"] == [], "nothing of Megatron may be loaded before MindSpeed"
    assert unpacked["attention"] == "MLASelfAttentionAbsorb"
    assert unpacked["key_norm"] == KEY_EPS, "the run's own epsilon, not the one of the layers"
    assert unpacked["argv"][-1] == "unpacked", "the command line is given back after the import"
    for number in range(3):
        assert layer(unpacked["shapes"], number) == attention_shapes(tp=1)


def test_unfused_logits_equal_transformers_and_the_export_is_the_file(unpacked, folder, logits):
    difference = float((unpacked["logits"][:, :VOCAB] - logits[2]).abs().max())
    assert difference <= 5e-6, f"logits differ by {difference}"
    assert float(logits[2].abs().max()) > 1, "logits near zero would prove little"
    source = load_file(folder / "model.safetensors")
    assert source.keys() == unpacked["export"].keys()
    for name, tensor in unpacked["export"].items():
        assert torch.equal(tensor, source[name]), name


def test_packed_log_probs_equal_transformers(packed, logits):
    """The fused path orders indexer rows differently: a bridge without the permutation fails here."""
    expected: list[float] = []
    for ids, logits_TV in zip(SEQUENCES, logits, strict=True):
        log_probs_TV = logits_TV.log_softmax(-1)
        expected += [0.0, *(float(log_probs_TV[t, ids[t + 1]]) for t in range(len(ids) - 1))]
    assert float((packed["log_probs"] - torch.tensor(expected)).abs().max()) <= 5e-6


def test_indexers_are_frozen_and_replicated_weights_are_not_marked_as_split(packed):
    shapes, split = attention_shapes(tp=1), layer(packed["split"], 1)
    whole = {name for name, shape in attention_shapes(tp=2).items() if shape == shapes[name]}
    assert {name for name, marked in split.items() if not marked} == whole
    assert not [name for name in packed["trained"] if ".indexer." in name]
    assert len(packed["trained"]) == len(packed["shapes"]) - 3 * 5


def _learn(rank: int, world: int, folder: str) -> list[dict[str, float]]:
    backend = MegatronSpec(dtype="float32")
    engine = build_train_engine(TrainEngineSpec("megatron", "cpu", ModelSpec(folder), backend, optimizer_spec()))
    engine.load(folder)
    return learn(engine)


@pytest.mark.gloo
def test_updates_follow_the_portable_layers_on_one_rank_and_two(packed, folder, tmp_path):
    expected = run_ranks(_learn, 1, str(folder))[0]
    two = start(folder, tmp_path, "packed", world=2)
    assert layer(two[1]["shapes"], 2) == attention_shapes(tp=2)
    assert torch.allclose(two[0]["log_probs"], packed["log_probs"], atol=5e-6, rtol=0)
    for steps in (packed["steps"], two[0]["steps"]):
        for want, got in zip(expected, steps, strict=True):
            for key in ("loss", "actor/grad_norm"):
                assert got[key] == pytest.approx(want[key], rel=1e-4), key
