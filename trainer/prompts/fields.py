"""Checks and conversions of single fields; each raises FieldProblem with its own code."""

from __future__ import annotations

import json
import math
import re
from typing import Any

from trainer.prompts.errors import FieldProblem, kind
from trainer.prompts.files import SourceFloat, parse_json, plain
from trainer.prompts.row import Message

ROLES = ("system", "user", "assistant", "tool")
CASE_TYPES = {"pytest": "pytest", "assert": "assert", "stdin": "stdin", "input": "stdin", "stdin_stdout": "stdin"}
CASE_KEYS = {"pytest": ("assert_code",), "assert": ("assert_code",), "stdin": ("stdin", "expected_stdout")}
NEEDED_TRUTH = {
    "math_rule": "non-empty answer text (LaTeX or plain)",
    "ifeval": "{instruction_id_list, kwargs}",
    "crossthinkqa": "one letter A-J",
    "choice": "one letter A-J",
    "llm_judge": "reference answer text",
}


def absent(value: Any) -> str | None:
    """`missing` or `blank` when there is nothing in a field, else None."""
    if value is None:
        return "missing"
    return "blank" if isinstance(value, str) and not value.strip() else None


def parse_messages(record: dict[str, Any], prompt_key: str) -> tuple[Message, ...]:
    """`messages` (list or JSON string), else the prompt column (list, or text of one user message)."""
    name = "messages" if absent(record.get("messages")) is None else prompt_key
    value = record.get(name)
    if absent(value) is not None:
        raise FieldProblem("D18", f"messages or {prompt_key}", "neither", "one of both", "Add it")
    if isinstance(value, str):
        if name == prompt_key and prompt_key != "messages":
            return (Message("user", value),)
        value = _messages_from_text(value)
    if not isinstance(value, list) or not value:
        got = "empty list" if value == [] else kind(value)
        raise FieldProblem("D15", name, got, "non-empty list", "Wrap in [ ]")
    messages = tuple(_message(item, place, name) for place, item in enumerate(value, 1))
    roles = [message.role for message in messages]
    if roles[-1] == "assistant":
        raise FieldProblem("D17", name, "assistant", "user or tool last", "Drop the stored answer")
    if "user" not in roles:
        raise FieldProblem("D17", name, "no user message", "user or tool last", "Add the question as a user message")
    return messages


def _messages_from_text(text: str) -> Any:
    try:
        return parse_json(text)
    except json.JSONDecodeError as error:
        got = f"{error.msg} at column {error.colno}"
        raise FieldProblem("D14", "messages", got, "JSON list of {role, content}", "Write the list itself") from None


def _message(item: Any, place: int, name: str) -> Message:
    if not isinstance(item, dict):
        raise FieldProblem("D16", name, f"{kind(item)} as item {place}", "{role, content}", "Write an object")
    for key in ("role", "content"):
        if item.get(key) is None:
            raise FieldProblem("D16", name, f"item {place} without '{key}'", "{role, content}", "Complete the message")
    role, content = item["role"], item["content"]
    if role not in ROLES:
        raise FieldProblem("D16", name, f"role {role!r} in item {place}", ", ".join(ROLES), "Rename")
    if isinstance(content, list) and all(_is_text_part(part) for part in content):
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str):
        got = f"content of type {kind(content)} in item {place}"
        raise FieldProblem("D16", name, got, "a string or a list of {type: text, text}", "Write the content as text")
    return Message(role, content)


