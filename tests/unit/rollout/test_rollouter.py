"""Generation and grading side by side, with an engine that does what the test tells it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from megatron_rl.inference.engine import EngineStatistics
from megatron_rl.platform.groups import ParallelGroups
from megatron_rl.rollout.conversations import ConversationSettings, GradeFunction
from megatron_rl.rollout.journal import RolloutJournal, StepJournal
from megatron_rl.rollout.rollouter import Goal, Rollouter, RolloutResult
from megatron_rl.signals import StopRequest
from megatron_rl.types import (
    Completed,
    Completion,
    Grade,
    Request,
    RolloutGroup,
    SamplingParams,
    SourcedTask,
    Task,
    Transcript,
)
from tests.support.toy import toy_tokenizer

GOOD = Grade(1.0)
FAILED = Grade(None, code="timeout", message="10 s")


class ScriptedEngine:
    """Finishes request ``i`` in step ``finish_at[i]``."""

    def __init__(self, finish_at: Sequence[int], step_seconds: float = 0.0) -> None:
        self.finish_at = finish_at
        self._step_seconds = step_seconds
        self._waiting: dict[int, Request] = {}
        self.statistics = EngineStatistics()
        self.steps = self.submitted = 0
        self.began: tuple[int, int] | None = None
        self.aborted = False

    def begin(self, seed: int, policy_version: int) -> None:
        self.began, self.steps = (seed, policy_version), 0

    def submit(self, request: Request) -> None:
        self.submitted += 1
        self._waiting[request.index] = request

    @property
    def has_unfinished(self) -> bool:
        return bool(self._waiting)

    def step(self) -> list[Completed]:
        self.steps += 1
        assert self.steps < 10_000, "nobody stops the engine"
        time.sleep(self._step_seconds)
        done = [index for index in self._waiting if self.finish_at[index] == self.steps]
        return [self._finished(self._waiting.pop(index)) for index in done]

    def abort(self) -> None:
        self._waiting.clear()
        self.aborted = True

    def _finished(self, request: Request) -> Completed:
        """Sample s says letter ``index``, then stops (even s) or is cut (odd s)."""
        letter = request.index + 1
        endings = [((letter, 0), "stop"), ((letter, letter), "length")]
        completions = [
            Completion(ids, (-1.0,) * len(ids), reason, policy_version=4)
            for ids, reason in (endings[sample % 2] for sample in range(request.num_samples))
        ]
        return request, tuple(completions)


def make_requests(count: int, num_samples: int = 2) -> list[Request]:
    sources = [SourcedTask("toy", Task(str(index), "ab")) for index in range(count)]
    return [
        Request(source, (1, 2), num_samples, SamplingParams(), index) for index, source in enumerate(sources)
    ]


async def grade_at_once(environment: str, items: Sequence[tuple[Task, Transcript]]) -> list[Grade]:
    return [Grade(float(task.id)) for task, _ in items]


class EndsAt(Goal):
    """A quota that is met once so many groups are finished."""

    def __init__(self, wanted: int, was_left: bool = False) -> None:
        self._wanted, self.was_left = wanted, was_left
        self.leaves = 0

    def is_met(self, finished: Mapping[int, RolloutGroup], idle: bool) -> bool:
        return len(finished) >= self._wanted

    def leave(self) -> None:
        self.leaves += 1


class Harness:
    """A rollouter over a scripted engine, closed at the end of the test."""

    def __init__(self, groups: ParallelGroups) -> None:
        self._groups = groups
        self.stop = StopRequest()
        self.rollouter: Rollouter | None = None

    def run(
        self,
        engine: ScriptedEngine,
        grade: GradeFunction,
        num_samples: int = 2,
        journal: StepJournal | None = None,
        quota: EndsAt | None = None,
    ) -> RolloutResult | None:
        self.close()
        self.rollouter = Rollouter(engine, toy_tokenizer(), self._groups, grade, self.stop)
        return self.rollouter.run(make_requests(len(engine.finish_at), num_samples), 9, 4, journal, quota)

    def close(self) -> None:
        if self.rollouter is not None:
            self.rollouter.close()


@pytest.fixture
def harness(one_rank: ParallelGroups) -> Iterator[Harness]:
    harness = Harness(one_rank)
    yield harness
    harness.close()


def test_the_engine_steps_while_a_grade_is_pending(harness: Harness) -> None:
    """The first group's grade is not given before the engine has made five more steps."""
    engine = ScriptedEngine(finish_at=[1, 8])
    seen: dict[str, tuple[int, int]] = {}

    async def patient(environment: str, items: Sequence[tuple[Task, Transcript]]) -> list[Grade]:
        started = engine.steps
        for _ in range(1000):
            if engine.steps >= started + 5 or not engine.has_unfinished:
                break
            await asyncio.sleep(0)
        seen[items[0][0].id] = (started, engine.steps)
        return [GOOD] * len(items)

    result = harness.run(engine, patient)
    assert seen["0"] == (1, 6)
    assert len(result.groups) == 2
    assert engine.began == (9, 4)


