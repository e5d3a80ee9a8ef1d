"""Value models: the layers of a language model under a head that gives one number per token (a critic, arXiv
1506.02438). On disk they are what transformers calls token classification, with a single label."""

from __future__ import annotations

import re
from typing import Any

from bridge.models.scope import Config
from bridge.ops import Rename
from bridge.rules import Rule

SCORE, SCORE_BIAS = "score.weight", "score.bias"
KIND = "ForTokenClassification"
LEFT_OUT = {"the language model's head, where a value model has its own": re.compile(r"lm_head\.weight")}


def has_value_head(config: Config) -> bool:
    """Whether config.json is that of a value model: its architecture says so."""
    return any(name.endswith(KIND) for name in config.get("architectures") or ())


def value_architecture(architecture: str) -> str:
    """Qwen3ForCausalLM -> Qwen3ForTokenClassification."""
    return re.sub(r"For[A-Z]\w*$", "", architecture) + KIND


def value_fields(config: Config) -> dict[str, Any]:
    """What config.json says of a value model with the layers of this one. ValueError if it names no architecture."""
    names = config.get("architectures") or ()
    if len(names) != 1:
        raise ValueError(
            f"got architectures {list(names)} in the config.json of a critic; expected one, such as Qwen3ForCausalLM; "
            "use the model's full config.json"
        )
    return {
        "architectures": [value_architecture(names[0])],
        "tie_word_embeddings": False,
        "id2label": {"0": "VALUE"},
        "label2id": {"VALUE": 0},
        "classifier_dropout": 0.0,
        "token_classification_bias": True,
    }


def value_head_rows(config: Config) -> list[Rule]:
    """One row, a copy on each tensor-parallel rank of the last stage."""
    return [
        Rule("output_layer.weight", {SCORE: (1, config["hidden_size"])}, Rename(), last=True),
        Rule("output_layer.bias", {SCORE_BIAS: (1,)}, Rename(), last=True),
    ]
