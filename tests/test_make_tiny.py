"""Tiny checkpoints: they load, their names are the releases' names, and no part of them can go missing unnoticed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from scripts.make_tiny import FAMILIES, main, tiny_config, write_checkpoint

SHARED_INDEXERS = dict(index_topk_freq=2, index_skip_topk_offset=2)
VARIANTS = {family: (family, {}) for family in FAMILIES} | {"glm_moe_dsa shared": ("glm_moe_dsa", SHARED_INDEXERS)}
# Three layers. Outside: embedding, last norm, head. Per layer: two norms, the attention, and a dense MLP (3) or
# experts (8 * 3), router (1), correction bias (1) and shared expert (3).
NAMES = {
    "llama": 3 + 3 * (2 + 4 + 3),
    "qwen2": 3 + 3 * (2 + 4 + 3 + 3),
    "qwen3": 3 + 3 * (2 + 4 + 2 + 3),
    "qwen3_moe": 3 + 3 * (2 + 4 + 2 + 24 + 1),
    "glm4_moe": 3 + 3 * (2 + 4 + 3 + 2) + 3 + 2 * 29,
    "deepseek_v3": 3 + 3 * (2 + 7) + 3 + 2 * 29,
    "deepseek_v32": 3 + 3 * (2 + 7 + 5) + 3 + 2 * 29,
    "glm_moe_dsa": 3 + 3 * (2 + 7 + 5) + 3 + 2 * 29,
    "glm_moe_dsa shared": 3 + 3 * (2 + 7) + 2 * 5 + 3 + 2 * 29,
}
LENGTH = 24


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    return {
        name: write_checkpoint(tmp_path_factory.mktemp("tiny"), family, **changes)
        for name, (family, changes) in VARIANTS.items()
    }


def tensors(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def config(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())


def load(folder: Path) -> tuple[PreTrainedModel, dict[str, set]]:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)


def in_memory(names: Iterable[str]) -> set[str]:
    """transformers fuses experts before it reports a name."""
    fused = {"gate": "gate_up", "up": "gate_up", "down": "down"}
    return {
        re.sub(r"\.experts\.\d+\.(\w+)_proj\.weight$", lambda m: f".experts.{fused[m[1]]}_proj", name) for name in names
    }


def prompt() -> Tensor:
    """[2, 24] token ids without the padding token."""
    return torch.randint(3, 130, (2, LENGTH), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def logits(model: PreTrainedModel) -> Tensor:
    return model(prompt(), use_cache=False).logits


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize("name", VARIANTS)
def test_a_checkpoint_loads_whole_and_runs(folders, name):
    model, info = load(folders[name])
    assert not any(info.values()), info
    assert torch.isfinite(logits(model)).all()
    assert len(tensors(folders[name])) == NAMES[name]


@pytest.mark.parametrize("name", VARIANTS)
def test_every_tensor_matters(folders, name):
    """Reversing the rows of any tensor, or of any single expert, changes the logits: no mistake can hide there."""
    model, _ = load(folders[name])
    right = logits(model)
    for key, value in model.state_dict().items():
        for part in value if value.dim() == 3 else [value]:
            kept = part.clone()
            part.copy_(part.flip(0))
            assert (logits(model) - right).abs().max() > 1e-3, key
            part.copy_(kept)
    assert torch.equal(logits(model), right)


@pytest.mark.parametrize("name", sorted(set(VARIANTS) - {"qwen2"}))  # Qwen2's heads fill the hidden size
def test_no_matrix_is_square(folders, name):
    assert not [key for key, value in tensors(folders[name]).items() if value.dim() == 2 and len(set(value.shape)) == 1]


@pytest.mark.parametrize("name", [name for name in VARIANTS if "moe" in name or "deepseek" in name])
def test_tokens_are_routed_differently_and_every_expert_is_used(folders, name):
    model, _ = load(folders[name])
    routed = []
    for module in model.modules():
        if type(module).__name__.endswith("Experts"):
            module.register_forward_hook(lambda module, args, output: routed.append(args[1].sort(-1).values))
    logits(model)
    assert len(routed) == (3 if name == "qwen3_moe" else 2)
    for chosen_TK in routed:
        assert len(chosen_TK.unique(dim=0)) > 4
        assert chosen_TK.unique().tolist() == list(range(8))


class IndexScores(TorchFunctionMode):
    """Collects what the indexers rank: [batch, query, key] scores, -inf or the smallest number where masked."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.topk and args[0].shape == (2, LENGTH, LENGTH):
            self.seen.append(args[0])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name, layers", [("deepseek_v32", 3), ("glm_moe_dsa", 3), ("glm_moe_dsa shared", 2)])
def test_index_scores_have_no_ties(folders, name, layers):
    """With a tie the selected keys would depend on the implementation."""
    model, _ = load(folders[name])
    with IndexScores() as scores:
        logits(model)
    assert len(scores.seen) == layers
    recent = torch.arange(LENGTH)[:, None] - torch.arange(4)
    for scores_BTT in scores.seen:
        for row in range(LENGTH):
            visible = scores_BTT[:, row, : row + 1].sort(-1).values
            assert (visible.diff() > 1e-7).all()
        late = scores_BTT[:, 8:].topk(4).indices.sort(-1).values
        assert (late != recent[8:].sort(-1).values).any(-1).float().mean() > 0.5  # more than a sliding window


