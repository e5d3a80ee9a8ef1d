"""Zero mean, unit variance over the tokens that learn: statistics of the whole batch, before any split.

Shape legend: T packed tokens, B samples.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

WHITEN_EPS = 1e-8  # added to a variance before its square root


def whiten(values_T: Tensor, mask_T: Tensor) -> Tensor:
    """(x - mean) / sqrt(var + 1e-8) with ddof 1 over the masked entries; 0 elsewhere.

    Fewer than two entries stay as they are; equal entries become exactly 0.
    """
    valid = values_T[mask_T]
    if valid.numel() >= 2:
        if valid.max() == valid.min():
            return torch.zeros_like(values_T)
        values_T = (values_T - valid.mean()) / torch.sqrt(valid.var() + WHITEN_EPS)
    return torch.where(mask_T, values_T, 0.0)


def whiten_by_domain(values_T: Tensor, mask_T: Tensor, lengths: Sequence[int], domains: Sequence[str]) -> Tensor:
    """`whiten` for the samples of each domain alone; `lengths` and `domains` speak about the B samples."""
    result_T = torch.zeros_like(values_T)
    lengths_B = torch.tensor(list(lengths))
    for domain in sorted(set(domains)):
        member_T = torch.repeat_interleave(torch.tensor([each == domain for each in domains]), lengths_B)
        result_T += whiten(values_T, mask_T & member_T)
    return result_T
