"""Multi-token prediction layers (DeepSeek-V3, arXiv 2412.19437): whole layers behind the last one, joined to the
embedding of the next token by `eh_proj`, whose input is [embedding ; hidden state] on both sides."""

from __future__ import annotations

import re
from dataclasses import replace

from bridge.models.rows import EMBEDDING, HEAD, is_tied
from bridge.models.scope import Config, Scope
from bridge.ops import Rename
from bridge.rules import Rule

INNER = ("transformer_layer.", "mtp_model_layer.")  # forms: megatron-core 0.16 and 0.19


def mtp_layers(config: Config) -> range:
    """Their numbers in Hugging Face files."""
    depth = config["num_hidden_layers"]
    return range(depth, depth + (config.get("num_nextn_predict_layers") or 0))


def mtp_scope(config: Config) -> Scope:
    return Scope(tuple(mtp_layers(config)), live="mtp.layers.{i}.", shift=config["num_hidden_layers"], form="mtp")


def inner_scopes(config: Config) -> list[Scope]:
    """Where the whole layer inside hangs, in each spelling."""
    scope = mtp_scope(config)
    return [replace(scope, live=scope.live + inner, form=f"mtp {inner}") for inner in INNER]


def mtp_rows(config: Config) -> list[Rule]:
    """What surrounds the whole layer."""
    scope, hidden = mtp_scope(config), config["hidden_size"]
    return [
        scope.rule("enorm.weight", {"enorm.weight": (hidden,)}, Rename()),
        scope.rule("hnorm.weight", {"hnorm.weight": (hidden,)}, Rename()),
        scope.rule("eh_proj.weight", {"eh_proj.weight": (hidden, 2 * hidden)}, Rename(dim=0)),
        scope.rule("final_layernorm.weight", {"shared_head.norm.weight": (hidden,)}, Rename()),
    ]


def mtp_pattern(config: Config) -> re.Pattern[str] | None:
    """Names of everything in these layers; None if there are none."""
    layers = "|".join(str(layer) for layer in mtp_layers(config))
    return re.compile(rf"model\.layers\.({layers})\..*") if layers else None


def mtp_copies(config: Config) -> dict[str, str]:
    """Repeated tensors a file may hold in these layers -> the tensor each must equal."""
    originals = {"embed_tokens.weight": EMBEDDING, "shared_head.head.weight": EMBEDDING if is_tied(config) else HEAD}
    return {
        f"model.layers.{layer}.{name}": original for layer in mtp_layers(config) for name, original in originals.items()
    }
