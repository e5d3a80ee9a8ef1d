"""Chat templates by name, or from a Jinja file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# One turn is <|im_start|>role, line end, content, <|im_end|>, line end; no system text and no BOS of its own.
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class ChatTemplate:
    """Jinja text (None: the tokenizer's own) and the arguments it is rendered with."""

    text: str | None = None
    kwargs: Mapping[str, Any] = field(default_factory=dict)


NATIVE = "native"
CHAT_TEMPLATES = {
    NATIVE: ChatTemplate(),
    "qwen2_5": ChatTemplate(),  # the tokenizer's own, under the name other frameworks give it
    "qwen3": ChatTemplate(kwargs={"enable_thinking": True}),
    "chatml": ChatTemplate(CHATML),
}


def find_template(name: str, key: str) -> ChatTemplate:
    """The template of that name; ValueError that says what `key` may be."""
    if name not in CHAT_TEMPLATES:
        raise ValueError(
            f"got {key}={name}; expected one of {', '.join(CHAT_TEMPLATES)}; "
            "rename it, or put the Jinja text into a file and set data.chat_template_path"
        )
    return CHAT_TEMPLATES[name]


def read_template(path: str | Path) -> str:
    """Jinja text of a file. ValueError when it cannot be read or is blank."""
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"got data.chat_template_path={path} ({error}); expected a readable UTF-8 Jinja file; check the path"
        ) from error
    if not text.strip():
        raise ValueError(f"got an empty file data.chat_template_path={path}; expected a Jinja template; fill it")
    return text
