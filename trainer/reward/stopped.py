"""The one exception of scoring that asks for an orderly end of the run."""

from __future__ import annotations


class ScoringStopped(RuntimeError):
    """Answers can no longer be scored: save a checkpoint of the last complete step and end with status 3."""
