"""argv -> flags and parsed items. Hydra's grammar reads every item; nothing is composed yet."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from trainer.config.errors import ConfigError
from trainer.config.legacy import CORRECTION, Item
from trainer.config.values import plain, scalars, to_text

ACTIONS = {"--dry-run": "dry-run", "--check-data": "check-data", "--cfg": "cfg", "--explain": "explain"}
FLAGS_WITH_VALUE = ("--cfg", "--explain", "--config-name", "--config-path", "--config", "-cn", "-cp", "-c")
SHORT = {"-cn": "--config-name", "-cp": "--config-path", "-c": "--cfg"}
MULTIRUN = ("-m", "--multirun")

# Text even when bare: Hydra reads 0.5_2 as the number 0.52, these keys mean "low_high".
RAW_TEXT = (
    f"{CORRECTION}.rollout_is_threshold",
    f"{CORRECTION}.rollout_rs_threshold",
)
DAPO = ("reward.reward_manager.name=dapo",)
SEPARATE = ("actor_rollout_ref.hybrid_engine=False",)
MEGATRON = ("model_engine=megatron",)
CONFIG_NAMES = {
    "ppo_trainer": (),
    "ppo_megatron_trainer": MEGATRON,
    "dapo_trainer": DAPO,
    "dapo_megatron_trainer": MEGATRON + DAPO,
    "one_step_off_ppo_trainer": SEPARATE,
    "one_step_off_ppo_megatron_trainer": MEGATRON + SEPARATE,
}


@dataclass
class CommandLine:
    """What was typed. `items` keep their order; presets and files come first."""

    action: str = "run"
    explain_key: str | None = None
    items: list[Item] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    errors: list[ConfigError] = field(default_factory=list)


def parse(argv: list[str]) -> CommandLine:
    """Read every argument; errors are collected with the argument's position."""
    line = CommandLine()
    typed: list[Item] = []
    position = 0
    while position < len(argv):
        argument = argv[position]
        position += 1
        if argument.startswith("-"):
            flag, equals, value = argument.partition("=")
            if flag in FLAGS_WITH_VALUE and not equals:
                value = argv[position] if position < len(argv) else ""
                position += 1
            _flag(line, SHORT.get(flag, flag), value, position)
        elif argument.startswith("hydra.") or argument.startswith(("+hydra.", "++hydra.", "~hydra.")):
            line.notices.append(f"{argument}: Hydra's own keys have no effect (argument {position})")
        else:
            item = parse_item(argument, position, f"argv {position}", line.errors)
            typed += [item] if item is not None else []
    line.items += typed
    return line


def _flag(line: CommandLine, flag: str, value: str, position: int) -> None:
    if flag in ACTIONS:
        line.action = ACTIONS[flag]
        if flag == "--explain":
            line.explain_key = value
        if flag == "--cfg" and value not in ("resolved", "job"):
            line.errors.append(_refuse(f"{flag} {value}".strip(), position, "--cfg resolved", "--cfg resolved"))
    elif flag == "--config-name":
        _preset(line, value, position)
    elif flag == "--config-path":
        line.notices.append(f"--config-path {value} has no effect: defaults live in trainer/config")
    elif flag == "--config":
        _file(line, value, position)
    elif flag in MULTIRUN:
        line.errors.append(_refuse(flag, position, "one run per command", "start one command per run"))
    else:
        flags = "--dry-run, --check-data, --cfg resolved, --explain KEY, --config-name NAME, --config FILE"
        expected = f"key=value, or one of {flags}"
        line.errors.append(_refuse(flag, position, expected, f"{flag.lstrip('-')}={value or 'VALUE'}"))


def _preset(line: CommandLine, value: str, position: int) -> None:
    name = value.removesuffix(".yaml").removesuffix(".yml")
    if name not in CONFIG_NAMES:
        line.errors.append(
            _refuse(
                f"--config-name {value}", position, f"one of {', '.join(CONFIG_NAMES)}", "--config-name ppo_trainer"
            )
        )
        return
    parsed = [parse_item(text, None, f"preset {name}", line.errors) for text in CONFIG_NAMES[name]]
    line.items[:0] = [item for item in parsed if item is not None]


def _file(line: CommandLine, value: str, position: int) -> None:
    """A saved resolved.yaml is a complete input; arguments beside it win."""
    path = Path(value).expanduser()
    if not path.is_file():
        line.errors.append(_refuse(f"--config {value}", position, "an existing resolved.yaml", "--config FILE"))
        return
    tree = plain(OmegaConf.to_container(OmegaConf.load(path), resolve=False))
    tree.pop("derived", None)
    for key, entry in tree.items():
        line.items.append(Item(key, to_text(entry), entry, None, f"file {path}"))


def parse_item(argument: str, position: int | None, origin: str, errors: list[ConfigError]) -> Item | None:
    """One `key=value`; None and an error when it is not one."""
    key, _, raw = argument.partition("=")
    name = key.lstrip("+~")
    try:
        parsed = OverridesParser.create().parse_override(argument)
        problem = _problem(parsed, argument)
    except (HydraException, OmegaConfBaseException, RecursionError) as error:
        reason = " ".join(str(error).split("\n")[:1])
        quoted = raw.replace("'", "")
        fix = (
            f"{key}=VALUE"
            if "=" not in argument
            else f"'{key}=\"{quoted}\"'   (Hydra needs its own quotes around special characters)"
        )
        errors.append(
            ConfigError("arg.syntax", name, f"{argument!r}: {reason}", "key=value in Hydra's grammar", fix, position)
        )
        return None
    if problem is not None:
        expected, fix = problem
        errors.append(ConfigError("arg.syntax", name, repr(argument), expected, fix, position))
        return None
    delete = parsed.is_delete()
    value = None if delete else parsed.value()
    value = _tidy(value)
    text = raw
    if name in RAW_TEXT and isinstance(value, int | float) and "_" in raw:
        value, text = raw.strip(), to_text(raw.strip())
    bad = _bad_scalar(value)
    if bad is not None:
        expected, fix = bad
        errors.append(ConfigError("value.type", name, f"{name}={raw}", expected, f"{name}={fix}", position))
        return None
    return Item(name, text, value, position, origin, delete)


def _problem(parsed: Override, argument: str) -> tuple[str, str] | None:
    key, _, raw = argument.partition("=")
    if parsed.package is not None:
        return "a key without @package", f"{parsed.key_or_group}={raw}"
    if parsed.is_sweep_override():
        if parsed.value_type.name == "SIMPLE_CHOICE_SWEEP" and "(" not in raw:
            return f"one value or a list; write {key}=[{raw}]", f"{key}=[{raw}]"
        return "one value; sweeps are not offered", f"{key}=VALUE"
    if not parsed.is_delete() and re.match(r"\s*[a-z]+\(", raw):
        return "a plain value; functions are not offered", f"{key}=VALUE"
    return None


def _tidy(value: Any) -> Any:
    """Hydra marks quoted text and dict keys with its own str types; plain values from here on."""
    if isinstance(value, dict):
        return {str(key): _tidy(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_tidy(item) for item in value]
    return str(value) if isinstance(value, str) else value


def _bad_scalar(value: Any) -> tuple[str, str] | None:
    """Values no key accepts, passthroughs included."""
    for item in scalars(value):
        if item == "None":
            return "null; `None` is only text", "null"
        if isinstance(item, float) and not math.isfinite(item):
            return "a finite number", "VALUE"
    return None


def _refuse(got: str, position: int, expected: str, fix: str) -> ConfigError:
    return ConfigError("arg.syntax", got.split()[0], got, expected, fix, position)
