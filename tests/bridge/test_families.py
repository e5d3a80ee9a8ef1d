"""Every family against the files transformers saves, and what its config.json may not say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from bridge import check_supported, open_source
from bridge.layout import Layout
from bridge.models import family_rules, full_indexer_layers, num_experts
from bridge.models.moe import moe_layers
from bridge.models.scope import Target
from bridge.offline import OfflineModel
from bridge.ops import RopeRows
from bridge.pipeline import stage_layers
from bridge.predict import Form
from bridge.source_check import check_source
from tests.bridge.families import CONFIGS, config_of
from tests.tiny import KINDS, MOE_KINDS, write_tiny_model

LATENT = ("deepseek_v3", "deepseek_v32", "glm_moe_dsa")
SHARED = {"num_hidden_layers": 5, "index_topk_freq": 2, "index_skip_topk_offset": 2}
NOT_TRAINED = "extra prediction (MTP) layers, not trained"
MTP_NAMES = {  # of one layer, without the copies: norms and projection, two norms, attention, experts
    "glm4_moe": 4 + 2 + (4 + 3 + 2) + (8 * 3 + 2 + 3),
    "deepseek_v3": 4 + 2 + 7 + (8 * 3 + 2 + 3),
    "deepseek_v32": 4 + 2 + 7 + 5 + (8 * 3 + 2 + 3),
    "glm_moe_dsa": 4 + 2 + 7 + 5 + (8 * 3 + 2 + 3),
}


def config_in(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def plan_of(config: dict[str, Any], mtp: bool = False) -> OfflineModel:
    layers = stage_layers(config["num_hidden_layers"], 1)
    return OfflineModel.make(config, Form(mtp=mtp), Layout(), layers, torch.float32)


def left_out(folder: Path, mtp: bool = False) -> dict[str, int]:
    model = plan_of(config_in(folder), mtp)
    return check_source(model.plan, open_source(folder), model.extras, str(folder))


def add(folder: Path, *names_of: str, **tensors: torch.Tensor) -> None:
    """Rewrite the folder's file with more tensors; `names_of` are (new name, name of the tensor to copy)."""
    stored = load_file(folder / "model.safetensors")
    more = {new: stored[old].clone() for new, old in names_of}
    save_file({**stored, **more, **tensors}, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        *((kind, {}) for kind in (*KINDS, *MOE_KINDS)),
        ("glm_moe_dsa", SHARED),
        ("qwen3_moe", {"mlp_only_layers": [1]}),
        ("qwen3_moe", {"decoder_sparse_step": 2}),
        ("glm4_moe", {"attention_bias": False, "use_qk_norm": False}),
        ("deepseek_v3", {"q_lora_rank": None}),
        ("deepseek_v3_tied", {}),
        ("deepseek_v32", {"fp8": True, "dtype": "bfloat16"}),
    ],
    ids=str,
)
def test_the_plan_asks_for_exactly_the_tensors_transformers_saves(tmp_path, kind, options):
    folder = write_tiny_model(tmp_path, kind, **options)
    plan = plan_of(config_in(folder)).plan
    stored = {
        name: tuple(tensor.shape)
        for name, tensor in load_file(folder / "model.safetensors").items()
        if not name.endswith("_scale_inv")
    }
    assert plan.hf_shapes == stored
    assert left_out(folder) == {}


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        *((kind, {}) for kind in MTP_NAMES),
        ("deepseek_v3", {"mtp_copies": True}),
        ("deepseek_v3_tied", {"mtp_copies": True}),
        ("deepseek_v32", {"mtp_copies": True, "fp8": True, "dtype": "bfloat16"}),
        ("glm_moe_dsa", SHARED),
        ("deepseek_v3", {"mtp": 2}),
    ],
    ids=str,
)
def test_extra_prediction_layers_are_planned_or_left_out_and_counted(tmp_path, kind, options):
    options = {"mtp": 1, **options}
    folder = write_tiny_model(tmp_path, kind, **options)
    assert left_out(folder, mtp=True) == {}
    names = MTP_NAMES[kind.removesuffix("_tied")]
    copies = 2 if "mtp_copies" in options else 0
    assert left_out(folder) == {NOT_TRAINED: options["mtp"] * (names + copies)}
    with_mtp, without = (set(plan_of(config_in(folder), mtp).plan.hf_shapes) for mtp in (True, False))
    assert len(with_mtp - without) == options["mtp"] * names and without < with_mtp


