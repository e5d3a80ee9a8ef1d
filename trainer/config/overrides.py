"""The pass before Hydra: rename legacy keys, classify every item, rewrite prefixes.

Hydra alone is too lax (`+typo=1` is added without a word) and too strict (`+key` on an existing key
fails), so every item is matched with the tree first. Afterwards all items are known keys in one form.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from trainer.config.commandline import CommandLine
from trainer.config.errors import ConfigError
from trainer.config.legacy import NULL_IS_UNSET, Item, combine, move
from trainer.config.nearest import abbreviated, other_engine, suggestions
from trainer.config.patterns import covering
from trainer.config.refused import PER_GPU_FIX, ignored, refused
from trainer.config.schema import domain_leaves, leaves, sections
from trainer.config.values import to_text

STRATEGY = "actor_rollout_ref.actor.strategy"
ENGINE_OF = {"fsdp": "fsdp", "fsdp2": "fsdp", "dp": "fsdp", "megatron": "megatron"}
MISPLACED_ENGINE = "actor_rollout_ref.actor.model_engine"


@dataclass
class Overrides:
    """Known keys only, each at most once (a passthrough key may follow the dict that it changes)."""

    engine: str
    items: list[Item] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    errors: list[ConfigError] = field(default_factory=list)

    @property
    def explicit(self) -> dict[str, Item]:
        """Key -> item for everything that was given."""
        return {item.key: item for item in self.items}

    def texts(self) -> list[str]:
        """The arguments for Hydra."""
        known = leaves(self.engine)
        return [_text(item, known) for item in self.items]


def rewrite(line: CommandLine) -> Overrides:
    """All of the pass. Errors of single items never stop the others."""
    result = Overrides(choose_engine(line), notices=list(line.notices), errors=list(line.errors))
    moved = _moved(line.items, result)
    moved = _once(moved, result.notices)
    moved, notices = combine(moved, {key: leaf.default for key, leaf in leaves(result.engine).items()})
    result.notices += notices
    for item in moved:
        result.items += _classify(item, result)
    result.items = _once(result.items, result.notices)
    return result


def choose_engine(line: CommandLine) -> str:
    """model_engine wherever it stands, else the actor's strategy; a contradiction is an error."""
    by_key = {item.key: item for item in line.items}
    named = by_key.get("model_engine") or by_key.get(MISPLACED_ENGINE)
    strategy = by_key.get(STRATEGY)
    by_strategy = ENGINE_OF.get(str(strategy.value)) if strategy is not None else None
    if named is None:
        return by_strategy or "fsdp"
    engine = ENGINE_OF.get(str(named.value)) if named.value != "fsdp2" else None
    if engine is None:
        got = f"model_engine={named.value}: this engine is not offered"
        line.errors.append(
            ConfigError("value.choice", named.key, got, "one of fsdp, megatron", "model_engine=fsdp", named.position)
        )
        line.items = [item for item in line.items if item is not named]
        return by_strategy or "fsdp"
    if by_strategy is not None and by_strategy != engine:
        got = f"{STRATEGY}={strategy.value} (argument {strategy.position}), model_engine={named.value}"
        fix = f"model_engine={by_strategy}   (or {STRATEGY}={'fsdp2' if engine == 'fsdp' else engine})"
        line.errors.append(ConfigError("key.conflict", STRATEGY, got, "one training engine", fix, strategy.position))
        line.items = [item for item in line.items if item is not strategy]
    return engine


def _moved(items: list[Item], result: Overrides) -> list[Item]:
    """Legacy items under their present names; one notice each; old and new spelling must agree."""
    direct = {item.key: item for item in items if move(item, result.engine) is None}
    moved = []
    for item in items:
        target = move(item, result.engine)
        if target is None:
            moved.append(item)
            continue
        if item.value is None and covering(item.key, NULL_IS_UNSET):
            result.notices.append(f"{item.key}=null is a legacy key and sets nothing")
            continue
        result.notices.append(f"{item.key} is a legacy key: moved to {target.key}")
        other = direct.get(target.key)
        if other is None:
            moved.append(target)
        elif other.value != target.value:
            got = f"{item.key}={item.value} and {target.key}={other.value}"
            fix = f"{target.key}={other.text}   (and remove {item.key})"
            result.errors.append(
                ConfigError("key.conflict", item.key, got, "one value for both spellings", fix, item.position)
            )
    return moved


