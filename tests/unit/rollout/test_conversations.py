"""Conversations with an engine and an environment that say what the test tells them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_rl.platform.groups import ParallelGroups
from megatron_rl.rollout.conversations import ConversationSettings
from megatron_rl.rollout.journal import RolloutJournal, StepJournal
from megatron_rl.rollout.rollouter import Rollouter, RolloutResult
from megatron_rl.signals import StopRequest
from megatron_rl.types import (
    Completion,
    Continuation,
    Grade,
    Request,
    SamplingParams,
    SourcedTask,
    Task,
    Turn,
)
from tests.support.engines import QueuedEngine
from tests.support.toy import letters_tokenizer, toy_tokenizer

A, B, C, X, Y = 1, 2, 3, 24, 25
END = 0
PROMPT = (A, B)
LONGEST = 20

Said = dict[tuple[int, int], Sequence[int]]
"""(sample, turn) -> what the model says."""


class ScriptedEngine(QueuedEngine):
    """Says ``said[sample, turn]`` with the log-prob -1, -2, ... of each token; the turn is told by the prompt.

    Every token of prompt and answer is sent to the expert of its position.
    """

    def __init__(self, said: Said) -> None:
        super().__init__()
        self._said = said
        self._turns: dict[int, int] = {}

    def begin(self, seed: int, policy_version: int) -> None:
        super().begin(seed, policy_version)
        self._turns.clear()

    def answer(self, request: Request) -> tuple[Completion, ...]:
        completions = []
        for sample in range(request.place.first_sample, request.place.first_sample + request.num_samples):
            turn = self._turns.get(sample, 0)
            self._turns[sample] = turn + 1
            ids = tuple(self._said[sample, turn])[: request.sampling.max_new_tokens]
            reason = "stop" if ids[-1] == END else "length"
            logprobs = tuple(-1.0 - position for position in range(len(ids)))
            routing = torch.arange(len(request.prompt_ids + ids)).view(-1, 1, 1)
            completions.append(Completion(ids, logprobs, reason, policy_version=4, routing=routing))
        return tuple(completions)


Answer = Callable[[Task, Any, Turn], Grade]


class Harness:
    """A rollouter over a scripted engine; ``turns`` collects what the environment was asked."""

    def __init__(self, groups: ParallelGroups) -> None:
        self._groups = groups
        self.stop = StopRequest()
        self.asked: list[tuple[Any, Turn]] = []
        self.rollouter: Rollouter | None = None

    def run(
        self,
        engine: ScriptedEngine,
        answer: Answer,
        samples: int = 1,
        max_turns: int = 5,
        journal: StepJournal | None = None,
    ) -> RolloutResult | None:
        async def step(environment: str, items: Sequence[tuple[Task, Any, Turn]]) -> list[Grade]:
            await asyncio.sleep(0)
            self.asked += [(state, turn) for _, state, turn in items]
            return [answer(*item) for item in items]

        settings = ConversationSettings({"talk": max_turns}, LONGEST)
        self.close()
        self.rollouter = Rollouter(engine, toy_tokenizer(), self._groups, step, self.stop, 0.0, settings)
        source = SourcedTask("talk", Task("0", "ab"))
        request = Request(source, PROMPT, samples, SamplingParams(max_new_tokens=6))
        return self.rollouter.run([request], 9, 4, journal)

    def close(self) -> None:
        if self.rollouter is not None:
            self.rollouter.close()


@pytest.fixture
def harness(one_rank: ParallelGroups) -> Iterator[Harness]:
    harness = Harness(one_rank)
    yield harness
    harness.close()


def replying(text: str, until: int) -> Answer:
    """Says ``text`` until turn ``until``, which ends the conversation with that number as its reward."""

    def answer(task: Task, state: Any, turn: Turn) -> Grade:
        if turn.number == until:
            return Grade(float(until))
        return Grade(0.25, continuation=Continuation(({"role": "user", "content": text},), turn.number))

    return answer


def test_tokens_logprobs_and_spans_of_two_turns(harness: Harness) -> None:
    """Worked by hand: ``ab | c$ | xy | a$``, of which ``xy`` was read."""
    engine = ScriptedEngine({(0, 0): (C, END), (0, 1): (A, END)})
    (group,) = harness.run(engine, replying("xy", until=1)).groups
    (rollout,) = group.rollouts
    assert rollout.completion.token_ids == (C, END, X, Y, A, END)
    assert rollout.completion.inference_logprobs == (-1.0, -2.0, 0.0, 0.0, -1.0, -2.0)
    assert rollout.completion.environment_spans == ((2, 4),)
    assert (rollout.completion.num_written, rollout.completion.num_turns) == (4, 2)
    assert (rollout.completion.finish_reason, rollout.completion.policy_version) == ("stop", 4)
    assert rollout.grade == Grade(1.0)
    assert group.prompt_ids == PROMPT
    assert rollout.text == "cxya"
    # the second turn goes on from the very tokens of the first
    later = engine.requests[1]
    assert later.prompt_ids == (*PROMPT, C, END, X, Y)
    assert (later.num_samples, later.place.first_sample, later.sampling.max_new_tokens) == (1, 0, 6)
    # what the engine may know of it: the first turn will go on, the second holds the conversation up
    assert [(request.place.turn, request.hints.goes_on) for request in engine.requests] == [(0, True), (1, True)]
    assert harness.asked == [(None, Turn("c", "stop", 2, 0, False)), (0, Turn("a", "stop", 2, 1, False))]


def test_the_experts_are_those_of_the_whole_conversation(harness: Harness) -> None:
    """What the model read, too: all of it was fed for the last turn."""
    said = {(s, t): (A + s, END) for s in range(2) for t in range(2)}

    def answer(task: Task, state: Any, turn: Turn) -> Grade:
        return replying("xy", until=int(turn.text == "a"))(task, state, turn)

    (group,) = harness.run(ScriptedEngine(said), answer, samples=2).groups
    assert [r.completion.num_turns for r in group.rollouts] == [2, 1]
    for rollout in group.rollouts:
        tokens = len(PROMPT) + len(rollout.completion.token_ids)
        assert rollout.completion.routing.flatten().tolist() == list(range(tokens))


def test_a_turn_ends_with_any_end_token(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    """Turns ``c$``, ``ce`` and ``cb``; with ``$`` and ``e`` the template's closing is not said again."""
    ended = []
    tokenizer = letters_tokenizer({5: "e"}).ending_also_at([5])
    monkeypatch.setattr(tokenizer, "encode_reply", lambda prompt, messages, closed, _: ended.append(closed) or [X])
    monkeypatch.setitem(globals(), "toy_tokenizer", lambda: tokenizer)
    said = {(0, 0): (C, END), (0, 1): (C, 5), (0, 2): (C, B), (0, 3): (C,)}
    harness.run(ScriptedEngine(said), replying("x", until=3))
    assert ended == [True, True, False]


