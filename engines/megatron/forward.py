"""One micro-batch through a Megatron chunk: packing, labels, and log-probs from vocabulary-parallel logits.

Shape legend: T packed tokens of the micro-batch, P >= T the same padded for sequence parallelism, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor, nn

from engines.base import ForwardOptions
from engines.batch import PolicyOutput, TrainBatch
from engines.logprobs import next_token_labels, rows_to_tokens, token_log_probs


@dataclass(frozen=True)
class MicroBatch:
    """`rows` are the caller's sequence numbers, empty for a filler, whose results count nowhere."""

    rows: list[int]
    batch: TrainBatch


@dataclass(frozen=True)
class PackedInput:
    """What a chunk takes: [1, P] ids and positions, thd parameters; `batch` holds the T real tokens."""

    batch: TrainBatch
    input_ids: Tensor
    position_ids: Tensor
    sequences: PackedSeqParams


def pack(batch: TrainBatch, multiple: int, device: torch.device) -> PackedInput:
    """Pad with one filler sequence to a multiple of `multiple` tokens (sequence parallelism splits tokens evenly).

    The offsets stay on the host, where attention and rotary embeddings read them as python numbers.
    """
    padding = -batch.num_tokens % multiple
    lengths = batch.lengths + ([padding] if padding else [])
    input_ids = torch.cat([batch.input_ids, batch.input_ids.new_zeros(padding)])
    position_ids = torch.cat([batch.position_ids, torch.arange(padding)])
    cu_seqlens = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return PackedInput(
        batch=batch.to(device),
        input_ids=input_ids[None].to(device),
        position_ids=position_ids[None].to(device),
        sequences=PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_kv=cu_seqlens,
            max_seqlen_q=max(lengths),
            max_seqlen_kv=max(lengths),
        ),
    )


def run_chunk(chunk: nn.Module, inputs: PackedInput) -> Tensor:
    """Logits [1, P, V local] on the last stage, hidden states [P local, 1, hidden] on the others."""
    return chunk(inputs.input_ids, inputs.position_ids, None, packed_seq_params=inputs.sequences)


def score(logits_1PV: Tensor, inputs: PackedInput, options: ForwardOptions, vocab_size: int) -> PolicyOutput:
    """Log-probs and entropy [T] of the micro-batch's own tokens, the same on every tensor-parallel rank."""
    batch = inputs.batch
    labels_P = next_token_labels(inputs.input_ids[0], inputs.sequences.cu_seqlens_q.long())
    log_probs_P, entropy_P = token_log_probs(
        logits_1PV.flatten(0, 1),  # a view; indexing would cost a zero-filled copy in the backward pass
        labels_P,
        temperature=options.temperature,
        group=parallel_state.get_tensor_model_parallel_group(),
        vocab_size=vocab_size,
        entropy=options.entropy,
    )
    log_probs_T, entropy_T = (
        None if x is None else rows_to_tokens(x[: batch.num_tokens], batch.cu_seqlens) for x in (log_probs_P, entropy_P)
    )
    if entropy_T is not None and not options.entropy_grad:
        entropy_T = entropy_T.detach()
    return PolicyOutput(log_probs_T, entropy_T)