def _is_text_part(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def parse_ground_truth(record: dict[str, Any], domain: str | None) -> str | None:
    """Text of the reference answer; `domain=None` (own reward function) asks for none."""
    inner = record.get("reward_model")
    name = "ground_truth"
    if "ground_truth" not in record and isinstance(inner, dict):
        name, value = "reward_model.ground_truth", inner.get("ground_truth")
    else:
        value = record.get("ground_truth")
    if domain == "ifeval":
        return _instructions(record, name, value)
    missing = absent(value)
    if missing is not None:
        if domain in NEEDED_TRUTH:
            raise FieldProblem("D19", name, missing, NEEDED_TRUTH[domain], "Add it")
        return value
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise FieldProblem("D20", name, kind(value), "string or number", "Write the answer as text")
    text = value if isinstance(value, str) else number_text(value)
    if domain in ("choice", "crossthinkqa") and not re.fullmatch(r"[A-J]", text.strip()):
        raise FieldProblem("D23", name, repr(text), "one letter A-J", "Map the option to its letter")
    return text


def _instructions(record: dict[str, Any], name: str, value: Any) -> str:
    """The instruction list as JSON text, from `ground_truth` or from own fields."""
    if absent(value) is not None:
        value = {key: record[key] for key in ("instruction_id_list", "kwargs") if key in record}
    if isinstance(value, str):
        try:
            value = parse_json(value)
        except json.JSONDecodeError as error:
            raise FieldProblem("D20", name, error.msg, NEEDED_TRUTH["ifeval"], "Write a JSON object") from None
    if not isinstance(value, dict):
        raise FieldProblem("D20", name, kind(value), NEEDED_TRUTH["ifeval"], "Write a JSON object")
    ids, kwargs = value.get("instruction_id_list"), value.get("kwargs")
    if not isinstance(ids, list) or not ids:
        raise FieldProblem("D19", name, "no instructions", NEEDED_TRUTH["ifeval"], "Add it")
    if not isinstance(kwargs, list) or len(kwargs) != len(ids):
        got = f"{len(ids)} ids, {len(kwargs) if isinstance(kwargs, list) else 0} kwargs"
        raise FieldProblem("D24", name, got, "equal length", "Add {} for ids without arguments")
    return json.dumps(plain({"instruction_id_list": ids, "kwargs": kwargs}))


def parse_style(record: dict[str, Any], domain: str | None) -> str:
    inner = record.get("reward_model")
    style = (inner.get("style") if isinstance(inner, dict) else None) or "rule"
    if style not in ("rule", "model"):
        raise FieldProblem("D22", "reward_model.style", repr(style), "rule, model", "Change or convert the row")
    if style == "model" and domain not in (None, "llm_judge"):
        got = f"'model' in domain {domain}"
        raise FieldProblem("D22", "reward_model.style", got, "rule, or a row of llm_judge", "Change or convert the row")
    return style


def parse_cases(record: dict[str, Any], domain: str | None) -> tuple[str, tuple[dict[str, Any], ...]]:
    """(case_type, cases); checked for code only, elsewhere the fields are usually empty strings."""
    inner = record.get("extra_info")
    sources = (record, inner if isinstance(inner, dict) else {})
    case_type = next((s["case_type"] for s in sources if s.get("case_type")), "")
    cases = next((s["test_cases"] for s in sources if s.get("test_cases")), None)
    if domain != "code_sandbox":
        return str(case_type), ()
    if case_type not in CASE_TYPES:
        got = repr(case_type) if case_type else "missing"
        raise FieldProblem("D22", "case_type", got, "pytest, assert, stdin", "Change or convert the row")
    case_type = CASE_TYPES[case_type]
    if isinstance(cases, str):
        try:
            cases = parse_json(cases)
        except json.JSONDecodeError as error:
            raise FieldProblem("D21", "test_cases", error.msg, "non-empty list", "Complete the case") from None
    if not isinstance(cases, list) or not cases:
        got = "missing" if cases is None else "empty list" if cases == [] else kind(cases)
        raise FieldProblem("D21", "test_cases", got, "non-empty list", "Complete the case")
    wanted = "{" + ", ".join(CASE_KEYS[case_type]) + "}"
    for place, case in enumerate(cases, 1):
        if not isinstance(case, dict):
            raise FieldProblem("D21", "test_cases", f"{kind(case)} as item {place}", wanted, "Complete the case")
        for key in CASE_KEYS[case_type]:
            if key not in case:
                got = f"item {place} without '{key}'"
                raise FieldProblem("D21", "test_cases", got, wanted, "Complete the case")
    return case_type, tuple(plain(case) for case in cases)


def parse_difficulty(record: dict[str, Any]) -> tuple[float | None, str]:
    """(number or None, text): "4.5" -> (4.5, "4.5"); "8.0+" -> (None, "8.0+")."""
    inner = record.get("extra_info")
    value = record.get("difficulty")
    if value is None and isinstance(inner, dict):
        value = inner.get("difficulty")
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return None, ""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise FieldProblem("D25", "difficulty", kind(value), "string, int or float", "Change it")
    text = value if isinstance(value, str) else number_text(value)
    number = re.fullmatch(r"\s*[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?\s*", text, re.IGNORECASE | re.ASCII)
    return (float(text) if number else None), text


def parse_tag(record: dict[str, Any], reward_fn_key: str, parquet: bool) -> str:
    name = "tag" if "tag" in record or not (parquet or reward_fn_key in record) else reward_fn_key
    value = record.get(name)
    if name in record and value is None:
        raise FieldProblem("D10", name, "null", "string", "Add the field")
    missing = absent(value)
    if missing is not None or not isinstance(value, str):
        raise FieldProblem("D10", name, missing or kind(value), "string", "Add the field")
    return value


def parse_id(record: dict[str, Any], line: int, file: str, parquet: bool, missing_id: str) -> str:
    """JSONL: `id`, or FILE:LINE when `missing_id=line`. Parquet: `extra_info.index`, else `id`, else the row number."""
    inner = record.get("extra_info")
    value = inner.get("index") if parquet and isinstance(inner, dict) else None
    if absent(value) is not None:
        value = record.get("id")
    if isinstance(value, float) and parquet and value.is_integer():
        value = int(value)  # a column of ints with gaps comes back as floats
    missing = absent(value)
    if missing is None and isinstance(value, str | int) and not isinstance(value, bool):
        return str(value)
    if missing is not None and parquet:
        return str(line)
    if missing is not None and missing_id == "line":
        return f"{file}:{line}"
    raise FieldProblem("D12", "id", missing or kind(value), "string or int", "Add ids or set data.missing_id=line")


def number_text(value: float) -> str:
    return value.text if isinstance(value, SourceFloat) else str(value)