def test_samples_of_a_group_part_ways(harness: Harness) -> None:
    """Sample 1 ends in its first turn, samples 0 and 2 in their third and second; the group keeps their order."""
    said = {(s, t): (A + s, END) for s in range(3) for t in range(3)}
    ends = {"a": 2, "b": 0, "c": 1}

    def answer(task: Task, state: Any, turn: Turn) -> Grade:
        return replying("x", until=ends[turn.text])(task, state, turn)

    (group,) = harness.run(ScriptedEngine(said), answer, samples=3).groups
    assert [r.completion.token_ids for r in group.rollouts] == [
        (A, END, X, A, END, X, A, END),
        (B, END),
        (C, END, X, C, END),
    ]
    assert [r.completion.environment_spans for r in group.rollouts] == [((2, 3), (5, 6)), (), ((2, 3),)]
    assert [r.grade.reward for r in group.rollouts] == [2.0, 0.0, 1.0]


def test_the_last_turn_is_announced_and_ends_the_conversation(harness: Harness) -> None:
    said = {(0, t): (A, END) for t in range(9)}
    (group,) = harness.run(ScriptedEngine(said), replying("x", until=99), max_turns=3).groups
    assert [turn.last for _, turn in harness.asked] == [False, False, True]
    (rollout,) = group.rollouts
    assert rollout.grade.reward == 0.25  # what the last step said it would be worth
    assert rollout.grade.continuation is None
    assert rollout.completion.num_turns == 3


def test_a_reply_without_room_ends_the_conversation_as_cut(harness: Harness) -> None:
    """2 prompt tokens and 2 of the model leave 16 of 20: a reply of 16 leaves no token to say."""
    said = {(0, t): (A, END) for t in range(9)}
    (group,) = harness.run(ScriptedEngine(said), replying("x" * 16, until=99)).groups
    (rollout,) = group.rollouts
    assert rollout.completion.token_ids == (A, END)
    assert (rollout.completion.finish_reason, rollout.grade.reward) == ("length", 0.25)


