"""Soft punishment of answers that come close to the length limit (DAPO, arXiv 2503.14476, section 3.4)."""

from __future__ import annotations

from trainer.reward.spec import OverlongSpec


def check_overlong(spec: OverlongSpec | None) -> None:
    """ValueError when the switched-on buffer does not fit into the response."""
    if spec is None or not spec.enable:
        return
    if spec.max_resp_len is None:
        raise ValueError(
            "got overlong_buffer_cfg.enable=true without max_resp_len; expected the response limit in tokens; "
            "set reward.reward_kwargs.max_resp_len or switch the buffer off"
        )
    if not 0 < spec.len <= spec.max_resp_len:
        raise ValueError(
            f"got overlong_buffer_cfg.len={spec.len}; expected 1..{spec.max_resp_len} (max_resp_len); "
            "set reward.reward_kwargs.overlong_buffer_cfg.len"
        )


def overlong_penalty(spec: OverlongSpec | None, response_length: int) -> float:
    """min(0, -(n - (M - len)) / len * factor), in score units; 0 when switched off."""
    if spec is None or not spec.enable:
        return 0.0
    excess = response_length - (spec.max_resp_len - spec.len)
    return min(0.0, -excess / spec.len * spec.penalty_factor)
