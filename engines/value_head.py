"""The head of a value model (critic), and what its first values are.

A critic usually starts from the checkpoint of a language model, which has no such head. It is then drawn from the
seed alone, so it is the same in every engine, on every rank and in every layout.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor, nn
from torch.nn import functional

from bridge import Readable
from bridge.models.value import SCORE, SCORE_BIAS

log = logging.getLogger(__name__)

# The width transformers draws every linear layer with: first values are small beside rewards of order 1.
INIT_STD = 0.02


class ValueHead(nn.Linear):
    """[..., hidden] -> [..., 1] in float32 whatever the model's dtype: bfloat16 has three digits, and a regression
    target needs more."""

    def __init__(self, hidden_size: int, device: torch.device | str | None, dtype: torch.dtype) -> None:
        super().__init__(hidden_size, 1, device=device, dtype=dtype)

    def forward(self, hidden: Tensor) -> Tensor:
        # The bias apart: together they give a view, which FSDP's hooks on a module's output do not like.
        return functional.linear(hidden.float(), self.weight.float()) + self.bias.float()


class ValueSource:
    """A checkpoint as a value model reads it: a head it lacks is there, drawn from `seed` (normal, standard deviation
    INIT_STD, bias 0; a file with a weight but no bias has bias 0). `tell`: say so in the log."""

    def __init__(self, checkpoint: Readable, hidden_size: int, seed: int, tell: bool) -> None:
        self._checkpoint = checkpoint
        self.directory = checkpoint.directory
        given = set(checkpoint.names())
        drawn = torch.randn(1, hidden_size, generator=torch.Generator().manual_seed(seed)) * INIT_STD
        self._first = {
            name: value for name, value in ((SCORE, drawn), (SCORE_BIAS, torch.zeros(1))) if name not in given
        }
        if tell and SCORE in self._first:
            log.info("%s has no value head: it starts random (std %g, seed %d)", self.directory, INIT_STD, seed)

    @property
    def bytes_read(self) -> int:
        return self._checkpoint.bytes_read

    def names(self) -> list[str]:
        return [*self._checkpoint.names(), *self._first]

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._first[name].shape) if name in self._first else self._checkpoint.shape(name)

    def dtype(self, name: str) -> torch.dtype:
        return self._first[name].dtype if name in self._first else self._checkpoint.dtype(name)

    def place(self, name: str) -> tuple[str, int]:
        """Where it lies on disk; what is drawn lies before everything."""
        return ("", 0) if name in self._first else self._checkpoint.place(name)

    def read(self, name: str, slices: tuple[slice, ...] | None = None) -> Tensor:
        if name in self._first:
            return self._first[name][slices or ()]
        return self._checkpoint.read(name, slices)
