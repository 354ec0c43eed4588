"""Verdicts become results; JSON forms survive the round trip."""

from __future__ import annotations

import json
from fractions import Fraction

import numpy
import pytest

from megatron_rl.environments import results, wire
from megatron_rl.environments.base import Environment
from megatron_rl.environments.results import judge
from megatron_rl.json_text import dumps
from megatron_rl.types import Demonstration, Grade, LaterTurn, Task, Transcript, Turn

TASK = Task("1", "2+2=", {"answer": 4})


class Returns(Environment):
    """Returns what it was made with."""

    name = "returns"

    def __init__(self, verdict: object = 0.0) -> None:
        self.verdict = verdict

    def tasks(self, split):
        return (TASK,)

    def grade(self, task, transcript):
        return self.verdict


def grade(verdict: object) -> Grade:
    return judge(Returns(verdict), (TASK, Transcript("4", "stop", 1)))


@pytest.mark.parametrize("verdict", [1, 1.0, numpy.float32(1), numpy.int64(1), Fraction(1), Grade(1)])
def test_finite_numbers_are_rewards(verdict):
    result = grade(verdict)
    assert result == Grade(1.0, {}, correct=True)
    assert type(result.reward) is float


@pytest.mark.parametrize(
    "verdict",
    [
        True,
        numpy.True_,
        float("nan"),
        -float("inf"),
        "1",
        None,
        1j,
        [1],
        10**400,
        Grade(True),
        Grade(1.0, {"m": float("nan")}),
        Grade(1.0, {1: 1.0}),
        Grade(1.0, [1.0]),
        Grade(1.0, correct="yes"),
    ],
)
def test_everything_else_is_not(verdict):
    result = grade(verdict)
    assert (result.failed, result.code, result.reward) == (True, "invalid_reward", None)


def test_metrics_may_be_truth_values():
    assert grade(Grade(0.5, {"right": True, "n": 3})).metrics == {"right": 1.0, "n": 3.0}


def test_long_error_texts_are_cut():
    assert len(results.result_to_json(results.failed("timeout", "x" * 10**6))["message"]) == results.MAX_MESSAGE


@pytest.mark.parametrize("prompt", ["2+2=", ({"role": "user", "content": "2+2?"},)])
def test_round_trips(prompt):
    task = Task("1", prompt, {"answer": [1, {"x": None}]})
    demonstration = Demonstration(task, "4", (LaterTurn(({"role": "user", "content": "no"},), "5"),))
    transcript = Transcript("\u00e9\ud800", "length", 2)

    def through(value):
        return json.loads(dumps(value))

    assert wire.task_from_json(through(vars(task))) == task
    assert wire.demonstration_from_json(through(wire.demonstration_to_json(demonstration))) == demonstration
    turn = Turn("a", "stop", 1, number=2, last=True)
    for item in ((task, transcript), (task, {"asked": [1]}, turn)):
        assert wire.item_from_json(through(wire.item_to_json(item))) == item
    for result in (Grade(0.5, {"m": 1.0}), Grade(None, code="timeout", message="late")):
        assert results.result_from_json(through(results.result_to_json(result))) == result