@pytest.mark.parametrize("copy", ["embed_tokens.weight", "shared_head.head.weight"])
def test_a_prediction_layer_with_another_embedding_or_head_is_refused(tmp_path, copy):
    folder = write_tiny_model(tmp_path, "deepseek_v3", mtp=1, mtp_copies=True)
    name = f"model.layers.3.{copy}"
    changed = load_file(folder / "model.safetensors")[name]
    changed[129, 79] += 1
    add(folder, **{name: changed})
    with pytest.raises(ValueError, match=rf"{name} different from .*train without the extra prediction layers"):
        left_out(folder, mtp=True)
    assert left_out(folder) == {NOT_TRAINED: MTP_NAMES["deepseek_v3"] + 2}


def test_a_prediction_layer_without_its_projection_is_refused(tmp_path):
    folder = write_tiny_model(tmp_path, "glm4_moe", mtp=1)
    stored = load_file(folder / "model.safetensors")
    del stored["model.layers.3.eh_proj.weight"]
    save_file(stored, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"model\.layers\.3\.eh_proj\.weight: missing"):
        left_out(folder, mtp=True)


def test_indexers_of_sharing_layers_are_accepted_and_counted(tmp_path):
    folder = write_tiny_model(tmp_path, "glm_moe_dsa", **SHARED)
    assert full_indexer_layers(config_in(folder)) == [0, 1, 3]
    parts = ("wq_b.weight", "wk.weight", "k_norm.weight", "k_norm.bias", "weights_proj.weight")
    layer = "model.layers.{}.self_attn.indexer.{}"
    add(folder, *((layer.format(shared, part), layer.format(0, part)) for shared in (2, 4) for part in parts))
    assert left_out(folder) == {"indexers of layers that use an earlier layer's selection": 10}
    add(folder, (layer.format(2, "wq.weight"), "model.norm.weight"), ("model.layers.5.x", "model.norm.weight"))
    with pytest.raises(ValueError, match=r"1 problem\(s\):\s+model\.layers\.5\.x: unknown"):
        left_out(folder)


def test_rotary_caches_of_old_files_are_left_out(tmp_path):
    folder = write_tiny_model(tmp_path, "llama")
    add(folder, **{"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(12)})
    assert left_out(folder) == {"rotary caches": 1}


def test_the_names_of_the_number_of_experts(tmp_path):
    saved = config_in(write_tiny_model(tmp_path, "qwen3_moe"))
    assert "num_experts" not in saved and saved["num_local_experts"] == 8  # the name transformers writes
    for name in ("num_experts", "n_routed_experts", "num_local_experts"):
        assert num_experts({name: 8}) == 8
    assert num_experts({"num_experts": None, "n_routed_experts": 8}) == 8
    assert num_experts({}) == 0


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("glm_moe_dsa", {"num_experts": 256}, r"'num_experts': 256, 'n_routed_experts': 8.*remove the wrong field"),
        ("qwen3_moe", {"num_local_experts": 4}, r"'num_experts': 8.*'num_local_experts': 4"),
        ("glm_moe_dsa", {"mlp_layer_types": ["dense", "dense", "sparse", "sparse"]}, r"\[2, 3\].*replace=1"),
        ("deepseek_v32", {"mlp_layer_types": ["dense", "sparse"]}, r"\[1\] of 2.*num_hidden_layers=4"),
        ("glm_moe_dsa", {"indexer_types": ["full"] * 3}, r"indexer_types of 3 entries with num_hidden_layers=4"),
        ("glm_moe_dsa", {"index_topk_pattern": "FF"}, r"index_topk_pattern of 2 entries"),
    ],
)
def test_fields_of_config_json_that_contradict_each_other_are_refused(family, changes, message):
    with pytest.raises(ValueError, match=message):
        plan_of(config_of(family, **changes))