def test_shared_indexers_are_absent_from_the_file(folders):
    names = tensors(folders["glm_moe_dsa shared"])
    assert {key.split(".")[2] for key in names if ".indexer." in key} == {"0", "1"}
    assert config(folders["glm_moe_dsa shared"])["indexer_types"] == ["full", "full", "shared"]


def test_config_says_what_vllm_needs(folders):
    for name in ("glm4_moe", "deepseek_v3", "deepseek_v32", "glm_moe_dsa"):
        written = config(folders[name])
        assert (written["topk_method"], written["scoring_func"]) == ("noaux_tc", "sigmoid")
        assert written["num_nextn_predict_layers"] == 0
    assert config(folders["glm_moe_dsa"])["indexer_rope_interleave"] is True
    assert "indexer_rope_interleave" not in config(folders["deepseek_v32"])  # absent means half-split pairs


def test_the_seed_decides_every_byte(folders, tmp_path):
    first, again, other = (folders["glm_moe_dsa"], tmp_path / "again", tmp_path / "other")
    write_checkpoint(again, "glm_moe_dsa")
    write_checkpoint(other, "glm_moe_dsa", seed=1)
    for file in ("model.safetensors", "config.json"):
        assert (first / file).read_bytes() == (again / file).read_bytes()
    left, right = tensors(first), tensors(other)
    assert left.keys() == right.keys() and not any(torch.equal(left[key], right[key]) for key in left)


def test_every_tensor_is_random(folders):
    for name, folder in folders.items():
        for key, value in tensors(folder).items():
            if value.dim() == 1:
                assert value.std() > 0.02, f"{name} {key}"
            else:
                assert 0.054 < value.std() < 0.066, f"{name} {key}"  # three times 0.02
            if key.endswith("norm.weight"):
                assert value.min() >= 0.7 and value.max() <= 1.3, f"{name} {key}"


def test_bfloat16_leaves_correction_biases_alone(folders, tmp_path):
    write_checkpoint(tmp_path, "glm_moe_dsa", dtype="bfloat16")
    wide, narrow = tensors(folders["glm_moe_dsa"]), tensors(tmp_path)
    for key, value in narrow.items():
        expected = torch.float32 if key.endswith("e_score_correction_bias") else torch.bfloat16
        assert value.dtype == expected, key
        assert torch.equal(value, wide[key].to(expected)), key
    assert config(tmp_path)["dtype"] == "bfloat16"


@pytest.mark.parametrize("family, indexer", [("glm4_moe", 0), ("deepseek_v3", 0), ("deepseek_v32", 5)])
def test_mtp_layers_come_on_top(folders, tmp_path, family, indexer):
    write_checkpoint(tmp_path, family, mtp=2, mtp_copies=True)
    base, written = tensors(folders[family]), tensors(tmp_path)
    extra = {key: value for key, value in written.items() if key not in base}
    assert same(base, {key: written[key] for key in base})
    assert config(tmp_path) == config(folders[family]) | {"num_nextn_predict_layers": 2}
    info = load(tmp_path)[1]
    assert set(info["unexpected_keys"]) == in_memory(extra) and not info["missing_keys"]

    sparse_layer = {key.removeprefix("model.layers.2.") for key in base if key.startswith("model.layers.2.")}
    own = {"enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight"}
    copies = {"embed_tokens.weight", "shared_head.head.weight"}
    assert len(sparse_layer) == 2 + (9 if family == "glm4_moe" else 7) + indexer + 29
    assert set(extra) == {f"model.layers.{k}.{name}" for k in (3, 4) for name in sparse_layer | own | copies}
    for name in sparse_layer:
        assert extra[f"model.layers.3.{name}"].shape == base[f"model.layers.2.{name}"].shape
    assert extra["model.layers.4.eh_proj.weight"].shape == (80, 160)
    assert torch.equal(extra["model.layers.4.embed_tokens.weight"], base["model.embed_tokens.weight"])
    assert torch.equal(extra["model.layers.4.shared_head.head.weight"], base["lm_head.weight"])
    drawn = [value for key, value in extra.items() if not key.endswith(tuple(copies))]
    assert all(value.float().std() > 0.01 for value in drawn)


def test_an_mtp_layer_has_its_own_indexer_where_the_last_layer_shares_one(folders, tmp_path):
    write_checkpoint(tmp_path, "glm_moe_dsa", mtp=1, indexer_types=["full", "shared", "shared"])
    written = tensors(tmp_path)
    assert {key.split(".")[2] for key in written if ".indexer." in key} == {"0", "3"}
    assert not [key for key in written if "embed_tokens" in key and key != "model.embed_tokens.weight"]
    info = load(tmp_path)[1]
    assert set(info["unexpected_keys"]) == in_memory(key for key in written if key.startswith("model.layers.3."))
    assert not info["missing_keys"]


