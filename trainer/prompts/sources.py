"""From the configuration to the prompts of training and validation, with all problems of both reported together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.config import Config
from trainer.prompts.chat_templates import NATIVE, read_template
from trainer.prompts.cursor import PromptSource
from trainer.prompts.errors import DataError
from trainer.prompts.rows import load_rows
from trainer.prompts.templates import PromptEncoder, load_tokenizer
from trainer.reward.spec import DomainSpec


@dataclass(frozen=True)
class Sources:
    """Room 1, ready: what is trained on, what is validated on, and how both became token ids."""

    encoder: PromptEncoder
    train: PromptSource
    validation: PromptSource


def read_sources(config: Config, domains: Mapping[str, DomainSpec], scorers: Mapping[str, Any]) -> Sources:
    """Read, check and tokenise all files. `scorers` are the arguments of load_rows that say what can be scored.

    Raises DataError with the problems of both sets of files, ValueError for a tokenizer or templates that cannot be
    used.
    """
    encoder = build_encoder(config)
    sources: dict[str, PromptSource] = {}
    errors: list[DataError] = []
    for part in ("train", "val"):
        try:
            sources[part] = _source(config, encoder, part, domains, scorers)
        except DataError as error:
            errors.append(error)
    if errors:
        raise DataError.joined(errors, config.data.max_reported_errors)
    _check_tags(encoder, sources.values())
    return Sources(encoder, sources["train"], sources["val"])


def build_encoder(config: Config) -> PromptEncoder:
    data = config.data
    return PromptEncoder(
        load_tokenizer(config.actor_rollout_ref.model.path, data.trust_remote_code),
        data.apply_chat_template_kwargs,
        None if data.chat_template_path is None else read_template(data.chat_template_path),
        template=data.template or NATIVE,
        template_by_tag=data.template_by_tag,
        default_system=data.default_system,
    )


def _source(
    config: Config,
    encoder: PromptEncoder,
    part: str,
    domains: Mapping[str, DomainSpec],
    scorers: Mapping[str, Any],
) -> PromptSource:
    data = config.data
    is_train = part == "train"
    rows = load_rows(
        list(data.train_files if is_train else data.val_files),
        dataset_dir=data.dataset_dir,
        prompt_key=data.prompt_key,
        reward_fn_key=data.reward_fn_key,
        files_key=f"data.{part}_files",
        domains=domains,
        **scorers,
        max_samples=data.train_max_samples if is_train else data.val_max_samples,
        missing_id=data.missing_id,
        duplicate_ids=data.duplicate_ids,
        max_line_bytes=data.max_line_bytes,
        max_reported_errors=data.max_reported_errors,
    )
    return PromptSource(
        rows,
        encoder,
        batch_size=data.train_batch_size if is_train else 1,
        shuffle=data.shuffle if is_train else data.validation_shuffle,
        seed=data.seed if data.seed is not None else config.trainer.seed,
        max_prompt_length=data.max_prompt_length,
        truncation=data.truncation,
        filter_overlong=data.filter_overlong_prompts,
        max_reported_errors=data.max_reported_errors,
        domain_shares=data.domain_interleave_probs if is_train else None,
        mix_block=data.gen_batch_size,
        workers=data.filter_overlong_prompts_workers,
        cache_dir=None if data.prompt_cache_dir is None else Path(data.prompt_cache_dir).expanduser(),
    )


def _check_tags(encoder: PromptEncoder, sources: Iterable[PromptSource]) -> None:
    """A template for a tag that no row has is a misspelt tag."""
    tags = {row.tag for source in sources for row in source.rows}
    unused = sorted(encoder.tags - tags)
    if unused:
        raise ValueError(
            f"got data.template_by_tag for {', '.join(unused)}; expected tags of the data: {', '.join(sorted(tags))}; "
            "rename or remove the entry"
        )