def test_grading_time_hides_behind_generation(harness: Harness) -> None:
    """Three grades of 50 ms end during 20 steps of 10 ms; only the last group's is waited for."""
    engine = ScriptedEngine(finish_at=[1, 2, 3, 20], step_seconds=0.01)
    graded_at: dict[str, int] = {}

    async def slow(environment: str, items: Sequence[tuple[Task, Transcript]]) -> list[Grade]:
        task = items[0][0].id
        await asyncio.sleep(0.3 if task == "3" else 0.05)
        graded_at[task] = engine.steps
        return [GOOD] * len(items)

    begin = time.perf_counter()
    result = harness.run(engine, slow)
    took = time.perf_counter() - begin
    assert max(graded_at[task] for task in "012") < graded_at["3"] == 20
    assert result.generate_seconds >= 0.2
    assert 0.1 < result.grade_wait_seconds <= took - result.generate_seconds


def test_groups_come_back_in_the_order_of_the_requests(harness: Harness) -> None:
    result = harness.run(ScriptedEngine(finish_at=[4, 1, 3, 2]), grade_at_once)
    assert [group.source.task.id for group in result.groups] == ["0", "1", "2", "3"]
    assert [[r.grade.reward for r in group.rollouts] for group in result.groups] == [
        [float(index)] * 2 for index in range(4)
    ]


def test_the_grader_sees_text_ending_and_length(harness: Harness) -> None:
    seen: list[Transcript] = []

    async def look(environment: str, items: Sequence[tuple[Task, Transcript]]) -> list[Grade]:
        assert environment == "toy"
        seen.extend(transcript for _, transcript in items)
        return [GOOD] * len(items)

    group = harness.run(ScriptedEngine(finish_at=[1]), look).groups[0]
    assert seen == [Transcript("a", "stop", 2), Transcript("aa", "length", 2)]
    assert [transcript.ended for transcript in seen] == [True, False]
    assert [rollout.text for rollout in group.rollouts] == ["a", "aa"]
    assert group.rollouts[0].completion.policy_version == 4


def test_failed_grades_are_data(harness: Harness) -> None:
    async def half(environment: str, items: Sequence[tuple[Task, Transcript]]) -> list[Grade]:
        return [GOOD, FAILED]

    result = harness.run(ScriptedEngine(finish_at=[1, 2]), half)
    assert [[r.grade for r in group.rollouts] for group in result.groups] == [[GOOD, FAILED]] * 2


def test_failed_grades_of_an_earlier_start_are_graded_again(
    harness: Harness, one_rank: ParallelGroups, tmp_path: Path
) -> None:
    """Of three groups one was graded, one half, and one not at all: nothing is generated, three samples are graded."""
    journal = RolloutJournal(tmp_path, one_rank)
    failures = {"0": (), "1": (1,), "2": (0, 1)}
    asked: list[tuple[str, str]] = []

    async def failing(environment: str, items: Sequence[tuple[Task, Transcript]]) -> list[Grade]:
        graded = await healthy(environment, items)
        return [FAILED if index in failures[items[0][0].id] else grade for index, grade in enumerate(graded)]

    async def healthy(environment: str, items: Sequence[tuple[Task, Transcript]]) -> list[Grade]:
        asked.extend((task.id, transcript.text) for task, transcript in items)
        return [Grade(float(len(transcript.text))) for _, transcript in items]

    undisturbed = harness.run(ScriptedEngine(finish_at=[1, 2, 3]), healthy)
    harness.run(ScriptedEngine(finish_at=[1, 2, 3]), failing, journal=journal.open(1, {}))
    for expected in ([("1", "bb"), ("2", "c"), ("2", "cc")], []):
        asked.clear()
        engine = ScriptedEngine(finish_at=[1, 2, 3])
        again = harness.run(engine, healthy, journal=journal.open(1, {}))
        assert (engine.submitted, asked) == (0, expected)
        assert again.groups == undisturbed.groups


