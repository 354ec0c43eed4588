"""States that register themselves."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from megatron_rl.checkpoint.state import RandomState, StateRegistry
from megatron_rl.errors import CheckpointError


class Counter:
    """Something with a state: a number, and this rank's tensor."""

    def __init__(self, count: int = 0) -> None:
        self.count, self.tensor = count, torch.full((2,), float(count))

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "tensor": self.tensor}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.count, self.tensor = int(state["count"]), state["tensor"]


@pytest.fixture(autouse=True)
def log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    monkeypatch.setattr(logging.getLogger("megatron_rl"), "propagate", True)
    caplog.set_level(logging.INFO, "megatron_rl")
    return caplog


def test_what_was_collected_is_taken_up_at_registration(log) -> None:
    first = StateRegistry()
    first.register("counter", Counter(3))
    second = StateRegistry(first.collect())
    counter = second.register("counter", Counter())
    second.tell_unclaimed()
    assert counter.count == 3
    assert counter.tensor.tolist() == [3.0, 3.0]
    assert log.messages == []


def test_a_name_that_was_not_saved_is_told_unless_it_may_be_absent(log) -> None:
    states = StateRegistry({})
    states.register("optional", Counter(), optional=True)
    assert log.messages == []
    assert states.register("counter", Counter(2)).count == 2
    assert log.messages == ["the checkpoint has no state of 'counter': it is reset"]
    log.clear()
    StateRegistry(None).register("counter", Counter())
    assert log.messages == [], "nothing is missing where a run begins"


def test_a_name_that_nobody_takes_is_told_and_stays(log) -> None:
    """A run that goes on without evaluations for a while: their state is not lost."""
    states = StateRegistry({"held_out": {"mean": 5.0}})
    states.tell_unclaimed()
    assert log.messages == ["this run has no use for the checkpoint's state of 'held_out', which is kept"]
    assert states.collect() == {"held_out": {"mean": 5.0}}


def test_one_that_must_not_resume_is_saved_all_the_same() -> None:
    states = StateRegistry({"counter": {"count": 3}})
    counter = states.register("counter", Counter(1), resume=False)
    assert counter.count == 1
    assert states.collect()["counter"]["count"] == 1


@pytest.mark.parametrize("state", [{}, {"count": "many", "tensor": None}, {"count": 3}])
def test_a_damaged_state_is_named(state: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="state of 'counter' is damaged"):
        StateRegistry({"counter": state}).register("counter", Counter())


def test_a_name_has_one_owner() -> None:
    states = StateRegistry()
    states.register("counter", Counter())
    with pytest.raises(ValueError, match="two owners of the state 'counter'"):
        states.register("counter", Counter())


def test_a_rank_that_is_new_to_the_run_keeps_its_generators(log) -> None:
    before = torch.get_rng_state()
    StateRegistry({"random": {}}).register("random", RandomState())
    assert torch.equal(before, torch.get_rng_state())
    assert log.messages == ["this rank is new to the run: its generators start from the seed"]
