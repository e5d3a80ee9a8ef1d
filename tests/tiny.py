"""Tiny random models whose sizes hide no mistake: no square matrix, no two equal parts."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

KINDS = ("llama", "llama_tied", "qwen2", "qwen3", "qwen3_tied")

_COMMON = dict(
    vocab_size=130,
    hidden_size=80,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=24,
    intermediate_size=104,
    rms_norm_eps=1e-6,
    max_position_embeddings=256,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)


def tiny_config(kind: str, **changes: object) -> PretrainedConfig:
    classes = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}
    family, _, tied = kind.partition("_")
    values = {**_COMMON, "tie_word_embeddings": bool(tied), **changes}
    if family == "qwen2":  # has no head_dim of its own: hidden_size / heads
        values.pop("head_dim")
    return classes[family](**values)


def write_tiny_model(folder: Path | str, kind: str, seed: int = 0, **changes: object) -> Path:
    """A random fp32 model saved by transformers: weights scaled x3, gains 1 +- 0.3, random biases."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(tiny_config(kind, **changes), dtype=torch.float32)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if name.endswith("norm.weight"):
                value.copy_(1 + 0.3 * (2 * torch.rand_like(value) - 1))
            elif name.endswith("bias"):
                value.copy_(0.1 * torch.randn_like(value))
            elif "embed" in name:  # also the row of the padding token, which transformers leaves at zero
                value.normal_(std=0.06)
            else:
                value.mul_(3.0)
    model.save_pretrained(folder)
    return Path(folder)


def write_tiny_tokenizer(folder: Path | str) -> None:
    """One token per printable ASCII character, a chat template, and ids that fit the tiny models."""
    special = ["<pad>", "<s>", "</s>", "<unk>", "<|user|>", "<|assistant|>"]
    vocab = {token: index for index, token in enumerate(special + [chr(code) for code in range(32, 127)])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        additional_special_tokens=["<|user|>", "<|assistant|>"],
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = (
        "{{ bos_token }}{% for m in messages %}{{ '<|' ~ m['role'] ~ '|>' ~ m['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
    )
    fast.save_pretrained(folder)
