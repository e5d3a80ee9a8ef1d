"""Draw next tokens: temperature, repetition penalty, top-k, top-p, and one uniform number per token.

Shape legend: R rows, V vocabulary, K kept candidates.

A token is drawn by inverting the cumulative distribution at a uniform number. The numbers of a sample come
from its own counter-based generator (Philox, doi 10.1145/2063384.2063405), keyed by seed, prompt uid and
sample index: what else is in the batch changes nothing but float noise in the logits.
"""

from __future__ import annotations

import hashlib

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from engines.base import SamplingParams

# The cumulative sum is taken over sums of blocks, then inside one block: V additions become V/128 + 128.
_BLOCK = 128
# Logits handled at once on CPU (float32: 3 MiB), so that the passes over them stay in cache: twice as fast.
_CHUNK = 3 * 2**18
# With top-p alone, this many candidates nearly always hold enough mass; otherwise everything is sorted.
_TOP_P_CANDIDATES = 1024


def random_stream(seed: int, uid: str, index: int) -> np.random.Generator:
    """The uniform numbers of one sample: its t-th draw decides its t-th token."""
    digest = hashlib.blake2b(f"{seed}/{index}/{uid}".encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))


def check_sampling(sampling: SamplingParams) -> None:
    """ValueError naming every parameter outside its range."""
    allowed = {
        "n": (sampling.n >= 1, ">= 1"),
        "temperature": (sampling.temperature >= 0, ">= 0 (0 is greedy)"),
        "top_p": (0 < sampling.top_p <= 1, "in (0, 1]"),
        "top_k": (sampling.top_k == -1 or sampling.top_k >= 1, "-1 (off) or >= 1"),
        "max_new_tokens": (sampling.max_new_tokens >= 1, ">= 1"),
        "repetition_penalty": (sampling.repetition_penalty > 0, "> 0"),
    }
    for name, (ok, expected) in allowed.items():
        if not ok:
            raise ValueError(f"got {name}={vars(sampling)[name]}; expected {expected}; change rollout.{name}")


def sample(
    logits_RV: Tensor, uniforms_R: Tensor, sampling: SamplingParams, seen_RV: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(tokens [R] int64, log-probs [R] float32) of the next token of every row.

    uniforms_R  [R] float64 in [0, 1); not read when greedy
    seen_RV     [R, V] bool, tokens of prompt and response so far; needed with a repetition penalty only

    Log-probs are those of softmax(logits / temperature), temperature 1 when greedy, over the whole
    vocabulary: before penalty, top-k and top-p, so a training engine computes the same number.
    """
    rows, vocab = logits_RV.shape
    size = max(1, _CHUNK // vocab) if logits_RV.device.type == "cpu" else rows
    cuts = (logits_RV.split(size), uniforms_R.split(size), [None] * rows if seen_RV is None else seen_RV.split(size))
    parts = [_sample(*part, sampling) for part in zip(*cuts, strict=False)]
    return torch.cat([tokens for tokens, _ in parts]), torch.cat([log_probs for _, log_probs in parts])


def _sample(
    logits_RV: Tensor, uniforms_R: Tensor, seen_RV: Tensor | None, sampling: SamplingParams
) -> tuple[Tensor, Tensor]:
    scaled_RV = logits_RV.float() / (sampling.temperature or 1.0)
    max_R1 = scaled_RV.amax(-1, keepdim=True)
    weights_RV = (scaled_RV - max_R1).exp_()
    penalised = sampling.repetition_penalty != 1.0
    choice_RV = _penalise(scaled_RV, seen_RV, sampling.repetition_penalty) if penalised else scaled_RV
    if sampling.temperature == 0:
        tokens_R = choice_RV.argmax(-1)
    elif sampling.top_k > 0 or sampling.top_p < 1:
        kept_RK, ids_RK = _truncate(choice_RV, sampling.top_k, sampling.top_p)
        tokens_R = ids_RK.gather(-1, invert_cdf(kept_RK, uniforms_R).unsqueeze(-1)).squeeze(-1)
    else:
        tokens_R = invert_cdf(choice_RV.softmax(-1) if penalised else weights_RV, uniforms_R)
    chosen_R = (scaled_RV.gather(-1, tokens_R.unsqueeze(-1)) - max_R1).squeeze(-1)
    return tokens_R, chosen_R - weights_RV.sum(-1).log()


def invert_cdf(weights_RV: Tensor, uniforms_R: Tensor) -> Tensor:
    """[R] the first index whose cumulative weight exceeds `uniform * total`; weights need not sum to 1.

    An index of weight 0 is never returned.
    """
    blocks_RNK = pad(weights_RV, (0, -weights_RV.shape[-1] % _BLOCK)).unflatten(-1, (-1, _BLOCK))
    rows_R = torch.arange(weights_RV.shape[0], device=weights_RV.device)
    ends_RN = blocks_RNK.sum(-1).double().cumsum(-1)
    target_R = uniforms_R * ends_RN[:, -1]
    block_R = (ends_RN <= target_R.unsqueeze(-1)).sum(-1)
    start_R = torch.where(block_R > 0, ends_RN[rows_R, block_R - 1], 0.0)
    inner_RK = blocks_RNK[rows_R, block_R].double().cumsum(-1)
    # The block's float32 sum may exceed its float64 one: stay inside the block.
    rest_R = torch.minimum(target_R - start_R, inner_RK[:, -1] * (1 - 1e-12))
    return block_R * _BLOCK + (inner_RK <= rest_R.unsqueeze(-1)).sum(-1)


def _penalise(scaled_RV: Tensor, seen_RV: Tensor, penalty: float) -> Tensor:
    """Seen tokens: positive logits are divided by the penalty, negative ones multiplied (arXiv 1909.05858)."""
    changed_RV = torch.where(scaled_RV > 0, scaled_RV / penalty, scaled_RV * penalty)
    return torch.where(seen_RV, changed_RV, scaled_RV)


def _truncate(choice_RV: Tensor, top_k: int, top_p: float) -> tuple[Tensor, Tensor]:
    """(weights [R, K], token ids [R, K]), most likely first; weights outside top-k, then top-p, are 0.

    top-p keeps the smallest set whose mass reaches top_p of what top-k left (arXiv 1904.09751).
    """
    vocab = choice_RV.shape[-1]
    count = min(top_k if top_k > 0 else _TOP_P_CANDIDATES, vocab)
    while True:
        values_RK, ids_RK = choice_RV.topk(count)
        weights_RK = (values_RK - values_RK[:, :1]).exp()
        ends_RK = weights_RK.double().cumsum(-1)
        if top_k > 0 or count == vocab:
            mass_R = top_p * ends_RK[:, -1]
            break
        mass_R = top_p * (choice_RV - values_RK[:, :1]).exp().sum(-1, dtype=torch.float64)
        if bool((ends_RK[:, -1] >= mass_R).all()):
            break
        count = min(8 * count, vocab)
    before_RK = ends_RK - weights_RK
    return weights_RK.masked_fill_((before_RK >= mass_R.unsqueeze(-1)) & (before_RK > 0), 0.0), ids_RK
