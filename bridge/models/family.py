"""What a family file declares, and what follows from it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

from bridge.models.mla import full_indexer_layers
from bridge.models.moe import num_experts
from bridge.models.mtp import inner_scopes, mtp_copies, mtp_pattern, mtp_rows
from bridge.models.rows import EMBEDDING, HEAD, embedding_rows, is_tied
from bridge.models.scope import Config, Scope, Target
from bridge.models.value import LEFT_OUT, has_value_head, value_architecture
from bridge.rules import Rule

REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


@dataclass(frozen=True)
class Extras:
    """What a checkpoint may hold beyond the plan: reason -> names that are left out, and copies -> the tensor
    each must equal."""

    ignored: dict[str, re.Pattern[str]]
    copies: dict[str, str]


@dataclass(frozen=True)
class Family:
    """`layer_rows` gives the rules of a whole layer for the layers of a scope; `required` the fields config.json
    must have beyond the usual ones; `refused` maps a flag to the values under which the model has weights or row
    orders that no rule here describes."""

    architecture: str
    layer_rows: Callable[[Config, Scope, Target], list[Rule]]
    required: tuple[str, ...] = ()
    refused: dict[str, tuple] = field(default_factory=dict)
    has_indexer: bool = False

    def rules(self, config: Config, target: Target) -> list[Rule]:
        main = Scope(tuple(range(config["num_hidden_layers"])))
        rules = [*embedding_rows(config), *self.layer_rows(config, main, target)]
        if target.mtp:
            rules += mtp_rows(config)
            rules += [rule for scope in inner_scopes(config) for rule in self.layer_rows(config, scope, target)]
        return [rule for rule in rules if rule.layers or "{i}" not in rule.mcore]

    def extras(self, config: Config, target: Target) -> Extras:
        ignored = {"rotary caches": re.compile(r".*\.rotary_emb\.inv_freq")}
        copies = {HEAD: EMBEDDING} if is_tied(config) else {}
        if has_value_head(config):
            ignored |= LEFT_OUT
        extra = mtp_pattern(config)
        if target.mtp:
            copies |= mtp_copies(config)
        elif extra is not None:
            ignored["extra prediction (MTP) layers, not trained"] = extra
        if self.has_indexer:
            shared = set(range(config["num_hidden_layers"])) - set(full_indexer_layers(config))
            numbers = "|".join(str(layer) for layer in sorted(shared))
            if shared:
                reason = "indexers of layers that use an earlier layer's selection"
                ignored[reason] = re.compile(rf"model\.layers\.({numbers})\.self_attn\.indexer\..*")
        return Extras(ignored, copies)

    def check(self, config: Config) -> None:
        """ValueError naming the architecture, flag or missing field that is not supported."""
        architectures = config.get("architectures") or [self.architecture]
        if architectures not in ([self.architecture], [value_architecture(self.architecture)]):
            raise ValueError(
                f"got architectures {architectures}; expected [{self.architecture!r}] for model_type "
                f"{config['model_type']!r}; only causal language models, and critics made of them, are supported"
            )
        missing = [name for name in (*REQUIRED, *self.required) if config.get(name) is None]
        if missing:
            raise ValueError(
                f"got a config.json without {missing}; expected them all; use the model's full config.json"
            )
        if config.get("hidden_act", "silu") != "silu":
            raise ValueError(f"got hidden_act {config['hidden_act']!r}; expected 'silu'; choose another model")
        if "moe_intermediate_size" in self.required and not num_experts(config):
            raise ValueError(
                f"got a config.json without a number of experts; expected one, as every {self.architecture} has "
                "experts; use the model's full config.json"
            )
        heads, groups = config["num_attention_heads"], config.get("num_key_value_heads")
        if groups and heads % groups:
            raise ValueError(
                f"got num_attention_heads={heads} and num_key_value_heads={groups}; expected the first to be a "
                "multiple of the second; correct config.json"
            )
        for flag, values in self.refused.items():
            if config.get(flag) in values:
                raise ValueError(
                    f"got {flag}={config[flag]!r} in a {self.architecture}; expected another value, because the "
                    "extra weights or behaviour it switches on have no Megatron-Core counterpart; choose another model"
                )
