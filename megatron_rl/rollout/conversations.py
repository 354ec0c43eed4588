"""From completions to graded groups: every sample is a conversation, and one turn is all that most have.

    turn 1 of a group ─► judged ─┬─► done: the sample has its grade
            (one prefill)        └─► reply ─► prompt + turn 1 + reply ─► turn 2 ─► judged ─► ...

A conversation is a list of token ids that only grows. What the model wrote stays as it was sampled, with the
log-probs it was sampled with; only the environment's words are encoded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from megatron_rl.errors import EnvironmentFault
from megatron_rl.parallel import ParallelGroups
from megatron_rl.parallel.collectives import broadcast_json
from megatron_rl.rollout.journal import StepJournal
from megatron_rl.tokenizer import Tokenizer
from megatron_rl.types import Completion, Grade, Item, Request, Rollout, RolloutGroup, Transcript, Turn

GradeFunction = Callable[[str, Sequence[Item]], Awaitable[Sequence[Grade]]]
"""(environment, samples or turns of a group) -> one grade each; never raises for a bad sample."""

_LOOK_AGAIN_SECONDS = 0.2
"""Longest wait for answers when nothing generates: a request to stop must be noticed."""


@dataclass(frozen=True)
class ConversationSettings:
    """How conversations are led."""

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

    def completion(self, cut: bool) -> Completion:
        return Completion(
            token_ids=tuple(self.token_ids),
            inference_logprobs=tuple(self.logprobs),
            finish_reason="length" if cut else self.last.finish_reason,
            policy_version=self.last.policy_version,
            environment_spans=tuple(self.spans),
            older=self.last.older,  # conversations of several turns are of one policy
            routing=self.last.routing,  # of the whole conversation: the last turn's prompt is all that was before it
        )


class _Answer(NamedTuple):
    """What the environment said to a sample: a reply, or the end and a grade."""

    index: int
    sample: int
    reply: Sequence[int]
    """Empty at the end."""
    cut: bool
    """A reply found no room."""
    grade: Grade


class Conversations:
    """The samples of one rollout.

    Every rank of a model copy holds all of them and gets the same turns; the leader asks the environment and
    tells the others what to read, so that all submit the same requests between the same two engine steps.
    """

    def __init__(
        self,
        grade: GradeFunction,
        settings: ConversationSettings | None,
        tokenizer: Tokenizer,
        groups: ParallelGroups,
        journal: StepJournal | None,
    ) -> None:
        """Without ``settings`` all samples are single answers; ``journal`` gets every group that is complete."""
        self._grade = grade
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

    def goes_on(self, request: Request) -> bool:
        """Whether the request is of an environment that replies."""
        return self._most_turns(request) > 1

    def take_up(self, request: Request) -> bool:
        """Take a finished group of an earlier start from the journal, and have graded again what has no grade.

        False where there is none, and of a conversation without a grade: nobody knows how it would have gone on.
        """
        group = self._journal.group_for(request) if self._journal is not None else None
        if group is None or (self.goes_on(request) and not group.is_graded):
            return False
        ungraded = []
        for sample, rollout in enumerate(group.rollouts):
            if rollout.grade.failed:
                ungraded.append(self._said(request, sample, rollout.completion))
            else:
                self._keep(request, sample, rollout.completion, rollout.grade)
        if ungraded:
            self._ask(ungraded)
        return True

    def add_turn(self, request: Request, completions: Sequence[Completion]) -> None:
        """A turn of some samples of a group: the whole group's first, or one sample's later one."""
        self._ask([self._said(request, s, turn) for s, turn in enumerate(completions, start=request.first_sample)])

    async def replies(self, idle: bool) -> list[Request]:
        """The next turns to generate; with ``idle``, waits a while for an answer. Collective in a model copy."""
        if not self.waiting:
            return []
        answers = await self._answers(idle) if self._groups.leads_model else []
        if self._groups.model_group.size() > 1:
            told = [(*a[:4], a.grade.reward, a.grade.code) for a in answers]
            told = broadcast_json(told, self._groups.model_leader(), self._groups.model_group)
            if not self._groups.leads_model:
                answers = [_Answer(*said, Grade(reward, code=code)) for *said, reward, code in told]
        self._waiting -= len(answers)
        return [request for answer in answers if (request := self._apply(answer)) is not None]

    async def cancel(self) -> None:
        """Ask no more; the last call."""
        for task in self._asked:
            task.cancel()
        await asyncio.gather(*self._asked, return_exceptions=True)

    def _most_turns(self, request: Request) -> int:
        return 1 if self._settings is None else self._settings.max_turns.get(request.source.environment, 1)

    def _said(self, request: Request, sample: int, turn: Completion) -> _Conversation:
        conversation = self._open.setdefault((request.index, sample), _Conversation(request, sample))
        conversation.add_turn(turn)
        return conversation

    def _ask(self, conversations: Sequence[_Conversation]) -> None:
        self._waiting += len(conversations)
        if self._groups.leads_model:
            self._asked.add(asyncio.create_task(self._judged(conversations)))

    async def _answers(self, idle: bool) -> list[_Answer]:
        if idle:
            await asyncio.wait(self._asked, timeout=_LOOK_AGAIN_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        done = [task for task in self._asked if task.done()]
        self._asked.difference_update(done)
        answers = [answer for task in done for answer in task.result()]
        return sorted(answers, key=lambda answer: (answer.index, answer.sample))

    async def _judged(self, conversations: Sequence[_Conversation]) -> list[_Answer]:
        """The environment's answers to the last turns of samples of one group."""
        request = conversations[0].request
        environment, task = request.source.environment, request.source.task
        if self.goes_on(request):
            items = [(task, c.state, self._turn(c)) for c in conversations]
        else:
            items = [(task, self._transcript(c)) for c in conversations]
        results = await self._grade(environment, items)
        return [self._answer(c, result) for c, result in zip(conversations, results, strict=True)]

    def _transcript(self, conversation: _Conversation, parser: str = "") -> Transcript:
        said = conversation.last
        return Transcript(self._tokenizer.decode(said.token_ids, parser), said.finish_reason, len(said.token_ids))

    def _turn(self, conversation: _Conversation) -> Turn:
        source, number = conversation.request.source, len(conversation.spans)
        calls = not isinstance(source.task.prompt, str) and self._tokenizer.chat_format(source.environment).tools
        parser = self._tokenizer.tool_call_parser(source.environment) if calls else ""
        said = vars(self._transcript(conversation, parser))
        return Turn(**said, number=number, last=self._speaks_last(conversation), tool_call_parser=parser)

    def _speaks_last(self, conversation: _Conversation) -> bool:
        # a reply has a token, and so has the turn after it
        full = conversation.length + 2 > self._settings.max_sequence_length
        return full or len(conversation.spans) + 1 >= self._most_turns(conversation.request)

    def _answer(self, conversation: _Conversation, result: Grade) -> _Answer:
        """The reply in tokens, if there is one, and room for it and for something to say after it."""
        index, sample, going_on = conversation.request.index, conversation.sample, result.continuation
        if going_on is None or self._speaks_last(conversation):
            return _Answer(index, sample, (), False, result)
        said = conversation.last.token_ids
        ended = bool(said) and said[-1] in self._tokenizer.end_token_ids
        reply, problem = [], "the reply has no tokens"
        try:
            source = conversation.request.source
            reply = self._tokenizer.encode_reply(source.task.prompt, going_on.messages, ended, source.environment)
        except EnvironmentFault as fault:
            problem = str(fault)
        if conversation.length + len(reply) >= self._settings.max_sequence_length:
            return _Answer(index, sample, (), True, result)
        if not reply:
            result = Grade(None, code="environment_exception", message=problem)
        conversation.state = going_on.state
        return _Answer(index, sample, reply, False, result)

    def _apply(self, answer: _Answer) -> Request | None:
        """The request for the next turn; None when the conversation is over."""
        key = (answer.index, answer.sample)
        conversation = self._open[key]
        request = conversation.request
        if not answer.reply:
            del self._open[key]
            grade = replace(answer.grade, continuation=None)
            self._keep(request, answer.sample, conversation.completion(answer.cut), grade)
            if self._journal is not None and request.index in self.finished:
                self._journal.add(request.index, self.finished[request.index])
            return None
        conversation.add_reply(answer.reply)
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

    def _keep(self, request: Request, sample: int, completion: Completion, grade: Grade) -> None:
        """A sample is complete, and perhaps its group."""
        group = self._rollouts.setdefault(request.index, {})
        group[sample] = Rollout(completion, self._tokenizer.decode(completion.token_ids), grade)
        if len(group) == request.num_samples:
            rollouts = tuple(group[number] for number in range(request.num_samples))
            self.finished[request.index] = RolloutGroup(request.source, request.prompt_ids, rollouts)
