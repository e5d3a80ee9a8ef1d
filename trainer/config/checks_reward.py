"""`rewards.<domain>`: every given field is one its scorer reads, and a judge can be reached without taking devices."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import urlsplit

from trainer.config.inspection import Inspection
from trainer.config.schema import domain_leaves
from trainer.config.schema_reward import SCORER_FIELDS, RewardDomain

JUDGE = "llm_judge"
SPECIAL = {field for fields in SCORER_FIELDS.values() for field in fields} | {"devices"}
POSITIVE = ("world_size", "timeout_s", "max_tokens", "max_concurrency", "max_answer_chars", "max_down_s")
NOT_NEGATIVE = ("temperature", "max_retries")


def check(view: Inspection) -> None:
    for name, domain in view.config.rewards.items():
        unread(view, name)
        ranges(view, name, domain)
        mapped_twice(view, name, domain)
    function = view.config.reward.custom_reward_function
    by_function = function.path is not None and (function.domains is None or JUDGE in function.domains)
    if JUDGE in view.config.rewards and not by_function:
        judge = view.config.rewards[JUDGE]
        endpoint(view, judge)
        key_name(view, judge)
        template(view, judge)
        devices(view, judge)


def unread(view: Inspection, name: str) -> None:
    read = set(SCORER_FIELDS.get(name, ())) | ({"devices"} if name == JUDGE else set())
    ignored = SPECIAL - read | ({"world_size"} if name == JUDGE else set())
    for field in sorted(ignored):
        key, leaf = f"rewards.{name}.{field}", domain_leaves()[field]
        if key in view.explicit and vars(view.config.rewards[name])[field] != leaf.typed_default:
            owners = [owner for owner, fields in SCORER_FIELDS.items() if field in fields] or [JUDGE]
            reads = ", ".join(f"rewards.{owner}" for owner in owners)
            expected = "max_concurrency: the judge has no processes" if field == "world_size" else f"it in {reads} only"
            view.error(
                "reward.unread", key, f"{field} for domain {name}, which does not read it", expected, "remove it"
            )


def ranges(view: Inspection, name: str, domain: RewardDomain) -> None:
    for fields, low in ((POSITIVE, 1), (NOT_NEGATIVE, 0)):
        for field in fields:
            value = vars(domain)[field]
            if value is not None and (value < 0 or (low and value == 0)):
                key = f"rewards.{name}.{field}"
                expected = "more than 0" if low else "0 or more"
                view.error("value.range", key, f"{field}={value}", expected, f"{key}={low}")


def mapped_twice(view: Inspection, name: str, domain: RewardDomain) -> None:
    if len(domain.score_map) != 2:
        got, key = f"score_map={list(domain.score_map)}", f"rewards.{name}.score_map"
        view.error("value.range", key, got, "two numbers: wrong, right", f"{key}=[0,1]")
    elif domain.reward_type != "binary" and tuple(domain.score_map) != (0.0, 1.0):
        got = f"score_map={list(domain.score_map)}, reward_type={domain.reward_type}"
        key = f"rewards.{name}.score_map"
        view.error("reward.map", key, got, "one of the two: both set the scores", f"{key}=[0,1]")


def endpoint(view: Inspection, judge: RewardDomain) -> None:
    for field, example in (("api_base", "http://HOST:PORT/v1"), ("model", "NAME")):
        if not vars(judge)[field]:
            key = f"rewards.{JUDGE}.{field}"
            view.error("reward.judge", key, "no value", "the judge's endpoint and model", f"{key}={example}")
    if judge.api_base:
        key, parts = f"rewards.{JUDGE}.api_base", urlsplit(judge.api_base)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            view.error("reward.judge", key, f"api_base={judge.api_base}", "a URL", f"{key}=http://HOST:PORT/v1")
        elif "@" in parts.netloc or parts.query:
            fix = f"rewards.{JUDGE}.api_key_env=VARIABLE"
            view.error("reward.secret", key, "a URL with a password or query (not shown)", "neither", fix)


def key_name(view: Inspection, judge: RewardDomain) -> None:
    if judge.api_key_env is not None and not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", judge.api_key_env):
        key = f"rewards.{JUDGE}.api_key_env"
        got, expected = "what no variable can be called (not shown)", "the name of a variable, not the key itself"
        view.error("reward.secret", key, got, expected, f"{key}=JUDGE_API_KEY")


def template(view: Inspection, judge: RewardDomain) -> None:
    if judge.prompt_path is not None and not Path(judge.prompt_path).expanduser().is_file():
        key = f"rewards.{JUDGE}.prompt_path"
        view.error("reward.file", key, f"{judge.prompt_path}: no such file", "a text file", f"{key}=FILE")


def devices(view: Inspection, judge: RewardDomain) -> None:
    """Ids are global: node i owns those from i x its number of devices on. A separate rollout follows the trainer."""
    world, separate = view.config.derived.world_size, view.rollout.nnodes > 0
    together = ["actor", *([] if separate else ["rollout"]), *(["reference"] if view.needs_reference else [])]
    roles = {", ".join(together): range(world)}
    if separate:
        roles["rollout"] = range(world, world + view.config.derived.rollout_world_size)
    for role, used in roles.items():
        if any(device in used for device in judge.devices):
            span = f"[{used[0]}-{used[-1]}]" if len(used) > 1 else f"[{used[0]}]"
            view.error(
                "reward.devices",
                f"rewards.{JUDGE}.devices",
                f"{JUDGE} devices {list(judge.devices)} overlap {role} devices {span}",
                "devices that no role of the run uses",
                "give the judge its own",
            )
