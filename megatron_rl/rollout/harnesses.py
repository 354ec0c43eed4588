"""Samples of harnesses: the environment calls the model, and the calls are answered beside all other requests.

    group ─► a session a sample ─► EnvironmentClient.run ─────────────────────────► rewards ─► sessions closed
                    ▲                                                                              │
      harness ─► Endpoint ─► Call ─► every rank of the model copy ─► Request ─► Engine        Trace ─► Rollout
                    └──────────────────── Completion ◄────────────────────────────┘

The leader of a model copy has the endpoint. It tells the others of calls, hang-ups and rewards, so that all submit and
cancel the same requests between the same two engine steps.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from megatron_rl.endpoint.calls import Call, Endpoint, failing_alone, outside_sessions, request_of
from megatron_rl.endpoint.sessions import ID_LENGTH, SessionEnd
from megatron_rl.errors import shorten
from megatron_rl.inference.engine import Engine
from megatron_rl.platform.collectives import broadcast_json
from megatron_rl.platform.groups import ParallelGroups
from megatron_rl.rollout import agents
from megatron_rl.rollout.conversations import GroupGradeFunction, from_row, to_row
from megatron_rl.rollout.journal import FinishedGroups
from megatron_rl.rollout.past_calls import PastCalls
from megatron_rl.rollout.trace import Trace
from megatron_rl.types import Completion, Grade, HarnessRun, Place, Request, Rollout, Talk, Transcript

RunFunction = Callable[[str, Sequence[HarnessRun]], Awaitable[Sequence[Grade]]]
"""(environment, samples of a group) -> one grade each; never raises for a bad sample. Cancelled, it ends them."""


@dataclass(frozen=True)
class HarnessSettings:
    """Settings of harnesses."""

    environments: Collection[str]
    """The harnesses among the environments."""
    run: RunFunction
    endpoint: Endpoint | None
    """Of the leader of a model copy; it listens."""
    masks_edits: bool = False
    """A sample whose harness edited the history is left out, instead of trained on as several sequences."""
    by_group: Mapping[str, GroupGradeFunction] = field(default_factory=dict)
    """Graders of those environments that compare the samples of a group."""


@dataclass
class _Sample:
    request: Request
    past: PastCalls
    trace: Trace = field(default_factory=Trace)


class _End(NamedTuple):
    """A sample has its reward, or none."""

    index: int
    sample: int
    calls: Mapping[str, Sequence[int]]
    """Those that the harness has got answers to, by agent; of a sample without agents all by an empty name."""
    turn_rewards: Sequence[tuple[int, float]]
    """Of single calls."""
    at_end: Mapping[str, float]
    """What the harness gave for the whole, by agent too."""
    grade: Grade


class Harnesses:
    """The samples of harnesses in one rollout; every rank of a model copy holds all of them."""

    def __init__(
        self, settings: HarnessSettings, groups: ParallelGroups, finished: FinishedGroups, one_by_one: bool = False
    ) -> None:
        """``finished`` gets every sample that has ended; ``one_by_one`` before others of its group have."""
        self._one_by_one = one_by_one
        self._settings = settings
        self._groups = groups
        self._finished = finished
        self._open: dict[tuple[int, int], _Sample] = {}
        self._sample_of: dict[int, _Sample] = {}
        """The samples of calls that the engine has, by number of the call."""
        self._sessions: dict[str, tuple[int, int]] = {}
        """Of the leader: the open ones."""
        self.asked: set[asyncio.Task[list[_End]]] = set()
        """Groups that run; of the leader."""

    @property
    def waiting(self) -> bool:
        """True while a harness runs; the same on all ranks of a model copy."""
        return bool(self._open)

    def leads(self, request: Request) -> bool:
        """Return whether the request is of a harness."""
        return request.source.environment in self._settings.environments

    def start(self, request: Request) -> None:
        """Run the samples of a group; of one that has waited for this step those that have not ended."""
        asked = replace(request, so_far=(), talks=())
        talks = request.talks or (Talk(),) * request.num_samples
        for sample, talk in enumerate(talks):
            if talk.ended is not None:
                self._finished.keep(asked, sample, talk.ended)
            else:
                self._open[request.index, sample] = _Sample(asked, PastCalls(talk.calls or {}))
        samples = [sample for sample, talk in enumerate(talks) if talk.ended is None]
        if self._groups.leads_model:
            parts = [[sample] for sample in samples] if self._one_by_one else [samples]
            self.asked |= {asyncio.create_task(self._run(asked, part)) for part in parts}

    def add_answer(self, request: Request, completion: Completion) -> None:
        """Deliver what the engine made of a call; of a sample that has ended meanwhile it is dropped."""
        sample = self._sample_of.pop(request.place.call, None)
        if sample is not None:
            sample.trace.answer(request.place.call, completion)
        if self._groups.leads_model:
            self._settings.endpoint.deliver(request.place.call, completion)

    def submit_turns(self, engine: Engine) -> None:
        """Show what streams have of their answers; submit new calls, and cancel those that nobody waits for.

        Collective in a model copy.
        """
        if not self.waiting:
            return
        if self._groups.leads_model:
            self._settings.endpoint.show(engine)
        calls, outside, cancelled, ends = self._news() if self._groups.leads_model else ([], [], [], [])
        if self._groups.model_group.size() > 1:
            news = [calls, outside, cancelled, list(map(to_row, ends))]
            news = broadcast_json(news, self._groups.model_leader(), self._groups.model_group)
            calls, outside, cancelled, rows = news
            if not self._groups.leads_model:
                ends = [_End(*from_row(row)) for row in rows]
        for index, sample, call in calls:
            with failing_alone(self._settings.endpoint, call["number"]):
                self._submit(self._request(index, sample, Call(**call)), engine)
        for call in outside:
            with failing_alone(self._settings.endpoint, call["number"]):
                engine.submit(request_of(**call))
        for number in cancelled:
            self._sample_of.pop(number, None)
        for end in ends:
            self._end(end)
        if cancelled:
            engine.cancel(cancelled)

    async def wait_for_call(self, seconds: float) -> None:
        """Wait until a harness has called, for ``seconds`` at most; of the leader."""
        await self._settings.endpoint.wait(seconds)

    # -- of the leader ---------------------------------------------------------------------------

    async def _run(self, request: Request, numbers: Sequence[int]) -> list[_End]:
        """Run these samples; those whose server died run once more, in new sessions: their processes are gone."""
        ends: dict[int, _End] = {}
        samples = numbers
        for _ in range(2):
            ends |= {end.sample: end for end in await self._attempt(request, samples)}
            samples = [sample for sample in samples if ends[sample].grade.code == "server_unreachable"]
            if not samples:
                break
        ended = [ends[sample] for sample in numbers]
        compare = self._settings.by_group.get(request.source.environment)
        return ended if compare is None else await self._compared(request, ended, compare)

    async def _compared(self, request: Request, ends: Sequence[_End], compare: GroupGradeFunction) -> list[_End]:
        """Return the ends with the rewards of a comparison added; a sample that has failed has no part in it."""
        compared = [end for end in ends if not end.grade.failed]
        grades = await compare(request.source.task, list(map(self._said, compared))) if compared else []
        found = dict(zip((end.sample for end in compared), grades, strict=True))
        return [_with_reward(end, found[end.sample]) if end.sample in found else end for end in ends]

    def _said(self, end: _End) -> Transcript:
        """Return all that was said in a sample, its longest sequence first."""
        trace, calls = self._open[end.index, end.sample].trace, itertools.chain(*end.calls.values())
        said = [sequence.completion for sequence in trace.sequences(set(calls))]
        text = "\n\n".join(self._finished.text_of(completion) for completion in said)
        return Transcript(text, said[0].finish_reason, sum(completion.num_written for completion in said))

    async def _attempt(self, request: Request, samples: Sequence[int]) -> list[_End]:
        endpoint, source = self._settings.endpoint, request.source
        sessions = [endpoint.open_session(source.environment) for _ in samples]
        self._sessions |= {session: (request.index, s) for session, s in zip(sessions, samples, strict=True)}
        runs = [
            HarnessRun(source.task, sample, endpoint.base_url(session), endpoint.token)
            for session, sample in zip(sessions, samples, strict=True)
        ]
        try:
            grades = await self._settings.run(source.environment, runs)
        finally:
            closed = [endpoint.close_session(session) for session in sessions]
            for session in sessions:
                del self._sessions[session]
        return [
            _ended(request.index, sample, self._judged(request.index, sample, grade, end), end)
            for sample, end, grade in zip(samples, closed, grades, strict=True)
        ]

    def _judged(self, index: int, sample: int, grade: Grade, end: SessionEnd) -> Grade:
        """Return the grade with what the session knows of the sample."""
        if grade.failed:
            return grade
        if not end.calls:
            return Grade(None, code="no_calls", message="the harness gave a reward without an answer of the model")
        if end.edited and self._settings.masks_edits:
            message = f"{end.edited} calls with answers in their history that the model has not given"
            return Grade(None, code="edited_history", message=message)
        metrics, past = {"edited_histories": float(end.edited)}, self._open[index, sample].past
        if past.given:
            metrics["repeated_calls"] = float(past.num_repeated)
        return replace(grade, metrics={**grade.metrics, **metrics})

    def _news(self) -> tuple[list[tuple[int, int, dict[str, Any]]], list[dict[str, Any]], list[int], list[_End]]:
        taken, cancelled = self._settings.endpoint.take(), self._settings.endpoint.take_cancelled()
        calls = [(*self._sessions[c.session], vars(c)) for c in taken if c.session is not None]
        # Of judges: of two with the same prompt both have the same verdict, and so has a step that is done again.
        outside = [outside_sessions(c, "judge") for c in taken if c.session is None]
        done = [task for task in self.asked if task.done()]
        self.asked.difference_update(done)
        ends = [end for task in done for end in task.result()]
        return calls, outside, cancelled, sorted(ends, key=lambda end: end[:2])

    # -- of all ranks ----------------------------------------------------------------------------

    def _submit(self, call: Request, engine: Engine) -> None:
        """Have a call answered, as far as no earlier step has."""
        found = self._sample_of[call.place.call].past.add(call)
        if found is None:
            engine.submit(call)
        elif found.finish_reason is None:
            engine.submit(replace(call, so_far=(found,)))
        else:
            self.add_answer(call, found)

    def pause(self, unfinished: Sequence[Request]) -> list[Request]:
        """Return the groups that go on in the next step, after the ``unfinished`` calls that the engine gave back.

        The leader's programs have to be ended then.
        """
        begun: dict[tuple[int, int], dict[int, Completion]] = {}
        for call in unfinished:
            if call.place.call in self._sample_of:  # else of a judge, or its client has gone
                answers = begun.setdefault((call.index, call.place.first_sample), {})
                answers[call.place.call] = call.so_far[0]
        paused = {sample.request.index: sample.request for sample in self._open.values()}
        waiting = {
            place: sample.past.waiting(sample.trace.answers | begun.get(place, {}))
            for place, sample in self._open.items()
        }
        self._open.clear()
        self._sample_of.clear()
        return [self._paused(request, waiting) for _, request in sorted(paused.items())]

    def _paused(self, request: Request, waiting: Mapping[tuple[int, int], Talk]) -> Request:
        ended = {sample: Talk(ended=rollout) for sample, rollout in self._finished.give_back(request.index).items()}
        talks = [ended.get(s) or waiting[request.index, s] for s in range(request.num_samples)]
        nothing = Completion((), (), None, policy_version=0)
        so_far = tuple(nothing if talk.ended is None else talk.ended.completion for talk in talks)
        return replace(request, so_far=so_far, talks=tuple(talks))

    def _request(self, index: int, number: int, call: Call) -> Request:
        sample = self._open[index, number]
        self._sample_of[call.number] = sample
        request, trace = sample.request, sample.trace
        sampling = replace(
            request.sampling,
            max_new_tokens=min(request.sampling.max_new_tokens, call.max_new_tokens),
            stop=tuple(dict.fromkeys((*request.sampling.stop, *call.stop))),
            stop_token_ids=tuple(call.stop_token_ids),
        )
        prompt_ids = trace.begin(call.number, call.after, call.ids)
        return replace(
            request,
            prompt_ids=prompt_ids,
            num_samples=1,
            sampling=sampling,
            place=Place(number, trace.depth(call.number), call.number, call.branch),
            hints=replace(request.hints, goes_on=True),
        )

    def _end(self, end: _End) -> None:
        sample = self._open.pop((end.index, end.sample))
        turn_rewards = dict(end.turn_rewards)
        named = [
            (agent, sequence) for agent, calls in end.calls.items()
            for sequence in sample.trace.sequences(calls, turn_rewards, end.at_end.get(agent, 0.0))
        ]  # fmt: skip
        if not named:
            nothing = Completion((), (), "stop", policy_version=0)
            self._finished.keep(sample.request, end.sample, Rollout(nothing, "", end.grade))
            return
        names, (first, *branches) = zip(*named, strict=True)
        names = names if any(names) else ()
        rollout = Rollout(first.completion, "", end.grade, first.prompt_ids, tuple(branches), names)
        self._finished.keep(sample.request, end.sample, rollout)


def _with_reward(end: _End, compared: Grade) -> _End:
    """Return the end with the reward of a comparison, which every agent gets."""
    if compared.failed:
        return end._replace(grade=compared)
    grade, more = end.grade, compared.reward
    by_agent = {agent: reward + more for agent, reward in grade.agent_rewards.items()}
    metrics = {**grade.metrics, **compared.metrics, "run_reward": grade.reward}
    total = replace(grade, reward=grade.reward + more, agent_rewards=by_agent, metrics=metrics)
    return end._replace(grade=total, at_end={agent: reward + more for agent, reward in end.at_end.items()})


def _ended(index: int, sample: int, grade: Grade, end: SessionEnd) -> _End:
    calls = agents.calls_of(grade, end)
    has_agents = "" not in calls
    turn_rewards, grade, at_end = _by_call(agents.judged(grade, calls) if has_agents else grade, end, calls)
    return _End(index, sample, calls, turn_rewards, at_end, agents.with_metrics(grade) if has_agents else grade)


def _by_call(
    grade: Grade, end: SessionEnd, calls: Mapping[str, Sequence[int]]
) -> tuple[list[tuple[int, float]], Grade, Mapping[str, float]]:
    """Return the rewards of single calls, the grade with their sums, and what was given for the whole."""
    if grade.failed or not grade.completion_rewards:
        return [], grade, {}
    rewards = []
    for name, reward in grade.completion_rewards.items():
        found = end.completions.get(name[-ID_LENGTH:], ())
        if len(found) != 1:
            why = f"has {len(found)} choices" if found else "is no completion of this sample"
            return [], Grade(None, code="invalid_reward", message=f"completion_rewards: {shorten(name)} {why}"), {}
        rewards.append((found[0], reward))
    earned = {agent: sum(reward for call, reward in rewards if call in own) for agent, own in calls.items()}
    by_agent = {agent: given + earned[agent] for agent, given in grade.agent_rewards.items()}
    total = grade.reward + sum(reward for _, reward in rewards)
    whole = replace(grade, reward=total, agent_rewards=by_agent, completion_rewards={})
    return sorted(rewards), whole, grade.agent_rewards or {"": grade.reward}
