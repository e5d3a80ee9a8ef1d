"""Parameter counts from config.json alone, against live models and published numbers."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.tiny import KINDS, MOE_KINDS, tiny_config
from trainer.config.model_config import read
from trainer.config.model_size import expert_layers, indexer_layers, parameters

CASES = [(kind, {}) for kind in (*KINDS, *MOE_KINDS)] + [
    ("qwen3_moe", {"decoder_sparse_step": 2}),
    ("qwen3_moe", {"mlp_only_layers": [0, 2]}),
    ("deepseek_v3", {"q_lora_rank": None}),
    ("deepseek_v32", {"mlp_layer_types": ["sparse", "dense", "sparse"]}),
    ("glm_moe_dsa", {"index_topk_freq": 2, "index_skip_topk_offset": 2}),
    ("glm_moe_dsa", {"indexer_types": ["full", "shared", "shared"]}),
]


@pytest.mark.parametrize(("kind", "changes"), CASES)
def test_matrices_are_counted_as_the_model_holds_them(tmp_path, kind, changes):
    config = tiny_config(kind, **changes)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    config.architectures = [type(model).__name__]
    config.save_pretrained(tmp_path)
    facts, problem = read(str(tmp_path), {})
    assert problem is None
    assert facts.parameters == sum(p.numel() for p in model.parameters() if p.ndim >= 2)
    assert bool(facts.experts) == (kind in MOE_KINDS)
    assert (facts.heads, facts.layers) == (4, 3) and facts.kv_heads in (2, 4)


QWEN3_30B = dict(
    num_hidden_layers=48, hidden_size=2048, num_attention_heads=32, num_key_value_heads=4, head_dim=128,
    intermediate_size=6144, vocab_size=151936, num_experts=128, moe_intermediate_size=768, num_experts_per_tok=8,
    decoder_sparse_step=1, mlp_only_layers=[],
)  # fmt: skip
DEEPSEEK_V3 = dict(
    num_hidden_layers=61, hidden_size=7168, num_attention_heads=128, num_key_value_heads=128, intermediate_size=18432,
    vocab_size=129280, n_routed_experts=256, n_shared_experts=1, moe_intermediate_size=2048, num_experts_per_tok=8,
    first_k_dense_replace=3, q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64,
    v_head_dim=128,
)  # fmt: skip


def test_released_models():
    """30,532,122,624 and 671,026,404,352 parameters with norms: 4,352 a layer and 2,048; 16,384 a layer and 7,168."""
    assert parameters(QWEN3_30B) == 30_532_122_624 - 48 * 4_352 - 2_048
    assert parameters(DEEPSEEK_V3) == 671_026_404_352 - 61 * 16_384 - 7_168
    sparse = DEEPSEEK_V3 | {"index_topk": 2048, "index_n_heads": 64, "index_head_dim": 128}
    # V3.2: 671,877,929,216 with the norms, and weight and bias of 128 in each indexer.
    assert parameters(sparse) == 671_877_929_216 - 61 * (16_384 + 256) - 7_168


def test_which_layers_have_experts_and_indexers():
    assert expert_layers(DEEPSEEK_V3) == [False] * 3 + [True] * 58
    config = {"num_hidden_layers": 78, "index_topk": 2048, "index_topk_freq": 4, "index_skip_topk_offset": 3}
    full = [layer for layer, own in enumerate(indexer_layers(config)) if own]
    assert full == [0, 1, 2, *range(6, 75, 4)]
    pattern = {"num_hidden_layers": 3, "index_topk": 1, "index_topk_pattern": "FSF"}
    assert indexer_layers(pattern) == [True, False, True]


def test_a_missing_size_is_named(tmp_path):
    config = DEEPSEEK_V3 | {"architectures": ["DeepseekV3ForCausalLM"]}
    del config["v_head_dim"], config["moe_intermediate_size"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    _, problem = read(str(tmp_path), {})
    assert "without moe_intermediate_size, v_head_dim" in problem.got
