"""How prompts are rendered."""

from __future__ import annotations

import typing
from pathlib import Path

from trainer.config.inspection import Inspection
from trainer.config.schema_data import Template

TEMPLATES = typing.get_args(Template)


def check(view: Inspection) -> None:
    template_names(view)
    template_file(view)


def template_names(view: Inspection) -> None:
    for tag, name in view.config.data.template_by_tag.items():
        if name not in TEMPLATES:
            view.error(
                "data.template",
                f"data.template_by_tag.{tag}",
                f"template {name} for tag {tag}",
                f"one of {', '.join(TEMPLATES)}",
                f"'data.template_by_tag={{{tag}:native}}'",
            )


def template_file(view: Inspection) -> None:
    data, key = view.config.data, "data.chat_template_path"
    if data.chat_template_path is None:
        return
    if data.template is not None:
        got = f"chat_template_path={data.chat_template_path}, template={data.template}"
        view.error("data.template", key, got, "one of the two", f"data.template=null   (or {key}=null)")
    if not Path(data.chat_template_path).expanduser().is_file():
        view.error("data.template", key, f"{data.chat_template_path}: no such file", "a Jinja file", f"{key}=FILE")
