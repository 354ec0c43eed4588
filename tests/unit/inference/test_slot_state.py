"""What k steps drew, booked at once, against the same steps booked one by one."""

from __future__ import annotations

import torch

from megatron_rl.inference.slot_state import SlotState
from megatron_rl.types import SamplingParams

ROWS, STEPS, STOP = 6, 5, 3


def seated(limits: list[int]) -> SlotState:
    state = SlotState(slots=ROWS + 1, max_new_tokens=8, vocab_size=10, device=torch.device("cpu"))
    slots = torch.arange(len(limits))
    params = [SamplingParams(max_new_tokens=limit) for limit in limits]
    state.seat(slots, slots + 4, slots, params)
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
    is_stop = torch.zeros(10, dtype=torch.bool)
    is_stop[STOP] = True

    at_once, one_by_one = seated(limits), seated(limits)
    at_once.record(slice(0, ROWS), tokens, logprobs, is_stop)
    for step in range(STEPS):
        one_by_one.record(slice(0, ROWS), tokens[step : step + 1], logprobs[step : step + 1], is_stop)

    assert at_once.count.tolist() == [3, 1, 3, 5, 5, 1, 0]
    assert at_once.alive.tolist() == [False] * 7
    assert at_once.tokens[0, :3].tolist() == [1, 2, 3]
    assert at_once.tokens[2, :3].tolist() == [5, 5, 5]  # the stop token comes after its limit
    for name in ("count", "alive", "position", "limit"):
        assert torch.equal(getattr(at_once, name), getattr(one_by_one, name)), name
    assert torch.equal(at_once.tokens[:, :-1], one_by_one.tokens[:, :-1])
    assert torch.equal(at_once.logprobs[:, :-1], one_by_one.logprobs[:, :-1])


def test_rows_by_index_and_by_slice_are_booked_alike() -> None:
    is_stop = torch.zeros(10, dtype=torch.bool)
    tokens, logprobs = torch.tensor([[1, 2], [4, 5]]), torch.rand(2, 2)
    by_slice, by_index = seated([4, 2]), seated([4, 2])
    by_slice.record(slice(0, 2), tokens, logprobs, is_stop)
    by_index.record(torch.tensor([0, 1]), tokens, logprobs, is_stop)
    assert by_slice.alive.tolist()[:2] == [True, False]
    for name in ("count", "alive", "position", "tokens", "logprobs", "token"):
        assert torch.equal(getattr(by_slice, name), getattr(by_index, name)), name
