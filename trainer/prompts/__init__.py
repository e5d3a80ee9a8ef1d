"""Rows on disk -> validated rows -> prompts of token ids, read through an exactly resumable cursor.

Names are imported when first used: scoring processes need `Row` without the tokenizer library.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainer.prompts.cursor import PromptItem, PromptSource
    from trainer.prompts.errors import DataError
    from trainer.prompts.report import report_text, write_report
    from trainer.prompts.row import Message, Row
    from trainer.prompts.rows import RowList, load_rows
    from trainer.prompts.sources import Sources, read_sources
    from trainer.prompts.templates import PromptEncoder, load_tokenizer

__all__ = [
    "DataError",
    "Message",
    "PromptEncoder",
    "PromptItem",
    "PromptSource",
    "Row",
    "RowList",
    "Sources",
    "load_rows",
    "load_tokenizer",
    "read_sources",
    "report_text",
    "write_report",
]
_MODULES = {
    "cursor": ("PromptItem", "PromptSource"),
    "errors": ("DataError",),
    "report": ("report_text", "write_report"),
    "row": ("Message", "Row"),
    "rows": ("RowList", "load_rows"),
    "sources": ("Sources", "read_sources"),
    "templates": ("PromptEncoder", "load_tokenizer"),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
