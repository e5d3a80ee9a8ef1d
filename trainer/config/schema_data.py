"""Room 1 of the data flow: which rows are read and how they become prompts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from trainer.config.values import REQUIRED

Template = Literal["native", "qwen2_5", "qwen3", "chatml"]


@dataclass(frozen=True)
class CustomClass:
    path: str | None = None  # python file of an own dataset class
    name: str | None = None  # class name in that file


@dataclass(frozen=True)
class Data:
    train_files: list[str] = REQUIRED  # parquet or jsonl files, told apart by suffix
    val_files: list[str] = REQUIRED  # parquet or jsonl files for validation
    train_batch_size: int = 1024  # prompts per training step
    gen_batch_size: int | None = None  # prompts per generation round; null = train_batch_size
    max_prompt_length: int = 512  # tokens
    max_response_length: int = 512  # tokens
    prompt_key: str = "prompt"  # column of the messages
    reward_fn_key: str = "data_source"  # column that selects the reward
    truncation: Literal["error", "left", "right", "middle"] = "error"  # what happens to a prompt over the limit
    filter_overlong_prompts: bool = False  # drop prompts over the limit
    filter_overlong_prompts_workers: int = 1  # processes that tokenise the prompts; pays from some 10000 rows on
    shuffle: bool = True  # new order of the training rows in each epoch
    validation_shuffle: bool = False  # shuffle the validation rows once
    seed: int | None = None  # null = trainer.seed
    train_max_samples: int = -1  # rows; -1 = all
    val_max_samples: int = -1  # rows; -1 = all
    dataloader_num_workers: int = 8  # loader processes
    val_batch_size: int | None = None  # rows per validation batch; null = all at once
    trust_remote_code: bool = False  # run tokenizer code from the model's repository
    tokenizer: str | None = None  # another tokenizer than the model's
    custom_cls: CustomClass = field(default_factory=CustomClass)
    apply_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)  # to the chat template
    dataset_dir: str | None = None  # where relative file names are looked up; null = working directory
    domain_interleave_probs: dict[str, Any] = field(default_factory=dict)  # share of each domain in every batch
    template: Template | None = None  # qwen3 = the tokenizer's own with thinking on; null = native = qwen2_5 = its own
    template_by_tag: dict[str, Any] = field(default_factory=dict)  # tag -> name of a template, where it is another one
    chat_template_path: str | None = None  # Jinja file, instead of a named template
    default_system: str | None = None  # system text for rows that have none
    missing_id: Literal["error", "line"] = "error"  # rows without an id
    duplicate_ids: Literal["error", "first"] = "error"  # two rows with one (tag, id)
    max_reported_errors: int = 20  # data errors shown before the rest is counted
    max_line_bytes: int = 16777216  # longest accepted jsonl line, bytes
    prompt_cache_dir: str | None = None  # keeps the prompts' token ids for the next start; null = tokenise each time
    length_bucket: int = 1024  # tokens per bucket of the length histogram
    bucket_prompts: bool = False  # micro-batches of one length bucket
    allow_changed_files: bool = False  # resume although a data file changed; restarts the epoch