def test_fp8_blocks_give_the_weights_back(tmp_path):
    """hidden_size 144 makes two block columns with a short last one; wq_b has 320 rows, so three block rows."""
    sizes = dict(hidden_size=144, num_hidden_layers=2, mtp=1, seed=4)
    write_checkpoint(tmp_path / "plain", "deepseek_v32", **sizes)
    write_checkpoint(tmp_path / "fp8", "deepseek_v32", **sizes, fp8=True)
    plain, coded = tensors(tmp_path / "plain"), tensors(tmp_path / "fp8")
    attention = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "indexer.wq_b", "indexer.wk"]
    linear = rf"self_attn\.({'|'.join(map(re.escape, attention))})|mlp\.(\w+\.)*(gate|up|down)_proj"
    quantised = {key for key in plain if re.search(rf"\.({linear}|mlp\.experts\.\d+\.\w+_proj)\.weight$", key)}
    assert len(quantised) == 3 * 7 + 3 + 2 * 27
    assert coded.keys() == plain.keys() | {f"{key}_scale_inv" for key in quantised}
    assert same({key: plain[key] for key in plain.keys() - quantised}, {k: coded[k] for k in plain.keys() - quantised})
    for key in quantised:
        value, scale, expected = coded[key], coded[f"{key}_scale_inv"], plain[key]
        assert value.dtype == torch.float8_e4m3fn and scale.dtype == torch.float32
        rows, columns = (torch.arange(size) // 128 for size in value.shape)
        assert scale.shape == (rows[-1] + 1, columns[-1] + 1)
        spread = scale[rows][:, columns]
        # Three mantissa bits: half a unit is 1/16 of the value; below 2^-6 the steps are 2^-9.
        bound = torch.maximum(expected.abs() / 16, spread * 2**-10) * (1 + 1e-5)
        assert ((value.float() * spread - expected).abs() <= bound).all(), key
        assert value.float().abs().max() == 448, key  # the whole range is used
    assert coded["model.layers.1.self_attn.indexer.wq_b.weight_scale_inv"].shape == (3, 1)
    assert coded["model.layers.0.mlp.gate_proj.weight_scale_inv"].shape == (1, 2)
    assert config(tmp_path / "fp8")["quantization_config"]["weight_block_size"] == [128, 128]


def test_the_command_writes_a_model_with_tokenizer(tmp_path, capsys):
    out = tmp_path / "model"
    sizes = ["kv_lora_rank=512", "qk_rope_head_dim=64", "num_attention_heads=2", "seed=3", "dtype=bfloat16"]
    main(["--family", "deepseek_v3", *sizes, "--out", str(out)])
    assert config(out)["num_key_value_heads"] == 2 and config(out)["dtype"] == "bfloat16"
    assert tensors(out)["model.layers.0.self_attn.kv_a_proj_with_mqa.weight"].shape == (576, 80)
    tokenizer = AutoTokenizer.from_pretrained(out)
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "2+2?"}], return_dict=False)
    assert ids[:2] == [1, 4] and max(ids) < 130 and tokenizer.decode(ids[2:]) == "2+2?"
    assert torch.isfinite(logits(load(out)[0])).all()
    with pytest.raises(SystemExit):
        main(["--family", "deepseek_v3", "--out", str(out)])
    assert "not empty; expected a new or empty folder; change --out" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["index_topk_frq=2"], "nearest: index_topk_freq"),
        (["hidden_size"], "expected key=value"),
        (["hidden_size=wide"], "expected int, got str"),
        (['indexer_types=["full"]'], "each of the 3 layers"),
        (['mlp_layer_types=["dense"]'], "correct what it names: Class validation"),
        (["vocab_size=100"], "expected at least 101"),
        (["dtype=float8"], "expected one of"),
        (["--mtp-copies"], "add --mtp 1"),
    ],
)
def test_wrong_arguments_write_nothing(tmp_path, capsys, arguments, message):
    with pytest.raises(SystemExit):
        main(["--family", "glm_moe_dsa", "--out", str(tmp_path / "model"), *arguments])
    assert message in capsys.readouterr().err
    assert not (tmp_path / "model").exists()


def test_a_config_class_leaves_no_trace_in_the_next_family_or_the_callers_values():
    """Glm4MoeConfig writes its partial rotary factor into the dict it is given."""
    rope = {"rope_type": "default", "rope_theta": 3e4}
    assert tiny_config("glm4_moe", rope_parameters=rope).rope_parameters["partial_rotary_factor"] == 0.5
    assert tiny_config("glm4_moe").rope_parameters["rope_theta"] == 5e4
    assert "partial_rotary_factor" not in rope
    assert "partial_rotary_factor" not in tiny_config("qwen3_moe").rope_parameters


def test_families_without_mtp_refuse_it(tmp_path):
    with pytest.raises(ValueError, match="leave --mtp out"):
        write_checkpoint(tmp_path, "qwen3_moe", mtp=1)
    with pytest.raises(ValueError, match=r"got family 'gpt2'.*change --family"):
        tiny_config("gpt2")