def _classify(item: Item, result: Overrides) -> list[Item]:
    """The item in its final form, none when it has no effect, several when a section was given as a dict."""
    known = leaves(result.engine)
    name = covering(item.key, known)
    if name is not None and (name == item.key or known[name].is_open):
        return _known(item, name, result)
    listed = refused(item.key)
    if listed is not None:
        _refuse(item, *listed, result)
        return []
    without_effect = ignored(item.key)
    if without_effect is not None:
        listed_name, reason = without_effect
        notice = f"{listed_name} has no effect: {reason}"
        result.notices += [notice] if notice not in result.notices else []
        return []
    if item.key in sections(result.engine) and isinstance(item.value, dict) and not item.delete:
        inner = [replace(item, key=f"{item.key}.{k}", text=to_text(v), value=v) for k, v in item.value.items()]
        return [leaf for part in inner for leaf in _classify(part, result)]
    result.errors.append(_unknown(item, result.engine))
    return []


def _known(item: Item, name: str, result: Overrides) -> list[Item]:
    if name == "rewards":
        return _reward_domain(item, result)
    if item.delete and item.key == name:
        result.errors.append(
            ConfigError(
                "arg.syntax", item.key, f"~{item.key}", "a key inside a passthrough", f"{item.key}=null", item.position
            )
        )
        return []
    return [item]


def _reward_domain(item: Item, result: Overrides) -> list[Item]:
    """`rewards.<domain>.<key>`: the domain is free, its keys are not."""
    parts = item.key.split(".")
    if len(parts) < 3 and isinstance(item.value, dict):
        inner = [replace(item, key=f"{item.key}.{k}", text=to_text(v), value=v) for k, v in item.value.items()]
        return [leaf for part in inner for leaf in _reward_domain(part, result)]
    if len(parts) == 3 and parts[2] in domain_leaves() and not item.delete:
        return [item]
    expected = f"rewards.<domain>.<one of {', '.join(domain_leaves())}>"
    result.errors.append(
        ConfigError(
            "key.unknown",
            item.key,
            f"a key that does not exist; value {item.text}",
            expected,
            "remove it",
            item.position,
        )
    )
    return []


def _refuse(item: Item, name: str, refusal: Any, result: Overrides) -> None:
    """Null and default values pass; a section passes while its enable switch is off or absent."""
    inside = item.key != name
    switch = inside and item.key != f"{name}.enable"
    if item.value is None or item.value in refusal.passes or (inside and item.value is False) or switch:
        result.notices.append(f"{item.key}={item.text} has no effect: {refusal.reason}")
        return
    fix = f"{PER_GPU_FIX[name]}=N" if name in PER_GPU_FIX else refusal.fix
    got = f"{item.key.rpartition('.')[2]}={item.text}: {refusal.reason}"
    expected = f"{item.key} not given" + (f", or {refusal.passes[0]}" if refusal.passes else ", or null")
    result.errors.append(ConfigError("key.refused", item.key, got, expected, fix, item.position))


def _unknown(item: Item, engine: str) -> ConfigError:
    names = suggestions(item.key, engine)
    other = other_engine(item.key, engine)
    got = f"a key that does not exist; value {item.text}"
    if other is not None:
        missing = "megatron" if engine == "fsdp" else "fsdp"
        expected, fix = other, f"model_engine={missing}   (or remove it)"
        twin = other.partition(f"{engine}: ")[2]
        if twin:
            fix = f"{item.key.rpartition('.')[0]}.{twin}={item.text}"
    elif names:
        expected, fix = f"one of {abbreviated(names)}", f"{names[0]}={item.text}"
    else:
        expected, fix = "a key of the tree (--cfg resolved prints it)", "remove it"
    return ConfigError("key.unknown", item.key, got, expected, fix, item.position)


def _once(items: list[Item], notices: list[str]) -> list[Item]:
    """The last value of a key wins, with one notice naming both."""
    last: dict[str, Item] = {}
    for item in items:
        old = last.pop(item.key, None)
        if old is not None and old.position is not None and not item.delete and not old.delete:
            notices.append(f"{item.key} is given twice: {old.text} and {item.text}; the last one counts")
        last[item.key] = item
    return list(last.values())


def _text(item: Item, known: dict) -> str:
    if item.delete:
        return f"~{item.key}"
    name = covering(item.key, known)
    prefix = "++" if name is not None and known[name].is_open else ""
    return f"{prefix}{item.key}={item.text}"
