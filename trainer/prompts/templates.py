"""Messages -> token ids, once; response ids -> text for the scorers. The only user of a tokenizer."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2.exceptions import TemplateError
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from trainer.prompts.errors import FieldProblem
from trainer.prompts.row import Message
from trainer.reward.text import CLOSE, OPEN


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

    `chat_template_kwargs` goes to the template (e.g. enable_thinking); `custom_chat_template` is Jinja
    text that replaces the tokenizer's own. ValueError when there is no template at all.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        custom_chat_template: str | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.kwargs = dict(chat_template_kwargs or {})
        self.template = custom_chat_template or tokenizer.chat_template
        if not self.template:
            raise ValueError(
                f"got a tokenizer without chat template ({tokenizer.name_or_path}); expected one to render messages; "
                "use an instruction-tuned model, or put a chat_template.jinja into its folder"
            )
        # Thinking marks may be special tokens, but the scorers need to see them.
        special = set(tokenizer.all_special_tokens) - {OPEN, CLOSE}
        self._removed = sorted(special, key=len, reverse=True)

    def encode(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Token ids of the conversation with the generation prompt.

        The template writes every special token it wants, so the tokenizer adds none: one BOS, not two.
        Raises FieldProblem D31 when the template cannot render the messages.
        """
        turns = [{"role": message.role, "content": message.content} for message in messages]
        try:
            text = self.tokenizer.apply_chat_template(
                turns, chat_template=self.template, tokenize=False, add_generation_prompt=True, **self.kwargs
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

    @property
    def fingerprint(self) -> str:
        """Changes when the same messages might give other ids."""
        probe = self.tokenizer("0 aZ\n\u00e9", add_special_tokens=False)["input_ids"]
        parts = [self.template, sorted(self.kwargs.items()), len(self.tokenizer), probe]
        return hashlib.sha256(json.dumps(parts, default=str).encode()).hexdigest()
