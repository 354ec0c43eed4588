"""The tape that stands in for CUDA graphs sees tensors wherever an operator has them, also in lists."""

from __future__ import annotations

import pytest
import torch

from tests.support.tape import Tape


def test_operands_in_a_list_are_read_again_and_may_not_move() -> None:
    left, right, out = torch.ones(2), torch.full((2,), 2.0), torch.zeros(4)
    with Tape() as tape:
        out.copy_(torch.cat([left, right]))
    right.fill_(5.0)
    tape.replay()
    assert out.tolist() == [1.0, 1.0, 5.0, 5.0]
    right.data = torch.full((2,), 7.0)
    with pytest.raises(AssertionError, match="has moved"):
        tape.replay()


def test_results_in_a_list_are_written_again() -> None:
    given, out = [torch.ones(2), torch.ones(3)], torch.zeros(5)
    with Tape() as tape:
        out.copy_(torch.cat(torch._foreach_mul(given, 2.0)))
    assert not out.any(), "what was recorded has not run"
    given[1].fill_(4.0)
    tape.replay()
    assert out.tolist() == [2.0, 2.0, 8.0, 8.0, 8.0]


def test_what_is_written_in_a_list_is_undone_after_the_recording() -> None:
    held = [torch.ones(2), torch.ones(3)]
    with Tape() as tape:
        torch._foreach_add_(held, 1.0)
    assert [tensor.tolist() for tensor in held] == [[1.0] * 2, [1.0] * 3]
    tape.replay()
    assert [tensor.tolist() for tensor in held] == [[2.0] * 2, [2.0] * 3]
