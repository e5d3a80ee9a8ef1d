"""The plan is total or it does not exist, and one error lists every offender."""

from __future__ import annotations

import pytest
import torch

from bridge import Bridge, Groups, Layout, check_supported
from bridge.models import Target, family_extras, family_rules
from bridge.ops import Rename
from bridge.plan import make_plan
from bridge.rules import Live, Rule
from bridge.source_check import check_names
from tests.bridge.fake import dense_config, hf_shapes, live_reference, module_tree, random_weights

CONFIG = dense_config("qwen3")
FC2 = "decoder.layers.1.mlp.linear_fc2.weight"


def live_list(config: dict = CONFIG, tp: int = 1, fused_norms: bool = False, **changes: tuple[int, ...]) -> list[Live]:
    live = live_reference(config, random_weights(config), tp, fused_norms=fused_norms, vocab=144)
    return [Live(name, tuple(tensor.shape), tensor.dtype) for name, tensor in live.items()]


def plan_of(live: list[Live], config: dict = CONFIG, tp: int = 1, rules: list[Rule] | None = None):
    return make_plan(rules or family_rules(config, Target()), [live], {"tp": tp, "expert": 1})


@pytest.mark.parametrize("fused_norms", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_plan_names_exactly_the_tensors_transformers_saves(family, fused_norms):
    config = dense_config(family)
    assert plan_of(live_list(config, fused_norms=fused_norms), config).hf_shapes == hf_shapes(config)


def test_stream_goes_layer_by_layer():
    names = list(plan_of(live_list()).hf_shapes)
    layers = [int(name.split(".")[2]) for name in names if ".layers." in name]
    assert layers == sorted(layers)
    assert names[0] == "model.embed_tokens.weight" and names[-2:] == ["model.norm.weight", "lm_head.weight"]


def test_unclaimed_live_tensors_are_all_listed_with_the_nearest_rule():
    live = [
        *live_list(),
        Live("decoder.layers.0.mlp.linear_fc3.weight", (4, 4), torch.float32),
        Live("zzz", (1,), torch.float32),
    ]
    with pytest.raises(ValueError, match="2 problem") as error:
        plan_of(live)
    assert "linear_fc3.weight [4, 4]: no rule (nearest: decoder.layers.{i}.mlp.linear_fc" in str(error.value)
    assert "zzz [1]: no rule" in str(error.value)


def test_a_missing_rule_names_the_live_tensors_it_leaves():
    rules = [rule for rule in family_rules(CONFIG, Target()) if not rule.mcore.endswith("linear_fc2.weight")]
    with pytest.raises(ValueError, match="3 problem") as error:
        plan_of(live_list(), rules=rules)
    assert all(f"decoder.layers.{i}.mlp.linear_fc2.weight" in str(error.value) for i in range(3))


def test_a_doubled_rule_names_both():
    extra = Rule("decoder.layers.{i}.mlp.linear_fc2.weight", {"x.{i}": (80, 104)}, Rename(dim=1), layers=range(3))
    with pytest.raises(ValueError, match=r"claimed by 2 rules"):
        plan_of(live_list(), rules=[*family_rules(CONFIG, Target()), extra])


def test_both_spellings_of_a_norm_at_once_hold_it_twice():
    both = [*live_list(), Live("decoder.layers.2.mlp.linear_fc1.layer_norm_weight", (80,), torch.float32)]
    with pytest.raises(ValueError, match=r"layers\.2\.post_attention_layernorm\.weight: held twice"):
        plan_of(both)


def test_live_tensors_that_should_exist_and_do_not():
    live = [
        entry for entry in live_list() if entry.name not in (FC2, "decoder.layers.0.self_attention.q_layernorm.weight")
    ]
    with pytest.raises(ValueError, match="2 problem") as error:
        plan_of(live)
    assert "model.layers.1.mlp.down_proj.weight: no live tensor holds it" in str(error.value)
    assert "model.layers.0.self_attn.q_norm.weight: no live tensor holds it" in str(error.value)


def test_half_a_tensor_is_found_out():
    """Rules whose blocks leave source rows unread, or read them twice, are caught by arithmetic."""

    class Upper(Rename):
        def runs(self, hf):
            return [super().runs(hf)[0]._replace(length=hf[0][0] // 2)]

    name = {"model.half.weight": (8, 4)}
    for live, message in (("a",), "partly held by no live tensor"), (("a", "b"), "partly held"):
        rules = [Rule(part, name, Upper(dim=0)) for part in live]
        with pytest.raises(ValueError, match=message):
            make_plan(rules, [[Live(part, (4, 4), torch.float32) for part in live]], {"tp": 1, "expert": 1})


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        (FC2, (104, 80)),
        ("decoder.layers.0.self_attention.linear_qkv.weight", (190, 80)),
        ("decoder.final_layernorm.weight", (40,)),
    ],
)
def test_live_shapes_that_fit_no_split_are_refused(name, shape):
    live = [entry._replace(shape=shape) if entry.name == name else entry for entry in live_list()]
    with pytest.raises(ValueError, match=rf"{name}: live shape \[{shape[0]}"):
        plan_of(live)


def test_vocabulary_smaller_than_the_file_is_refused():
    live = [entry._replace(shape=(128, 80)) if "word_embeddings" in entry.name else entry for entry in live_list()]
    with pytest.raises(ValueError, match=r"word_embeddings\.weight: live shape \[128, 80\]"):
        plan_of(live)


def test_a_cut_tensor_marked_as_a_copy_is_an_error():
    live = [entry._replace(marked_split=entry.name != FC2) for entry in live_list(tp=2)]
    with pytest.raises(ValueError, match=rf"{FC2}: cut into 2 by its shape"):
        plan_of(live, tp=2)
    assert plan_of([entry._replace(marked_split=True) for entry in live_list(tp=2)], tp=2).units


def test_wrong_layer_offsets_are_found():
    chunk = module_tree(live_reference(CONFIG, random_weights(CONFIG)))
    with pytest.raises(ValueError, match=r"decoder\.layers\.3\.input_layernorm\.weight \[80\]: no rule"):
        Bridge(CONFIG, [chunk], Layout(), Groups(), [1])
    embedding, *others = live_list()
    with pytest.raises(ValueError, match="held by stage 0 and stage 1"):
        make_plan(family_rules(CONFIG, Target()), [[embedding, *others], others], {"tp": 1, "expert": 1})


def test_checkpoint_offenders_come_in_one_error():
    plan = plan_of(live_list())
    shapes = dict(hf_shapes(CONFIG))
    shapes["model.layers.0.mlp.down_projection.weight"] = shapes.pop("model.layers.0.mlp.down_proj.weight")
    shapes["model.norm.weight"] = (81,)
    shapes["model.layers.1.self_attn.rotary_emb.inv_freq"] = (12,)  # recomputed by everyone: ignored
    stored = {name: (shape, torch.float32) for name, shape in shapes.items()}
    stored["lm_head.weight"] = (shapes["lm_head.weight"], torch.int8)
    with pytest.raises(ValueError, match="4 problem") as error:
        check_names(plan, stored, family_extras(CONFIG, Target()), where="here")
    for text in (
        "model.layers.0.mlp.down_proj.weight: missing (nearest: model.layers.0.mlp.down_projection.weight)",
        "down_projection.weight: unknown to this family (nearest: model.layers.0.mlp.down_proj.weight)",
        "model.norm.weight: shape [81], expected [80]",
        "lm_head.weight: dtype torch.int8",
    ):
        assert text in str(error.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]},
            r"'gpt2' .*GPT2LMHeadModel.*'llama', 'qwen2', 'qwen3'",
        ),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"mlp_bias": True}, "mlp_bias=True"),
        ({"model_type": "qwen2", "use_sliding_window": True}, "use_sliding_window=True"),
        ({"model_type": "qwen3", "attention_bias": True}, "attention_bias=True"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"num_key_value_heads": 3}, "num_key_value_heads=3"),
    ],
)
def test_unsupported_models_are_refused_before_any_read(changes, message):
    with pytest.raises(ValueError, match=message):
        check_supported({**dense_config(), **changes})


def test_missing_config_fields_are_named():
    config = dense_config()
    del config["hidden_size"], config["vocab_size"]
    with pytest.raises(ValueError, match=r"\['vocab_size', 'hidden_size'\]"):
        check_supported(config)


@pytest.mark.parametrize(
    ("option", "value"), [("layernorm_zero_centered_gamma", True), ("moe_mlp_glu_interleave_size", 32)]
)
def test_megatron_options_that_change_the_meaning_of_weights_are_refused(option, value):
    class TransformerConfig:
        pass

    chunk = module_tree(live_reference(CONFIG, random_weights(CONFIG)))
    chunk.decoder.config = TransformerConfig()
    setattr(chunk.decoder.config, option, value)
    with pytest.raises(ValueError, match=option):
        Bridge(CONFIG, [chunk], Layout(), Groups(), [0])