def test_the_room_that_is_left_bounds_the_next_turn(harness: Harness) -> None:
    """A reply of 14 leaves 2 tokens; with them the conversation is full, and its last turn is announced."""
    said = {(0, 0): (A, END), (0, 1): (A, B, C, A, B)}
    engine = ScriptedEngine(said)
    (group,) = harness.run(engine, replying("x" * 14, until=99)).groups
    assert engine.requests[1].sampling.max_new_tokens == 2
    (rollout,) = group.rollouts
    assert rollout.completion.token_ids[-2:] == (A, B)
    assert len(PROMPT) + len(rollout.completion.token_ids) == LONGEST
    assert [turn.last for _, turn in harness.asked] == [False, True]
    assert rollout.completion.finish_reason == "length"


def test_a_failed_step_fails_its_sample_alone(harness: Harness) -> None:
    said = {(s, t): (A + s, END) for s in range(2) for t in range(2)}

    def answer(task: Task, state: Any, turn: Turn) -> Grade:
        if turn.text == "a" and turn.number == 1:
            return Grade(None, code="worker_died", message="twice")
        return replying("x", until=1)(task, state, turn)

    (group,) = harness.run(ScriptedEngine(said), answer, samples=2).groups
    assert [r.grade.failed for r in group.rollouts] == [True, False]
    assert group.rollouts[0].grade.code == "worker_died"


def test_a_conversation_whose_step_failed_is_held_again(
    harness: Harness, one_rank: ParallelGroups, tmp_path: Path
) -> None:
    """What the environment would have replied in an earlier start is not on record; the reply may be there now."""
    journal = RolloutJournal(tmp_path, one_rank)
    said = {(0, t): (A, END) for t in range(2)}

    def failing(task: Task, state: Any, turn: Turn) -> Grade:
        return Grade(None, code="timeout")

    harness.run(ScriptedEngine(said), failing, journal=journal.open(1, {}))
    first, second = ScriptedEngine(said), ScriptedEngine(said)
    (group,) = harness.run(first, replying("x", until=1), journal=journal.open(1, {})).groups
    assert group.rollouts[0].completion.token_ids == (A, END, X, A, END)
    assert harness.run(second, failing, journal=journal.open(1, {})).groups == (group,)
    assert (len(first.requests), len(second.requests)) == (2, 0)


def test_a_reply_of_no_tokens_is_a_failure(harness: Harness) -> None:
    (group,) = harness.run(ScriptedEngine({(0, 0): (A, END)}), replying("", until=9)).groups
    assert group.rollouts[0].grade.code == "environment_exception"
    assert "no tokens" in group.rollouts[0].grade.message


def test_a_stop_while_the_environment_thinks_cancels_the_step(harness: Harness) -> None:
    def answer(task: Task, state: Any, turn: Turn) -> Grade:
        harness.stop.reason = "SIGTERM"
        return replying("x", until=99)(task, state, turn)

    said = {(0, t): (A, END) for t in range(9)}
    result = harness.run(ScriptedEngine(said), answer, max_turns=99)
    assert result is None


def test_rewards_of_turns_add_up(harness: Harness, one_rank: ParallelGroups, tmp_path: Path) -> None:
    """Turns earn 1, 0 and 0.5; at the end there are 2 more. An earlier start's group has the same."""
    def answer(task: Task, state: Any, turn: Turn) -> Grade:
        earned = (1.0, 0.0, 0.5)[turn.number]
        return replace(replying("x", until=2)(task, state, turn), turn_reward=earned)

    said = {(0, t): (A, END) for t in range(3)}
    journal = RolloutJournal(tmp_path, one_rank)
    (group,) = harness.run(ScriptedEngine(said), answer, journal=journal.open(1, {})).groups
    (rollout,) = group.rollouts
    assert rollout.completion.turn_rewards == (1.0, 0.0, 2.5)
    assert rollout.grade == Grade(3.5)
    again = ScriptedEngine(said)
    assert harness.run(again, answer, journal=journal.open(1, {})).groups == (group,)
    assert again.requests == []


def test_a_conversation_that_fails_has_no_rewards(harness: Harness) -> None:
    def answer(task: Task, state: Any, turn: Turn) -> Grade:
        if turn.number == 1:
            return Grade(None, code="timeout")
        return replace(replying("x", until=2)(task, state, turn), turn_reward=1.0)

    (group,) = harness.run(ScriptedEngine({(0, t): (A, END) for t in range(2)}), answer).groups
    assert (group.rollouts[0].grade.reward, group.rollouts[0].completion.turn_rewards) == (None, ())