def test_layers_with_experts():
    qwen = {"num_hidden_layers": 6, "decoder_sparse_step": 2, "mlp_only_layers": [3]}
    assert moe_layers(qwen) == [1, 5]
    assert moe_layers({"num_hidden_layers": 4, "first_k_dense_replace": 3}) == [3]
    types = ["dense", "sparse", "sparse"]
    assert moe_layers({"num_hidden_layers": 3, "mlp_layer_types": types, "first_k_dense_replace": 1}) == [1, 2]
    assert moe_layers({"num_hidden_layers": 3, "mlp_layer_types": ["sparse", "dense", "sparse"]}) == [0, 2]


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("mixtral", {}, r"'mixtral'.*'deepseek_v3', 'deepseek_v32', 'glm4_moe', 'glm_moe_dsa', 'llama'"),
        ("deepseek_v3", {"architectures": ["GlmMoeDsaForCausalLM"]}, r"\['GlmMoeDsaForCausalLM'\].*DeepseekV3"),
        *((family, {"attention_bias": True}, "attention_bias=True") for family in (*LATENT, "qwen3_moe")),
        *((family, {"rope_interleave": False}, "rope_interleave=False") for family in LATENT),
        ("qwen3_moe", {"use_sliding_window": True}, "use_sliding_window=True"),
        ("glm4_moe", {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ("qwen3_moe", {"num_experts": None}, "without a number of experts"),
        ("deepseek_v3", {"n_routed_experts": 0}, "without a number of experts"),
    ],
)
def test_models_without_rules_are_refused(family, changes, message):
    base = config_of(family) if family in CONFIGS else {"model_type": family}
    with pytest.raises(ValueError, match=message):
        check_supported({**base, **changes})


@pytest.mark.parametrize("field", ["kv_lora_rank", "q_lora_rank", "moe_intermediate_size", "index_head_dim"])
def test_a_missing_or_null_field_of_a_sparse_latent_model_is_named(field):
    config = config_of("glm_moe_dsa")
    del config[field]
    for incomplete in (config, config | {field: None}):
        with pytest.raises(ValueError, match=rf"without \['{field}'\]"):
            check_supported(incomplete)
    assert check_supported(config_of("deepseek_v3", q_lora_rank=None))  # a plain query projection


def order_of(family: str, target: RopeRows, **changes: Any) -> tuple[int, ...]:
    """How the rows of the indexer's key projection must be read for a live model with this layout."""
    rules = family_rules(config_of(family, **changes), Target(indexer=target))
    (order,) = {rule.op.order for rule in rules if rule.mcore.endswith(".indexer.linear_wk.weight")}
    return order


@pytest.mark.parametrize(
    ("family", "changes", "interleaved"),
    [
        ("glm_moe_dsa", {}, True),
        ("deepseek_v32", {}, False),
        ("glm_moe_dsa", {"indexer_rope_interleave": False}, False),
        ("deepseek_v32", {"indexer_rope_interleave": True}, True),
        ("glm_moe_dsa", {"indexer_rope_interleave": None}, True),
    ],
)
def test_how_a_file_pairs_its_indexer_rows(family, changes, interleaved):
    """GLM's turn in neighbouring pairs and DeepSeek's in halves, unless config.json says otherwise."""
    same, other = (RopeRows(first=True, interleaved=flag) for flag in (interleaved, not interleaved))
    assert order_of(family, same, **changes) == tuple(range(20))
    turned = (0, 2, 4, 6, 1, 3, 5, 7) if interleaved else (0, 4, 1, 5, 2, 6, 3, 7)
    assert order_of(family, other, **changes) == (*turned, *range(8, 20))
