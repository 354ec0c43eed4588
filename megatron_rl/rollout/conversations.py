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
from megatron_rl.platform.collectives import broadcast_json
from megatron_rl.platform.groups import ParallelGroups
from megatron_rl.rollout.journal import FinishedGroups
from megatron_rl.rollout.trace import Trace
from megatron_rl.tokenizer import Tokenizer
from megatron_rl.types import Completion, Grade, Item, Request, Rollout, Transcript, Turn

GradeFunction = Callable[[str, Sequence[Item]], Awaitable[Sequence[Grade]]]
"""(environment, samples or turns of a group) -> one grade each; never raises for a bad sample."""

@dataclass(frozen=True)
class ConversationSettings:
    """How conversations are led."""

    max_turns: Mapping[str, int]
    """For each environment; one that is not named has single answers."""
    max_sequence_length: int
    """Tokens of a whole conversation, its prompt included."""


@dataclass
class _Conversation:
    """One sample."""

    request: Request
    sample: int
    trace: Trace = field(default_factory=Trace)
    turns: int = 0
    """The model's, answered."""
    state: Any = None
    last: Completion | None = None

    def __post_init__(self) -> None:
        self.trace.begin(0, None, self.request.prompt_ids)

    @property
    def length(self) -> int:
        return self.trace.length(self.turns - 1)

    def add_turn(self, turn: Completion) -> None:
        self.trace.answer(self.turns, turn)
        self.turns += 1
        self.last = turn

    def add_reply(self, reply: Sequence[int]) -> tuple[int, ...]:
        """The prompt of the next turn."""
        return self.trace.begin(self.turns, self.turns - 1, reply)

    def rollout(self, cut: bool, grade: Grade) -> Rollout:
        completion = self.trace.sequences()[0].completion
        return Rollout(replace(completion, finish_reason="length") if cut else completion, "", grade)


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
        finished: FinishedGroups,
    ) -> None:
        """Without ``settings`` all samples are single answers; ``finished`` gets every sample that is graded."""
        self._grade = grade
        self._settings = settings
        self._tokenizer = tokenizer
        self._groups = groups
        self._finished = finished
        self._open: dict[tuple[int, int], _Conversation] = {}
        self.asked: set[asyncio.Task[list[_Answer]]] = set()
        """Whose ends are answers; of the leader."""
        self._waiting = 0  # samples whose answer is due; the same number on every rank of the model copy

    @property
    def waiting(self) -> bool:
        """True while an environment's answer is due."""
        return self._waiting > 0

    def goes_on(self, request: Request) -> bool:
        """Whether the request is of an environment that replies."""
        return self._most_turns(request) > 1

    def take_up(self, request: Request, of_harness: bool) -> bool:
        """Take a finished group of an earlier start from the journal, and have graded again what has no grade.

        False where there is none, and of a conversation or harness without a grade: nobody knows how it would have gone
        on.
        """
        group = self._finished.known(request)
        if group is None or ((of_harness or self.goes_on(request)) and not group.is_graded):
            return False
        ungraded = []
        for sample, rollout in enumerate(group.rollouts):
            if rollout.grade.failed:
                ungraded.append(self._said(request, sample, rollout.completion))
            else:
                self._finished.keep(request, sample, rollout, is_new=False)
        if ungraded:
            self._ask(ungraded)
        return True

    def add_turn(self, request: Request, completions: Sequence[Completion]) -> None:
        """A turn of some samples of a group: the whole group's first, or one sample's later one."""
        self._ask([self._said(request, s, turn) for s, turn in enumerate(completions, start=request.first_sample)])

    def replies(self) -> list[Request]:
        """The next turns to generate. Collective in a model copy."""
        if not self.waiting:
            return []
        answers = self._answers() if self._groups.leads_model else []
        if self._groups.model_group.size() > 1:
            told = [(*a[:4], a.grade.reward, a.grade.correct, a.grade.code) for a in answers]
            told = broadcast_json(told, self._groups.model_leader(), self._groups.model_group)
            if not self._groups.leads_model:
                answers = [_Answer(*said, Grade(r, correct=right, code=code)) for *said, r, right, code in told]
        self._waiting -= len(answers)
        return [request for answer in answers if (request := self._apply(answer)) is not None]

    def _most_turns(self, request: Request) -> int:
        return 1 if self._settings is None else self._settings.max_turns.get(request.source.environment, 1)

    def _said(self, request: Request, sample: int, turn: Completion) -> _Conversation:
        conversation = self._open.setdefault((request.index, sample), _Conversation(request, sample))
        conversation.add_turn(turn)
        return conversation

    def _ask(self, conversations: Sequence[_Conversation]) -> None:
        self._waiting += len(conversations)
        if self._groups.leads_model:
            self.asked.add(asyncio.create_task(self._judged(conversations)))

    def _answers(self) -> list[_Answer]:
        done = [task for task in self.asked if task.done()]
        self.asked.difference_update(done)
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
        source, number = conversation.request.source, conversation.turns - 1
        calls = not isinstance(source.task.prompt, str) and self._tokenizer.chat_format(source.environment).tools
        parser = self._tokenizer.tool_call_parser(source.environment) if calls else ""
        said = vars(self._transcript(conversation, parser))
        return Turn(**said, number=number, last=self._speaks_last(conversation), tool_call_parser=parser)

    def _speaks_last(self, conversation: _Conversation) -> bool:
        # a reply has a token, and so has the turn after it
        full = conversation.length + 2 > self._settings.max_sequence_length
        return full or conversation.turns >= self._most_turns(conversation.request)

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
            self._finished.keep(request, answer.sample, conversation.rollout(answer.cut, grade))
            return None
        prompt_ids = conversation.add_reply(answer.reply)
        room = self._settings.max_sequence_length - len(prompt_ids)
        return replace(
            request,
            prompt_ids=prompt_ids,
            num_samples=1,
            first_sample=answer.sample,
            turn=conversation.turns,
            sampling=replace(request.sampling, max_new_tokens=min(request.sampling.max_new_tokens, room)),
        )
