"""What k steps drew, booked at once, against the same steps booked one by one."""

from __future__ import annotations

import torch

from megatron_rl.inference.batch_state import BatchState
from megatron_rl.inference.sequence import SequenceGroup
from tests.support.generation import request

ROWS, STEPS, STOP = 6, 5, 3


def begun(limits: list[int]) -> BatchState:
    """Rows 0.. with prompts of four tokens and so many to draw."""
    is_stop = torch.zeros(10, dtype=torch.bool)
    is_stop[STOP] = True
    state = BatchState(ROWS + 1, 8, is_stop)
    sequences = [SequenceGroup(0, request((1, 2, 4, 5), max_new_tokens=n), [n]).sequences[0] for n in limits]
    state.begin(sequences, torch.arange(len(limits)))
    return state


def test_a_burst_is_booked_like_its_steps() -> None:
    limits = [8, 8, 3, 8, 5, 1]
    tokens = torch.tensor([
        [1, 3, 5, 5, 5, 5],
        [2, 1, 5, 5, 5, 5],
        [3, 3, 5, 5, 5, 5],
        [4, 1, 3, 5, 5, 5],
        [5, 3, 5, 3, 5, 5],
    ])  # fmt: skip
    logprobs = torch.rand(STEPS, ROWS)

    at_once, one_by_one = begun(limits), begun(limits)
    at_once.record(slice(0, ROWS), tokens, logprobs)
    for step in range(STEPS):
        one_by_one.record(slice(0, ROWS), tokens[step : step + 1], logprobs[step : step + 1])

    assert at_once.count.tolist() == [3, 1, 3, 5, 5, 1, 0]
    assert at_once.alive.tolist() == [False] * 7
    assert at_once.tokens[0, :3].tolist() == [1, 2, 3]
    assert at_once.tokens[2, :3].tolist() == [5, 5, 5]  # the stop token comes after its limit
    for name in ("count", "alive", "position", "limit"):
        assert torch.equal(getattr(at_once, name), getattr(one_by_one, name)), name
    assert torch.equal(at_once.tokens[:, :-1], one_by_one.tokens[:, :-1])
    assert torch.equal(at_once.logprobs[:, :-1], one_by_one.logprobs[:, :-1])


def test_rows_by_index_and_by_slice_are_booked_alike() -> None:
    tokens, logprobs = torch.tensor([[1, 2], [4, 5]]), torch.rand(2, 2)
    by_slice, by_index = begun([4, 2]), begun([4, 2])
    by_slice.record(slice(0, 2), tokens, logprobs)
    by_index.record(torch.tensor([0, 1]), tokens, logprobs)
    assert by_slice.alive.tolist()[:2] == [True, False]
    for name in ("count", "alive", "position", "tokens", "logprobs", "token"):
        assert torch.equal(getattr(by_slice, name), getattr(by_index, name)), name
