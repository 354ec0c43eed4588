"""Conversations: samples that speak again after the environment has answered.

    turn 1 of a group ─► step ─┬─► done: the sample is graded
            (one prefill)      └─► reply ─► prompt + turn 1 + reply ─► turn 2 ─► step ─► ...

A conversation is a list of token ids that only grows. What the model wrote stays as it was sampled, with the
log-probs it was sampled with; only the environment's words are encoded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from megatron_rl.errors import EnvironmentFault
from megatron_rl.parallel import ParallelGroups
from megatron_rl.parallel.collectives import broadcast_json
from megatron_rl.rollout.journal import StepJournal
from megatron_rl.tokenizer import Tokenizer
from megatron_rl.types import Completion, GradeResult, Request, Rollout, RolloutGroup, Task, Turn

StepFunction = Callable[[str, Sequence[tuple[Task, Any, Turn]]], Awaitable[Sequence[GradeResult]]]
"""(environment, [(task, state, turn)]) -> one result each; never raises for a bad sample."""
PENDING = GradeResult("error", code="pending")
"""Stands for the verdict on ranks that do not talk to the environments."""

_LOOK_AGAIN_SECONDS = 0.2
"""Longest wait for answers when nothing generates: a request to stop must be noticed."""


@dataclass(frozen=True)
class ConversationSettings:
    """How conversations are led."""

    step: StepFunction
    max_turns: Mapping[str, int]
    """For each environment; one that is not named has single answers."""
    max_sequence_length: int
    """Tokens of a whole conversation, its prompt included."""


@dataclass
class _Conversation:
    """One sample; ``token_ids`` and ``logprobs`` begin after the prompt."""

    request: Request
    sample: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[tuple[int, int]] = field(default_factory=list)
    state: Any = None
    last: Completion | None = None
    cut: bool = False
    """True when a reply found no room."""

    @property
    def length(self) -> int:
        return len(self.request.prompt_ids) + len(self.token_ids)

    def add_turn(self, turn: Completion) -> None:
        self.token_ids += turn.token_ids
        self.logprobs += turn.inference_logprobs
        self.last = turn

    def add_reply(self, reply: Sequence[int]) -> None:
        start = len(self.token_ids)
        self.token_ids += reply
        self.logprobs += [0.0] * len(reply)
        self.spans.append((start, start + len(reply)))

    def completion(self) -> Completion:
        return Completion(
            token_ids=tuple(self.token_ids),
            inference_logprobs=tuple(self.logprobs),
            finish_reason="length" if self.cut else self.last.finish_reason,
            policy_version=self.last.policy_version,
            environment_spans=tuple(self.spans),
        )


@dataclass(frozen=True)
class _Answer:
    """What the environment said to a sample: a reply, or the end and a grade."""

    index: int
    sample: int
    reply: tuple[int, ...] = ()
    """Empty at the end."""
    cut: bool = False
    grade: GradeResult = PENDING


class Conversations:
    """The conversations of one rollout.

    Every rank of a model copy holds all of them and gets the same turns; the leader asks the environment and
    tells the others what to read, so that all submit the same requests between the same two engine steps.
    """

    def __init__(
        self,
        settings: ConversationSettings | None,
        tokenizer: Tokenizer,
        groups: ParallelGroups,
        journal: StepJournal | None = None,
    ) -> None:
        """Without ``settings`` no request is a conversation; ``journal`` gets every group that is complete."""
        self._settings = settings
        self._tokenizer = tokenizer
        self._groups = groups
        self._journal = journal
        self._open: dict[tuple[int, int], _Conversation] = {}
        self._asked: set[asyncio.Task[list[_Answer]]] = set()
        self._waiting = 0  # samples whose answer is due; the same number on every rank of the model copy
        self._rollouts: dict[int, dict[int, Rollout]] = {}
        self.finished: dict[int, RolloutGroup] = {}
        """Complete groups by the index of their request."""

    @property
    def waiting(self) -> bool:
        """True while an environment's answer is due."""
        return self._waiting > 0

    def takes(self, request: Request) -> bool:
        """Whether the request is of an environment that answers."""
        return self._settings is not None and self._settings.max_turns.get(request.source.environment, 1) > 1

    def add_turn(self, request: Request, completions: Sequence[Completion]) -> None:
        """A turn of some samples of a group: the whole group's first, or one sample's later one."""
        answered = []
        for sample, turn in enumerate(completions, start=request.first_sample):
            conversation = self._open.setdefault((request.index, sample), _Conversation(request, sample))
            conversation.add_turn(turn)
            answered.append(conversation)
        self._waiting += len(answered)
        if self._groups.leads_model:
            self._asked.add(asyncio.create_task(self._ask(answered)))

    async def replies(self, idle: bool) -> list[Request]:
        """The next turns to generate; with ``idle``, waits a while for an answer. Collective in a model copy."""
        if not self.waiting:
            return []
        answers = await self._answers(idle) if self._groups.leads_model else []
        if self._groups.model_group.size() > 1:
            told = [(a.index, a.sample, a.reply, a.cut) for a in answers]
            told = broadcast_json(told, self._groups.model_leader(), self._groups.model_group)
            if not self._groups.leads_model:
                answers = [_Answer(index, sample, tuple(reply), cut) for index, sample, reply, cut in told]
        self._waiting -= len(answers)
        return [request for answer in answers if (request := self._apply(answer)) is not None]

    async def cancel(self) -> None:
        """Forget everything."""
        for task in self._asked:
            task.cancel()
        await asyncio.gather(*self._asked, return_exceptions=True)
        self._asked.clear()
        self._waiting = 0

    async def _answers(self, idle: bool) -> list[_Answer]:
        if idle:
            await asyncio.wait(self._asked, timeout=_LOOK_AGAIN_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        done = [task for task in self._asked if task.done()]
        self._asked.difference_update(done)
        answers = [answer for task in done for answer in task.result()]
        return sorted(answers, key=lambda answer: (answer.index, answer.sample))

    async def _ask(self, conversations: Sequence[_Conversation]) -> list[_Answer]:
        source = conversations[0].request.source
        turns = [(source.task, c.state, self._turn(c)) for c in conversations]
        results = await self._settings.step(source.environment, turns)
        return [
            self._answer(conversation, turn, result)
            for conversation, (_, _, turn), result in zip(conversations, turns, results, strict=True)
        ]

    def _turn(self, conversation: _Conversation) -> Turn:
        said, number = conversation.last, len(conversation.spans)
        most = self._settings.max_turns[conversation.request.source.environment]
        # a reply has a token, and so has the turn after it
        last = number + 1 >= most or conversation.length + 2 > self._settings.max_sequence_length
        text = self._tokenizer.decode(said.token_ids)
        return Turn(text, said.finish_reason, len(said.token_ids), number, last)

    def _answer(self, conversation: _Conversation, turn: Turn, result: GradeResult) -> _Answer:
        """The reply in tokens, if there is one, and room for it and for something to say after it."""
        index, sample, going_on = conversation.request.index, conversation.sample, result.continuation
        if going_on is None or turn.last:
            return _Answer(index, sample, grade=result)
        said = conversation.last.token_ids
        ended = bool(said) and said[-1] in self._tokenizer.end_token_ids
        reply, problem = [], "the reply has no tokens"
        try:
            prompt = conversation.request.source.task.prompt
            reply = self._tokenizer.encode_reply(prompt, going_on.messages, ended)
        except EnvironmentFault as fault:
            problem = str(fault)
        if conversation.length + len(reply) >= self._settings.max_sequence_length:
            return _Answer(index, sample, cut=True, grade=result)
        if not reply:
            failure = GradeResult("error", code="environment_exception", message=problem)
            return _Answer(index, sample, grade=failure)
        conversation.state = going_on.state
        return _Answer(index, sample, tuple(reply))

    def _apply(self, answer: _Answer) -> Request | None:
        """The request for the next turn; None when the conversation is over."""
        key = (answer.index, answer.sample)
        conversation = self._open[key]
        if not answer.reply:
            conversation.cut = answer.cut
            self._close(self._open.pop(key), answer.grade)
            return None
        conversation.add_reply(answer.reply)
        request = conversation.request
        room = self._settings.max_sequence_length - conversation.length
        new = min(request.sampling.max_new_tokens, room)
        return replace(
            request,
            prompt_ids=request.prompt_ids + tuple(conversation.token_ids),
            num_samples=1,
            first_sample=answer.sample,
            turn=len(conversation.spans),
            sampling=replace(request.sampling, max_new_tokens=new),
        )

    def _close(self, conversation: _Conversation, grade: GradeResult) -> None:
        request = conversation.request
        text = self._tokenizer.decode(conversation.token_ids)
        group = self._rollouts.setdefault(request.index, {})
        group[conversation.sample] = Rollout(conversation.completion(), text, replace(grade, continuation=None))
        if len(group) == request.num_samples:
            rollouts = tuple(group[sample] for sample in range(request.num_samples))
            prompt = self._tokenizer.decode(request.prompt_ids)
            finished = RolloutGroup(request.source, request.prompt_ids, prompt, rollouts)
            self.finished[request.index] = finished
            if self._journal is not None:
                self._journal.add(request.index, finished)
