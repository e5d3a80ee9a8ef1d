"""Log-probabilities and entropy of given tokens from (vocabulary-parallel) logits.

    z = logits / temperature
    log p(y) = z_y - logsumexp(z)          d log p / d z_i = [i = y] - p_i
    entropy  = logsumexp(z) - sum p_i z_i  d entropy / d z_i = -p_i (log p_i + entropy)

Shape legend: T rows, V vocabulary, Vl the columns of this rank, C rows of one chunk.

All maths is float32 whatever the logits' dtype, a chunk of rows at a time: beyond the logits and their
gradient nothing of size T x V is ever held. Under tensor parallelism two all-reduces of size T in the
forward pass, none in the backward pass: each rank's gradient is that of its own columns, exact also on
ranks that do not own the target.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

# Float32 elements of one chunk: 4 MiB on the host, where more would leave the cache, 64 MiB elsewhere.
_CHUNK_ELEMENTS = {"cpu": 2**20}
_CHUNK_ELEMENTS_ELSEWHERE = 2**24


def next_token_labels(input_ids_T: Tensor, cu_seqlens: Tensor) -> Tensor:
    """[T] the token that row t of the logits predicts; last rows of sequences, which predict nothing, get 0."""
    labels_T = input_ids_T.roll(-1)
    labels_T[cu_seqlens[1:] - 1] = 0
    return labels_T


def rows_to_tokens(values_T: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Move row t-1 to token t inside each sequence; first tokens, which nothing predicts, become 0."""
    first_T = torch.zeros(values_T.shape[0], dtype=torch.bool, device=values_T.device)
    first_T[cu_seqlens[:-1]] = True
    return values_T.roll(1).masked_fill(first_T, 0.0)


