"""When a full tensor is a view of gathered memory, and when it is not."""

from __future__ import annotations

import torch

from bridge.export import joined


def test_adjacent_pieces_are_joined_without_a_copy():
    memory = torch.arange(24.0).view(6, 4)
    whole = joined([memory[:2], memory[2:3], memory[3:5]], (5, 4))
    assert torch.equal(whole, memory[:5]) and whole.data_ptr() == memory.data_ptr()
    vector = torch.arange(6.0)
    assert joined([vector[2:4], vector[4:]], (4,)).tolist() == [2, 3, 4, 5]


def test_pieces_in_another_order_with_gaps_or_cut_in_columns_are_not():
    memory = torch.arange(24.0).view(6, 4)
    assert joined([memory[2:4], memory[:2]], (4, 4)) is None
    assert joined([memory[:2], memory[3:5]], (4, 4)) is None
    assert joined([memory[:, :2], memory[:, 2:]], (6, 4)) is None
    assert joined([memory[:2], memory.clone()[2:4]], (4, 4)) is None
