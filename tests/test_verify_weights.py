"""The command that proves a checkpoint in the real Megatron model."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from bridge import open_source
from bridge.models import Target, family_extras
from scripts.verify_weights import compare, main
from tests.bridge.fake import dense_config, random_weights, write_folder
from tests.tiny import write_tiny_model


def report(capsys: pytest.CaptureFixture[str]) -> dict:
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def file_bytes(folder: Path) -> int:
    return sum(tensor.nbytes for tensor in load_file(folder / "model.safetensors").values())


@pytest.mark.gloo
def test_two_tensor_parallel_ranks(tmp_path, capsys):
    folder = write_tiny_model(tmp_path, "qwen3")
    assert main(["--hf", str(folder), "--tp", "2"]) == 0
    found = report(capsys)
    assert (found["model_type"], found["tensors"], found["bit_equal"], found["differing"]) == ("qwen3", 36, True, [])
    assert found["layout"] == {"tp": 2, "pp": 1, "vpp": 1, "ep": 1, "etp": 1, "absorb": False, "world": 2}
    assert 0 <= found["max_log_prob_difference"] < 5e-6
    # both ranks read the norms: 7 of size 80, and 3 layers x 2 of size 24
    assert sum(found["bytes_read_per_rank"]) == file_bytes(folder) + 4 * (7 * 80 + 6 * 24)


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.parametrize(
    ("kind", "changes", "options", "tensors"),
    [
        ("glm_moe_dsa", {}, "--tp 2 --ep 2 --absorb", 106),
        ("qwen3_moe", {}, "--pp 2 --first-stage-layers 1 --ep 2", 102),
        ("deepseek_v32", {"fp8": True, "dtype": "bfloat16", "mtp": 1, "mtp_copies": True}, "--ep 2", 106),
    ],
)
def test_experts_stages_and_fp8(tmp_path, capsys, kind, changes, options, tensors):
    folder = write_tiny_model(tmp_path, kind, **changes)
    assert main(["--hf", str(folder), *options.split()]) == 0
    found = report(capsys)
    assert found["bit_equal"] and found["tensors"] == tensors and found["max_log_prob_difference"] < 5e-6
    assert len(found["bytes_read_per_rank"]) == found["layout"]["world"] and min(found["bytes_read_per_rank"]) > 0


@pytest.mark.slow
@pytest.mark.gloo
def test_values_lost_in_a_narrower_model_are_named_and_end_with_1(tmp_path, capsys):
    folder = write_tiny_model(tmp_path, "qwen3")
    assert main(["--hf", str(folder), "--dtype", "bfloat16", "--tolerance", "1e-6"]) == 1
    out, err = capsys.readouterr()
    found = json.loads(out.splitlines()[-1])
    assert not found["bit_equal"] and set(found["differing"]) == set(load_file(folder / "model.safetensors"))
    assert "verify_weights: model.norm.weight: differs from the file\n" in err
    assert re.search(r"log-probs differ from transformers by 0\.\d+, more than 1e-06", err)


def test_a_truncated_file_is_named_before_any_rank_starts(tmp_path, capsys):
    folder = write_tiny_model(tmp_path, "qwen3")
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:-1])
    assert main(["--hf", str(folder)]) == 1
    assert re.search(r"verify_weights: got .*model\.safetensors with .*truncated or damaged", capsys.readouterr().err)


@pytest.mark.gloo
def test_ranks_that_do_not_finish_are_ended(tmp_path, capsys):
    folder = write_tiny_model(tmp_path, "qwen3")
    assert main(["--hf", str(folder), "--timeout", "0.1"]) == 1
    assert "got no result in 0.1 s" in capsys.readouterr().err
    assert not torch.multiprocessing.active_children()


def stream_of(hf: dict[str, Tensor], **changes: Tensor | None) -> list[tuple[str, Tensor]]:
    changed = {name.replace("__", "."): tensor for name, tensor in changes.items()}
    return [(name, tensor) for name, tensor in {**hf, **changed}.items() if tensor is not None]


def test_changed_missing_foreign_and_repeated_tensors_differ(tmp_path):
    config = dense_config(tied=True)
    hf = {name: tensor.bfloat16() for name, tensor in random_weights(config).items()}
    repeated_head = {"lm_head.weight": hf["model.embed_tokens.weight"].clone()}
    source = open_source(write_folder(tmp_path, config, hf | repeated_head))
    extras = family_extras(config, Target())
    in_float32 = [(name, tensor.float()) for name, tensor in hf.items()]
    assert compare(in_float32, source, extras) == (len(hf), [])

    changed = hf["model.norm.weight"].clone()
    changed[79] = changed[79].float() * (1 + 2**-7)  # the next value bfloat16 has
    wrong = stream_of(hf, model__norm__weight=changed, model__foreign__weight=changed)
    lost = wrong.pop(3)[0]
    assert compare([*wrong, wrong[0]], source, extras) == (
        len(hf),
        ["model.norm.weight", "model.foreign.weight", wrong[0][0], lost],
    )
