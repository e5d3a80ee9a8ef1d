"""Critics: the rows of a value head are total both ways, and a language model's head is left out by name."""

import pytest
import torch
from transformers import AutoModelForTokenClassification

from bridge.layout import Layout
from bridge.models import FAMILIES, Target, check_supported, family_extras, family_rules, value_fields
from bridge.models.value import has_value_head
from bridge.plan import make_plan
from bridge.rules import Live
from bridge.source_check import check_names
from tests.bridge.families import config_of, plan
from tests.bridge.test_cli import run
from tests.bridge.test_cli_convert import SMALL, assert_same, config_in, folder_tensors
from tests.tiny import write_tiny_model

HEAD = {"score.weight": (1, 80), "score.bias": (1,)}


def critic_of(family: str) -> dict:
    config = config_of(family, architectures=[FAMILIES[family].architecture])
    return config | value_fields(config)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_can_be_a_critic(family):
    config = critic_of(family)
    model = plan(config, tp=2, pp=2)
    lm = plan(config_of(family), tp=2, pp=2)
    assert model.plan.hf_shapes == {n: s for n, s in lm.plan.hf_shapes.items() if n != "lm_head.weight"} | HEAD
    heads = [unit for unit in model.plan.units if unit.hf.keys() & HEAD.keys()]
    assert [unit.owner for unit in heads] == [1, 1]
    assert [(placed.live.name, placed.parts) for unit in heads for placed in unit.placed] == [
        ("output_layer.weight", 1),
        ("output_layer.bias", 1),
    ]


def test_a_vocabulary_head_in_a_critic_is_refused():
    config = critic_of("qwen3")
    model = plan(config)
    live = [live for chunk in model.stages[0] for live in chunk.live if not live.name.startswith("output_layer")]
    rules, axes = family_rules(config, Target()), Layout().axes
    with pytest.raises(ValueError, match=r"score\.weight: no live tensor holds it"):
        make_plan(rules, [live], axes)
    vocabulary = Live("output_layer.weight", (136, 80), torch.bfloat16, True)
    bias = Live("output_layer.bias", (1,), torch.bfloat16)
    with pytest.raises(ValueError, match=r"output_layer\.weight: live shape \[136, 80\], expected \[1, 80\]"):
        make_plan(rules, [[*live, vocabulary, bias]], axes)


def test_the_head_of_a_language_model_is_left_out_and_a_missing_one_is_named():
    config = critic_of("deepseek_v3")
    wanted = plan(config).plan
    stored = {name: (shape, torch.bfloat16) for name, shape in wanted.hf_shapes.items()}
    stored |= {
        "lm_head.weight": ((130, 80), torch.bfloat16),
        "model.layers.4.eh_proj.weight": ((80, 160), torch.bfloat16),
    }
    extras = family_extras(config, Target())
    assert check_names(wanted, stored, extras, "here") == {
        "the language model's head, where a value model has its own": 1,
        "extra prediction (MTP) layers, not trained": 1,
    }
    del stored["score.weight"]
    with pytest.raises(ValueError, match=r"score\.weight: missing"):
        check_names(wanted, stored, extras, "here")


def test_config_json_says_what_a_model_is():
    assert not has_value_head(config_of("llama")) and has_value_head(critic_of("llama"))
    assert critic_of("llama")["architectures"] == ["LlamaForTokenClassification"]
    # A reward model is a usual start of a critic.
    reward = config_of("qwen3", architectures=["Qwen3ForSequenceClassification"])
    assert value_fields(reward)["architectures"] == ["Qwen3ForTokenClassification"]
    with pytest.raises(ValueError, match=r"architectures \[\].*expected one"):
        value_fields(config_of("llama"))
    with pytest.raises(ValueError, match="LlamaForTokenClassification"):
        check_supported(config_of("qwen3", architectures=["LlamaForTokenClassification"]))


def test_a_critic_of_transformers_goes_through_shards_and_back(tmp_path):
    lm = write_tiny_model(tmp_path / "lm", "qwen3")
    model = AutoModelForTokenClassification.from_pretrained(lm, num_labels=1, dtype=torch.float32)
    model.save_pretrained(tmp_path / "hf")
    assert (
        run("convert", "--hf", tmp_path / "hf", "--out", tmp_path / "mcore", SMALL, "--tp 2 --pp 2 --layers 2,1") == 0
    )
    assert run("convert", "--mcore", tmp_path / "mcore", "--out", tmp_path / "back") == 0
    assert_same(folder_tensors(tmp_path / "back"), folder_tensors(tmp_path / "hf"))
    assert config_in(tmp_path / "back") == config_in(tmp_path / "hf")
