"""One micro-batch through a Megatron chunk: packing, labels, and log-probs from vocabulary-parallel logits.

Shape legend: T packed tokens of the micro-batch, P >= T the same padded for sequence and context parallelism,
C those of them that this context-parallel rank holds (all P with one rank), V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor, nn

from engines.base import ForwardOptions
from engines.batch import PolicyOutput, TrainBatch, ValueOutput, cumulative
from engines.logprobs import next_token_labels, rows_to_tokens, sum_pi_squared, token_log_probs
from engines.megatron.context_parallel import Cut, cut


@dataclass(frozen=True)
class MicroBatch:
    """`rows` are the caller's sequence numbers, empty for a filler, whose results count nowhere.

    `routes` [T, layers, K] stay on the host: each layer takes its own (routing.py).
    """

    rows: list[int]
    batch: TrainBatch
    routes: Tensor | None = None


@dataclass(frozen=True)
class PackedInput:
    """What a chunk takes: [1, C] ids and positions, thd parameters of all P tokens; `batch` holds the T real
    tokens, and `cut` leads from these to this rank's and back."""

    batch: TrainBatch
    cut: Cut
    input_ids: Tensor
    position_ids: Tensor
    sequences: PackedSeqParams


def pack(batch: TrainBatch, multiple: int, device: torch.device) -> PackedInput:
    """Pad and cut, every rank's tokens a multiple of `multiple` (sequence parallelism splits them evenly).

    The offsets stay on the host, where attention and rotary embeddings read them as python numbers.
    """
    batch, part = batch.to(device), cut(batch.lengths, multiple, device)
    cu_seqlens = cumulative(part.lengths).int()
    return PackedInput(
        batch=batch,
        cut=part,
        input_ids=part.local(batch.input_ids)[None],
        position_ids=part.local(batch.position_ids)[None],
        sequences=PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_kv=cu_seqlens,
            max_seqlen_q=max(part.lengths),
            max_seqlen_kv=max(part.lengths),
        ),
    )


def run_chunk(chunk: nn.Module, inputs: PackedInput) -> Tensor:
    """Logits [1, C, V local] (of a value model, values [1, C, 1]) on the last stage, hidden states
    [C local, 1, hidden] on the others."""
    return chunk(inputs.input_ids, inputs.position_ids, None, packed_seq_params=inputs.sequences)


def score(logits_1CV: Tensor, inputs: PackedInput, options: ForwardOptions, vocab_size: int) -> PolicyOutput:
    """Log-probs (and what else is asked for) [T] of the micro-batch's own tokens, the same on every tensor- and
    context-parallel rank: each evaluates the loss of whole sequences and propagates the gradient of the tokens it
    holds."""
    batch, group = inputs.batch, parallel_state.get_tensor_model_parallel_group()
    logits_CV = logits_1CV.flatten(0, 1)  # a view; indexing would cost a zero-filled copy in the backward pass
    log_probs_C, entropy_C = token_log_probs(
        logits_CV,
        inputs.cut.local(next_token_labels(batch.input_ids, batch.cu_seqlens)),
        temperature=options.temperature,
        group=group,
        vocab_size=vocab_size,
        entropy=options.entropy,
    )
    squares_C = None
    if options.sum_pi_squared:
        squares_C = sum_pi_squared(logits_CV, temperature=options.temperature, group=group, vocab_size=vocab_size)
    log_probs_T, entropy_T, squares_T = (
        None if x is None else rows_to_tokens(inputs.cut.whole(x), batch.cu_seqlens)
        for x in (log_probs_C, entropy_C, squares_C)
    )
    if entropy_T is not None and not options.entropy_grad:
        entropy_T = entropy_T.detach()
    return PolicyOutput(log_probs_T, entropy_T, sum_pi_squared=squares_T)


def score_values(values_1C1: Tensor, inputs: PackedInput) -> ValueOutput:
    """Values [T] of the micro-batch's own tokens, on every rank as in `score`."""
    return ValueOutput(rows_to_tokens(inputs.cut.whole(values_1C1.flatten()), inputs.batch.cu_seqlens))
