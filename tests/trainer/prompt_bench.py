"""A byte tokenizer with a chat template, rows without files, and prompts over them."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from trainer.prompts import Message, PromptEncoder, PromptSource, Row

CHAT = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% if thinking %}<think>{% endif %}{% endif %}"
)
SPECIALS = ["<s>", "</s>", "<|end|>", "<|user|>", "<|system|>", "<|assistant|>", "<think>", "</think>"]


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, and like many a real one it would add its own BOS."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(letters)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(SPECIALS)
    bos = ("<s>", backend.token_to_id("<s>"))
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[bos])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", additional_special_tokens=SPECIALS[2:]
    )
    tokenizer.chat_template = CHAT
    return tokenizer


TOKENIZER = byte_tokenizer()
ENCODER = PromptEncoder(TOKENIZER)
OVERHEAD = 4  # <s> <|user|> ... <|end|> <|assistant|>


def rows_of(count: int, text: str = "q", tag: str = "t") -> list[Row]:
    return [
        Row(str(i), tag, "math_rule", (Message("user", text),), "7", origin=("a.jsonl", i + 1)) for i in range(count)
    ]


def source(rows: list[Row], **options) -> PromptSource:
    defaults = dict(batch_size=2, shuffle=True, seed=1, max_prompt_length=64)
    return PromptSource(rows, ENCODER, **{**defaults, **options})


def uids(batches: list) -> list[list[str]]:
    return [[item.uid for item in batch] for batch in batches]
