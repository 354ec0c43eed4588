"""Steps of conversations: over REST, in worker processes, and what a step may not answer."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from megatron_rl.environments.base import ConversationEnvironment
from megatron_rl.environments.client import EnvironmentClient
from megatron_rl.environments.loader import find_environment
from megatron_rl.environments.process import EnvironmentServerProcess
from megatron_rl.environments.results import checked_grade, judge, result_from_json, result_to_json
from megatron_rl.environments.selftest import run_checks
from megatron_rl.json_text import dumps, loads
from megatron_rl.types import Continuation, Grade, Step, Task, Transcript, Turn

TASK = Task("37*46", "37*46=", {"expression": "37*46", "answer": "1702"})
CALL = Turn("<37*46>", "stop", 8, 0, False)
REPLY = Continuation(({"role": "user", "content": "=1702,"},), {"calls": 1})
HELLO = ({"role": "user", "content": "hello"},)
CALLED = {"id": "call_0", "type": "function", "function": {"name": "add", "arguments": "{}"}}
CALLING = {"role": "assistant", "content": None, "tool_calls": [CALLED]}
NO_ARGUMENTS = {"function": {"name": "add"}}
RESULT = {"role": "tool", "tool_call_id": "call_0", "content": "3"}


class Says(ConversationEnvironment):
    """Answers every turn with the step it was made with."""

    name = "says"
    reward_range = (-1.0, 1.0)

    def __init__(self, step: Any) -> None:
        self._step = step

    def tasks(self, split):
        yield Task("0", "?")

    def step(self, task, state, turn):
        if isinstance(self._step, Exception):
            raise self._step
        return self._step


def answer(step: Any) -> Grade:
    return judge(Says(step), (TASK, None, CALL))


def test_an_unfinished_step_is_worth_the_minimum_unless_it_says_otherwise() -> None:
    assert answer(Step(HELLO)) == Grade(-1.0, correct=False, continuation=Continuation(HELLO, None))
    going_on = Continuation(HELLO, [1])
    assert answer(Step(HELLO, [1], reward=0.5)) == Grade(0.5, correct=False, continuation=going_on)
    assert answer(Step(done=True, reward=1)) == Grade(1.0, correct=True)


def test_messages_may_be_calls_and_results_of_tools() -> None:
    assert answer(Step((CALLING, RESULT))).continuation == Continuation((CALLING, RESULT))
    silent = {"role": "assistant", "content": "a", "tool_calls": None}  # as OpenAI's client writes it
    assert answer(Step((silent,))).continuation == Continuation((silent,))
    assert Says(Step()).tools == ()


@pytest.mark.parametrize(
    ("step", "code", "complaint"),
    [
        (Step(done=True), "invalid_reward", "None"),
        (Step(done=True, reward=float("nan")), "invalid_reward", "nan"),
        (Step(HELLO, reward="1"), "invalid_reward", "'1'"),
        (Step(), "environment_exception", "needs a tuple of messages"),
        (Step("hello"), "environment_exception", "needs a tuple of messages"),
        (Step(({"role": "user"},)), "environment_exception", "content is missing"),
        (Step(({"role": "assistant", "content": None},)), "environment_exception", "content has the wrong type"),
        (Step(({**CALLING, "tool_calls": [NO_ARGUMENTS]},)), "environment_exception", "arguments is missing"),
        (Step(({**CALLING, "tool_calls": 3},)), "environment_exception", "tool_calls has the wrong type"),
        (Step(HELLO, (1, 2)), "environment_exception", "JSON does not return unchanged"),
        (Step(HELLO, {1: 2}), "environment_exception", "JSON does not return unchanged"),
        (Step(HELLO, float("nan")), "environment_exception", "not JSON compliant"),
        (Step(HELLO, "x" * 2**21), "environment_exception", "characters; at most"),
        (1.0, "environment_exception", "not a Step"),
        (None, "environment_exception", "not a Step"),
        (KeyError("gone"), "environment_exception", "KeyError: 'gone'"),
    ],
)
def test_what_is_no_step_is_a_failure_that_says_why(step: Any, code: str, complaint: str) -> None:
    result = answer(step)
    assert (result.failed, result.reward, result.code) == (True, None, code)
    assert complaint in result.message


def test_a_single_answer_is_a_conversation_of_one_turn() -> None:
    """``grade`` of a conversation environment, and ``step`` of one that only grades."""
    assert Says(Step(HELLO)).grade(TASK, Transcript("a", "stop", 1)) == -1.0
    arithmetic = find_environment("arithmetic")()
    task = Task("1+1=", "1+1=", {"answer": 2})
    right = arithmetic.step(task, None, Turn("1+1=2#2", "stop", 7, 0, True))
    assert right.done
    assert right.reward.reward == 1.0


@pytest.fixture(scope="module", params=["in_process", "in workers"])
def client(request, tmp_path_factory):
    """A client of a real server, which steps itself or in its pool."""
    folder = tmp_path_factory.mktemp("server")
    where = str(request.param == "in_process").lower()
    (folder / "list.yaml").write_text(f"- environment: calculator\n  in_process: {where}\n")
    with EnvironmentServerProcess(folder / "list.yaml", folder) as server:
        yield EnvironmentClient(server.address_file)


def test_a_conversation_over_rest(client: EnvironmentClient) -> None:
    async def talk() -> list[Grade]:
        (first,) = await client.grade("calculator", [(TASK, None, CALL)])
        right = Turn("#1702", "stop", 6, 1, False)
        wrong = Turn("#1701", "stop", 6, 1, False)
        state = first.continuation.state
        return [first, *await client.grade("calculator", [(TASK, state, right), (TASK, state, wrong)])]

    first, right, wrong = asyncio.run(talk())
    assert (first.reward, first.status, first.continuation) == (0.0, "no_answer", REPLY)
    assert (right.reward, right.status, right.extracted, right.continuation) == (1.0, "correct", "1702", None)
    assert (wrong.reward, wrong.status, wrong.metrics) == (0.0, "wrong", {"calls": 1.0})
    [served] = client.environments()
    assert (served.name, served.weight, served.evaluation_only, served.max_turns) == ("calculator", 1.0, False, 3)


class TestCalculator:
    """The example environment."""

    environment = find_environment("calculator")()

    def say(self, text: str, state: Any = None, reason: str = "stop") -> Step:
        return self.environment.step(TASK, state, Turn(text, reason, len(text), 0, False))

    def test_its_own_checks_pass(self) -> None:
        assert [check for check in run_checks(self.environment) if not check.passed] == []

    @pytest.mark.parametrize(
        ("call", "value"),
        [
            ("<37*46>", "=1702,"),
            ("so <(1+2)*3>", "=9,"),
            ("<7/2>", "=7/2,"),
            ("<1/0>", "=?,"),
            ("<>", "=?,"),
            ("<__import__('os')>", "=?,"),
            ("<9**9**9>", "=?,"),
            ("<" + "(" * 400 + ">", "=?,"),
        ],
    )
    def test_calls(self, call: str, value: str) -> None:
        step = self.say(call, {"calls": 2})
        assert step.messages == ({"role": "user", "content": value},)
        assert (step.done, step.state, step.reward.reward) == (False, {"calls": 3}, 0.0)

    @pytest.mark.parametrize("text", ["", "1702", "<37*46> = 1702", "37*46>", "<<"])
    def test_neither_call_nor_answer_ends_it_with_nothing(self, text: str) -> None:
        step = self.say(text)
        assert (step.done, step.reward.reward, step.reward.status) == (True, 0.0, "no_answer")

    def test_a_cut_turn_neither_calls_nor_answers_right(self) -> None:
        assert self.say("<37*46>", reason="length").done
        assert self.say("#1702", reason="length").reward.reward == 0.0
        assert self.say("#1702").reward.reward == 1.0

    def test_splits_share_nothing(self) -> None:
        train, test = ({task.id for task in self.environment.tasks(split)} for split in ("train", "test"))
        assert (len(train), len(test)) == (4096, 256)
        assert not train & test
        shown = {demonstration.task.id for demonstration in self.environment.demonstrations("train")}
        assert not shown & test

    @pytest.mark.parametrize(
        ("options", "complaint"),
        [({"operators": "+/"}, "operators"), ({"max_turns": 1}, "max_turns"), ({"min_terms": 5}, "min_terms")],
    )
    def test_bad_options(self, options: dict[str, Any], complaint: str) -> None:
        with pytest.raises(ValueError, match=complaint):
            find_environment("calculator")(**options)


@pytest.mark.parametrize("done", [True, False])
def test_a_turn_has_a_reward_of_its_own(done: bool) -> None:
    """Beside the conversation's, also as JSON; `correct` is by the conversation's."""
    messages = () if done else HELLO
    result = answer(Step(messages, done=done, reward=1.0, turn_reward=0.25))
    assert (result.reward, result.turn_reward, result.correct) == (1.0, 0.25, True)
    assert result_from_json(loads(dumps(result_to_json(result)))) == result


@pytest.mark.parametrize("wrong", [float("nan"), True, "much", None])
def test_a_turn_reward_is_a_finite_number(wrong: Any) -> None:
    result = answer(Step(done=True, reward=1.0, turn_reward=wrong))
    assert result.code == "invalid_reward"
    assert "turn_reward" in result.message


def test_rewards_by_completion_are_of_harnesses() -> None:
    assert answer(Step(done=True, reward=Grade(1.0, completion_rewards={"a": 1.0}))).code == "invalid_reward"
    given = Grade(1.0, completion_rewards={"a": 1})
    assert result_from_json(result_to_json(checked_grade(given))) == given
    for wrong in ({"a": float("inf")}, {1: 1.0}, [1.0]):
        assert checked_grade(Grade(1.0, completion_rewards=wrong)).code == "invalid_reward"
