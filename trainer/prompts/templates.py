"""Messages -> token ids, once; response ids -> text for the scorers. The only user of a tokenizer."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from jinja2.exceptions import TemplateError
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from trainer.prompts.chat_templates import NATIVE, ChatTemplate, find_template
from trainer.prompts.errors import FieldProblem
from trainer.prompts.row import Message
from trainer.reward.text import CLOSE, OPEN

logger = logging.getLogger(__name__)


def load_tokenizer(path: str, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer of a model directory. ValueError when there is none."""
    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"got no tokenizer from {path!r} ({error}); expected a Hugging Face model directory with tokenizer files; "
            "check actor_rollout_ref.model.path"
        ) from error


class PromptEncoder:
    """Renders conversations with a chat template and decodes answers.

    chat_template_kwargs   to every template (e.g. enable_thinking); wins over what a named template sets
    custom_chat_template   Jinja text in place of the named `template`
    template               a name of CHAT_TEMPLATES
    template_by_tag        tag -> name, for rows that need another template
    default_system         system message of conversations without one; nothing else adds a system message, except
                           a template whose own text does

    ValueError for an unknown name, and when the tokenizer's own template is asked for and there is none.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        custom_chat_template: str | None = None,
        *,
        template: str = NATIVE,
        template_by_tag: Mapping[str, str] | None = None,
        default_system: str | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self._kwargs = dict(chat_template_kwargs or {})
        self._system = () if default_system is None else (Message("system", default_system),)
        usual = find_template(template, "data.template")
        if custom_chat_template is not None:
            usual = ChatTemplate(custom_chat_template)
        self._usual = self._complete(usual)
        self._by_tag = {
            tag: self._complete(find_template(name, f"data.template_by_tag.{tag}"))
            for tag, name in (template_by_tag or {}).items()
        }
        # Thinking marks may be special tokens, but the scorers need to see them.
        special = set(tokenizer.all_special_tokens) - {OPEN, CLOSE}
        self._removed = sorted(special, key=len, reverse=True)

    def _complete(self, template: ChatTemplate) -> ChatTemplate:
        """With the tokenizer's text where the template has none of its own."""
        text = template.text or self.tokenizer.chat_template
        if not text:
            raise ValueError(
                f"got a tokenizer without chat template ({self.tokenizer.name_or_path}); expected one to render "
                "messages; use an instruction-tuned model, or set data.template=chatml or data.chat_template_path"
            )
        for name in template.kwargs:
            if name not in text:
                logger.warning("the tokenizer's chat template does not know %s: it has no effect", name)
        return ChatTemplate(text, {**template.kwargs, **self._kwargs})

    @property
    def tags(self) -> frozenset[str]:
        """Tags that have a template of their own."""
        return frozenset(self._by_tag)

    def encode(self, messages: Sequence[Message], tag: str = "") -> tuple[int, ...]:
        """Token ids of the conversation with the generation prompt, by the template of the row's `tag`.

        The template writes every special token it wants, so the tokenizer adds none: one BOS, not two.
        Raises FieldProblem D31 when the template cannot render the messages.
        """
        template = self._by_tag.get(tag, self._usual)
        if all(message.role != "system" for message in messages):
            messages = (*self._system, *messages)
        turns = [{"role": message.role, "content": message.content} for message in messages]
        try:
            text = self.tokenizer.apply_chat_template(
                turns, chat_template=template.text, tokenize=False, add_generation_prompt=True, **template.kwargs
            )
        except (TemplateError, TypeError, ValueError, KeyError) as error:
            fix = "Choose data.template"
            raise FieldProblem("D31", "messages", str(error), "a renderable conversation", fix) from error
        return tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def decode(self, ids: Sequence[int]) -> str:
        """Text for scorers: decoded with special tokens, then the tokenizer's own ones are cut out."""
        text = self.render(ids)
        for token in self._removed:
            text = text.replace(token, "")
        return text

    def render(self, ids: Sequence[int]) -> str:
        """Text with every special token visible."""
        return self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def opens_think(self, prompt_ids: Sequence[int]) -> bool:
        """True when the prompt ends inside a thinking block, so that the answer begins in it."""
        return self.render(prompt_ids[-16:]).rstrip().endswith(OPEN)

    @cached_property
    def fingerprint(self) -> str:
        """Changes when the same messages might give other ids."""
        templates = {tag: [each.text, sorted(each.kwargs.items())] for tag, each in self._by_tag.items()}
        usual = [self._usual.text, sorted(self._usual.kwargs.items())]
        parts = [usual, sorted(templates.items()), self._system, _vocabulary(self.tokenizer)]
        return hashlib.sha256(json.dumps(parts, default=str).encode()).hexdigest()


def _vocabulary(tokenizer: PreTrainedTokenizerBase) -> Any:
    """Everything that turns text into ids. Truncation and padding are settings of the last call, not of the text."""
    if not tokenizer.is_fast:
        return [type(tokenizer).__name__, sorted(tokenizer.get_vocab().items())]
    return json.loads(tokenizer.backend_tokenizer.to_str()) | {"truncation": None, "padding": None}