def test_a_group_that_is_graded_together_is_graded_again_as_a_whole(
    one_rank: ParallelGroups, tmp_path: Path
) -> None:
    """The grade of one sample failed; at the next start the grader sees the other one, too."""
    journal, seen = RolloutJournal(tmp_path, one_rank), []
    verdicts = [[FAILED, GOOD], [Grade(0.25), Grade(0.75)]]

    async def compare(task: Task, answers: Sequence[Transcript]) -> list[Grade]:
        seen.append([answer.text for answer in answers])
        return verdicts[len(seen) - 1]

    settings = ConversationSettings({}, 0, {"toy": compare})
    for expected in verdicts:
        engine = ScriptedEngine(finish_at=[1])
        rollouter = Rollouter(engine, toy_tokenizer(), one_rank, grade_at_once, StopRequest(), conversations=settings)
        result = rollouter.run(make_requests(1), 9, 4, journal.open(1, {}))
        rollouter.close()
        assert [rollout.grade for rollout in result.groups[0].rollouts] == expected
    assert seen == [["a", "aa"]] * 2


def test_a_grader_that_returns_too_few_verdicts_is_an_error(harness: Harness) -> None:
    async def short(environment: str, items: Sequence[tuple[Task, Transcript]]) -> list[Grade]:
        return [GOOD]

    with pytest.raises(ValueError, match="shorter"):
        harness.run(ScriptedEngine(finish_at=[1]), short)


def test_a_stop_request_ends_the_rollout_and_its_grades(harness: Harness) -> None:
    engine = ScriptedEngine(finish_at=[1, 10**9])
    cancelled: list[str] = []

    async def endless(environment: str, items: Sequence[tuple[Task, Transcript]]) -> list[Grade]:
        harness.stop.reason = "SIGTERM"
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.append(items[0][0].id)
            raise
        return [GOOD] * len(items)

    started = time.perf_counter()
    result = harness.run(engine, endless)
    assert result is None
    assert engine.aborted and cancelled == ["0"]
    assert time.perf_counter() - started < 5


def test_a_quota_ends_the_rollout_with_what_is_finished(harness: Harness) -> None:
    engine, quota = ScriptedEngine(finish_at=[3, 10**9, 1]), EndsAt(2)
    result = harness.run(engine, grade_at_once, quota=quota)
    assert list(result.finished) == [0, 2]
    assert engine.aborted and engine.steps < 100
    assert quota.leaves == 0


def test_a_replica_that_is_asked_to_stop_leaves_the_quota(harness: Harness) -> None:
    harness.stop.reason = "SIGTERM"
    quota = EndsAt(2)
    assert harness.run(ScriptedEngine(finish_at=[10**9]), grade_at_once, quota=quota) is None
    assert quota.leaves == 1


def test_a_quota_that_another_replica_left_ends_in_nothing(harness: Harness) -> None:
    assert harness.run(ScriptedEngine(finish_at=[1, 10**9]), grade_at_once, quota=EndsAt(1, was_left=True)) is None


def test_a_stop_request_is_heard_while_only_grades_are_waited_for(harness: Harness) -> None:
    """All generation is over; the grader would take another minute."""
    engine = ScriptedEngine(finish_at=[1, 2])

    async def slow(environment: str, items: Sequence[tuple[Task, Transcript]]) -> list[Grade]:
        if items[0][0].id == "1":
            await asyncio.sleep(0.1)
            harness.stop.reason = "SIGTERM"
            await asyncio.sleep(60)
        return [GOOD] * len(items)

    started = time.perf_counter()
    result = harness.run(engine, slow)
    assert result is None
    assert time.perf_counter() - started < 5


def test_a_second_rollout_on_the_same_loop(harness: Harness) -> None:
    harness.run(ScriptedEngine(finish_at=[1]), grade_at_once)
    rollouter = harness.rollouter
    again = rollouter.run(make_requests(0), seed=1, policy_version=5)
    assert again.groups == ()


def test_no_result_is_ever_formatted(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    """``asyncio.Runner.run`` does so when it takes its SIGINT handler back."""
    formatted: list[object] = []
    monkeypatch.setattr(RolloutResult, "__repr__", lambda result: formatted.append(result) or "")
    harness.run(ScriptedEngine(finish_at=[1]), grade_at_once)
    assert formatted == []