def token_log_probs(
    logits_TV_local: Tensor,
    labels_T: Tensor,
    *,
    temperature: float,
    group: dist.ProcessGroup | None = None,
    vocab_size: int | None = None,
    entropy: bool = False,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """log p(labels_T[t]) under row t, and the entropy of row t if asked for; float32 [T], differentiable.

    logits_TV_local  [T, Vl] columns `rank * Vl ...` of the vocabulary, rank within `group` (None: all columns)
    labels_T         [T] int64, each below `vocab_size`, the same on all ranks of `group`
    vocab_size       real vocabulary; columns from there on are padding and never count
    chunk            rows handled at once; chosen by size when None
    """
    rows = logits_TV_local.shape[0]
    assert labels_T.shape == (rows,), f"labels have shape {tuple(labels_T.shape)}, logits have {rows} rows"
    cut = _vocabulary_cut(logits_TV_local, group, vocab_size, chunk)
    log_probs_T, entropy_T = _TokenLogProbs.apply(
        logits_TV_local, labels_T - cut.first, 1.0 / temperature, cut.group, cut.valid, entropy, cut.chunk
    )
    return log_probs_T, entropy_T if entropy else None


@torch.no_grad()
def sum_pi_squared(
    logits_TV_local: Tensor,
    *,
    temperature: float,
    group: dist.ProcessGroup | None = None,
    vocab_size: int | None = None,
    chunk: int | None = None,
) -> Tensor:
    """[T] float32: sum_v p_v^2 = exp(lse(2z) - 2 lse(z)) of row t, without gradient; arguments as in token_log_probs.

    It is the chance that two draws agree: 1 for a certain row, 1 / V for a uniform one.
    """
    cut = _vocabulary_cut(logits_TV_local, group, vocab_size, chunk)
    rows = logits_TV_local.shape[0]
    max_T = torch.full((rows,), torch.finfo(torch.float32).min, device=logits_TV_local.device)
    sums_2T = torch.zeros(2, rows, device=logits_TV_local.device)
    work = _Workspace(logits_TV_local, cut.valid, cut.chunk, 1.0 / temperature)
    for part in work.chunks:
        z_CV = work.scaled(part)
        max_T[part] = z_CV.amax(1)
        e_CV = z_CV.sub_(max_T[part, None]).exp_()
        sums_2T[0, part] = e_CV.sum(1)
        sums_2T[1, part] = e_CV.square_().sum(1)
    if cut.group is not None:
        local_max_T = max_T.clone()
        dist.all_reduce(max_T, op=dist.ReduceOp.MAX, group=cut.group)
        scale_T = (local_max_T - max_T).exp()
        sums_2T *= torch.stack([scale_T, scale_T.square()])
        dist.all_reduce(sums_2T, group=cut.group)
    return sums_2T[1] / sums_2T[0].square()


@dataclass(frozen=True)
class _VocabularyCut:
    """This rank's columns begin with `first` and the first `valid` of them are real; `group` is None on one rank."""

    first: int
    valid: int
    chunk: int
    group: dist.ProcessGroup | None


def _vocabulary_cut(
    logits_TV_local: Tensor, group: dist.ProcessGroup | None, vocab_size: int | None, chunk: int | None
) -> _VocabularyCut:
    rank, size = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
    rows, local = logits_TV_local.shape
    vocab_size = local * size if vocab_size is None else vocab_size
    assert vocab_size <= local * size, f"vocab_size {vocab_size} exceeds the {size} x {local} columns given"
    elements = _CHUNK_ELEMENTS.get(logits_TV_local.device.type, _CHUNK_ELEMENTS_ELSEWHERE)
    return _VocabularyCut(
        first=rank * local,
        valid=min(max(vocab_size - rank * local, 0), local),
        chunk=min(chunk or max(1, elements // local), rows),
        group=group if size > 1 else None,
    )


class _TokenLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits_TV, labels_T, inverse_temperature, group, valid, entropy, chunk):
        """`labels_T` count from this rank's first column; those outside [0, valid) belong to other ranks."""
        owned_T = (labels_T >= 0) & (labels_T < valid)
        columns_T = torch.where(owned_T, labels_T, 0)
        max_T, sums_3T = _local_sums(logits_TV, columns_T, inverse_temperature, valid, entropy, chunk)
        if group is not None:
            max_T, sums_3T = _reduce(max_T, sums_3T, owned_T, group)
        sum_T, weighted_T, target_T = sums_3T
        log_sum_T = sum_T.log()
        log_probs_T = target_T - log_sum_T
        entropy_T = log_sum_T - weighted_T / sum_T
        ctx.save_for_backward(logits_TV, columns_T, owned_T, max_T + log_sum_T, entropy_T)
        ctx.settings = inverse_temperature, valid, chunk
        ctx.set_materialize_grads(False)  # tells an entropy without gradient, which costs less
        return log_probs_T, entropy_T

    @staticmethod
    def backward(ctx, grad_T, grad_entropy_T):
        logits_TV, columns_T, owned_T, lse_T, entropy_T = ctx.saved_tensors
        inverse_temperature, valid, chunk = ctx.settings
        if grad_T is None:
            grad_T = torch.zeros_like(lse_T)
        grad_TV = torch.empty_like(logits_TV)
        grad_TV[:, valid:] = 0
        work = _Workspace(logits_TV, valid, chunk, inverse_temperature)
        for rows in work.chunks:
            log_p_CV = work.scaled(rows).sub_(lse_T[rows, None])
            factor_C = -grad_T[rows, None]
            if grad_entropy_T is None:
                grad_CV = log_p_CV.exp_().mul_(factor_C)
            else:  # d/dz = p * (-g - g_entropy * (log p + entropy)) + g * onehot
                weight_CV = (log_p_CV + entropy_T[rows, None]).mul_(-grad_entropy_T[rows, None]).add_(factor_C)
                grad_CV = log_p_CV.exp_().mul_(weight_CV)
            grad_CV.scatter_add_(1, columns_T[rows, None], (grad_T * owned_T)[rows, None])
            grad_TV[rows, :valid] = grad_CV.mul_(inverse_temperature)
        return grad_TV, None, None, None, None, None, None


class _Workspace:
    """One float32 buffer for all chunks of a pass: fresh pages for each would cost more than the arithmetic."""

    def __init__(self, logits_TV: Tensor, valid: int, chunk: int, inverse_temperature: float):
        self._logits_TV = logits_TV[:, :valid]
        self._inverse_temperature = inverse_temperature
        self._buffer_CV = torch.empty(chunk, valid, dtype=torch.float32, device=logits_TV.device)
        rows = logits_TV.shape[0] if valid else 0
        self.chunks = [slice(start, min(start + chunk, rows)) for start in range(0, rows, chunk or 1)]

    def scaled(self, rows: slice) -> Tensor:
        """logits / temperature of these rows, valid until the next call."""
        z_CV = self._buffer_CV[: rows.stop - rows.start]
        return z_CV.copy_(self._logits_TV[rows]).mul_(self._inverse_temperature)


def _local_sums(
    logits_TV: Tensor,
    columns_T: Tensor,
    inverse_temperature: float,
    valid: int,
    entropy: bool,
    chunk: int,
) -> tuple[Tensor, Tensor]:
    """Over this rank's columns: max_T of z, and [3, T] of sum e^(z - max), sum e^(z - max) (z - max), and
    z - max at the given column (meaningless on ranks that do not own the target)."""
    rows = logits_TV.shape[0]
    # The smallest float, not -inf, for a rank of padding only: differences with it must not become NaN.
    max_T = torch.full((rows,), torch.finfo(torch.float32).min, device=logits_TV.device)
    sums_3T = torch.zeros(3, rows, device=logits_TV.device)
    work = _Workspace(logits_TV, valid, chunk, inverse_temperature)
    for part in work.chunks:
        z_CV = work.scaled(part)
        max_T[part] = z_CV.amax(1)
        z_CV.sub_(max_T[part, None])
        sums_3T[2, part] = z_CV.gather(1, columns_T[part, None]).squeeze(1)
        if entropy:
            e_CV = z_CV.exp()
            sums_3T[0, part] = e_CV.sum(1)
            sums_3T[1, part] = e_CV.mul_(z_CV).sum(1)
        else:
            sums_3T[0, part] = z_CV.exp_().sum(1)
    return max_T, sums_3T


def _reduce(local_max_T: Tensor, sums_3T: Tensor, owned_T: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """Bring every rank's sums to the common maximum, then add them over the ranks."""
    max_T = local_max_T.clone()
    dist.all_reduce(max_T, op=dist.ReduceOp.MAX, group=group)
    shift_T = local_max_T - max_T
    scale_T = shift_T.exp()
    sum_T, weighted_T, target_T = sums_3T
    moved_3T = torch.stack(
        [sum_T * scale_T, (weighted_T + sum_T * shift_T) * scale_T, torch.where(owned_T, target_T + shift_T, 0.0)]
    )
    dist.all_reduce(moved_3T, group=group)
    return max_T, moved_3T
