"""Token ids of many rows: in several processes where that pays, and kept on disk between runs where asked for."""

from __future__ import annotations

import hashlib
import itertools
import logging
import multiprocessing
import os
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np

from trainer.prompts.errors import FieldProblem
from trainer.prompts.row import Message, Row
from trainer.prompts.templates import PromptEncoder

logger = logging.getLogger(__name__)

CHUNK = 2000  # rows per job: a process takes seconds to start, so fewer rows are not worth one
Conversation = tuple[tuple[Message, ...], str]  # messages and tag
Encoded = tuple[int, ...] | FieldProblem


def encode_rows(
    rows: Sequence[Row], encoder: PromptEncoder, workers: int = 1, cache_dir: Path | None = None
) -> Iterable[Encoded]:
    """For each row its token ids, or the problem (D31) that its template has with it.

    With `cache_dir` the ids are read from there if the same conversations went through the same tokenizer and
    templates before, and written there if not. Rows with problems are never cached.
    """
    if cache_dir is None:
        return _encode(rows, encoder, workers)
    path = cache_dir / f"{_key(rows, encoder)}.npz"
    stored = _read(path, len(rows))
    if stored is not None:
        return stored
    found = list(_encode(rows, encoder, workers))
    if not any(isinstance(each, FieldProblem) for each in found):
        _write(path, found)
    return found


def _encode(rows: Sequence[Row], encoder: PromptEncoder, workers: int) -> Iterator[Encoded]:
    conversations = ((row.messages, row.tag) for row in rows)
    workers = min(workers, -(-len(rows) // CHUNK))
    if workers <= 1:
        for conversation in conversations:
            yield _encode_one(encoder, conversation)
        return
    # Spawned, not forked: this process already has threads (tokenizers, torch).
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, _take_encoder, (encoder,)) as pool:
        for found in pool.map(_encode_chunk, _chunks(conversations)):
            yield from found


def _encode_one(encoder: PromptEncoder, conversation: Conversation) -> Encoded:
    try:
        return encoder.encode(*conversation)
    except FieldProblem as problem:
        return problem


def _chunks(conversations: Iterator[Conversation]) -> Iterator[list[Conversation]]:
    while chunk := list(itertools.islice(conversations, CHUNK)):
        yield chunk


_encoder_of_process: PromptEncoder


def _take_encoder(encoder: PromptEncoder) -> None:
    """Once per process: a tokenizer is megabytes, too many to send with every job."""
    global _encoder_of_process
    _encoder_of_process = encoder


def _encode_chunk(chunk: list[Conversation]) -> list[Encoded]:
    return [_encode_one(_encoder_of_process, conversation) for conversation in chunk]


def _key(rows: Sequence[Row], encoder: PromptEncoder) -> str:
    """Of the conversations themselves: a file's hash would not see data.prompt_key or a dropped duplicate."""
    digest = hashlib.sha256(encoder.fingerprint.encode())
    for row in rows:
        digest.update(repr((row.tag, row.messages)).encode())
    return digest.hexdigest()


def _read(path: Path, count: int) -> list[tuple[int, ...]] | None:
    """The stored ids; None when there is no whole file."""
    try:
        with np.load(path) as stored:
            lengths, ids = stored["lengths"], stored["ids"]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        logger.warning("%s is damaged (%s): the prompts are tokenised again", path, error)
        return None
    assert len(lengths) == count, f"{path} holds {len(lengths)} prompts, its name belongs to {count}"
    ends = np.cumsum(lengths).tolist()
    return [tuple(ids[end - length : end].tolist()) for end, length in zip(ends, lengths.tolist(), strict=True)]


def _write(path: Path, found: list[Encoded]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.stem}.{os.getpid()}.npz")
    lengths = np.array([len(ids) for ids in found], dtype=np.int64)
    np.savez(partial, lengths=lengths, ids=np.fromiter(itertools.chain.from_iterable(found), dtype=np.int64))
    os.replace(partial, path)
