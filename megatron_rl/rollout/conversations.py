"""From completions to graded groups: most samples are one answer, conversations have several turns.

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
from megatron_rl.inference.engine import Engine
from megatron_rl.platform.collectives import broadcast_json
from megatron_rl.platform.groups import ParallelGroups
from megatron_rl.rollout.journal import FinishedGroups
from megatron_rl.rollout.trace import divided, extended
from megatron_rl.tokenizer import Tokenizer
from megatron_rl.types import Completion, Grade, Item, Place, Request, Rollout, Talk, Task, Transcript, Turn

GradeFunction = Callable[[str, Sequence[Item]], Awaitable[Sequence[Grade]]]
"""(environment, samples or turns of a group) -> one grade each; never raises for a bad sample."""
GroupGradeFunction = Callable[[Task, Sequence[Transcript]], Awaitable[Sequence[Grade]]]
"""(task, all answers of a group) -> one grade each."""


@dataclass(frozen=True)
class ConversationSettings:
    """Settings of conversations."""

    max_turns: Mapping[str, int]
    """For each environment; one that is not named has single answers."""
    max_sequence_length: int
    """Tokens of a whole conversation, its prompt included."""
    by_group: Mapping[str, GroupGradeFunction] = field(default_factory=dict)
    """Graders of the environments that grade all answers of a group together."""


@dataclass
class _Conversation:
    """One sample whose environment has to answer."""

    request: Request
    sample: int
    said: Completion
    """All turns so far; of a single answer that is all."""
    last: Completion
    """The last turn alone."""
    turns: int = 1
    state: Any = None
    reply: Sequence[int] = ()
    """What the model reads before its next turn."""
    earned: list[float] = field(default_factory=list)
    """Rewards of its turns; the leader of a model copy knows them, and the state."""

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Prompt and turns."""
        return self.request.prompt_ids + self.said.token_ids

    def add_turn(self, turn: Completion) -> None:
        self.said, self.last = extended(self.said, self.reply, turn), turn
        self.turns += 1

    def total(self, end: Grade) -> tuple[Grade, tuple[float, ...]]:
        """Return the grade of the whole conversation, and the rewards of its turns if any had its own."""
        if end.failed or not any(self.earned):
            return end, ()
        by_turn = (*self.earned[:-1], self.earned[-1] + end.reward)
        return replace(end, reward=end.reward + sum(self.earned)), by_turn


class Answer(NamedTuple):
    """The environment's answer to a sample: a reply, or the end and a grade."""

    index: int
    sample: int
    reply: Sequence[int]
    """Empty at the end."""
    cut: bool
    """A reply found no room."""
    turn_rewards: Sequence[float]
    """See `Completion.turn_rewards`; with a reply that of the turn alone."""
    state: Any
    """With a reply, for the next turn, where all ranks are to know it."""
    grade: Grade


def to_row(answer: tuple) -> tuple:
    """Return JSON values of an answer that ends with a grade: what all ranks of a model copy need of it."""
    *fields, grade = answer
    return (*fields, grade.reward, grade.correct, grade.code, dict(grade.agent_rewards))


def from_row(row: Sequence[Any]) -> tuple:
    """Return the fields of the answer that `to_row` was given."""
    *fields, reward, correct, code, agent_rewards = row
    return (*fields, Grade(reward, correct=correct, code=code, agent_rewards=agent_rewards))


class Conversations:
    """The samples of one rollout.

    Every rank of a model copy holds all of them and gets the same turns; the leader asks the environment and
    tells the others what to read, so that all submit the same requests between the same two engine steps.
    """

    def __init__(
        self,
        grade: GradeFunction,
        settings: ConversationSettings,
        tokenizer: Tokenizer,
        groups: ParallelGroups,
        finished: FinishedGroups,
        in_rounds: bool = False,
    ) -> None:
        """``finished`` gets every sample that is graded.

        ``in_rounds``: answers are taken once all are there, so that no clock decides what is submitted first.
        """
        self._grade = grade
        self._settings = settings
        self._tokenizer = tokenizer
        self._groups = groups
        self._finished = finished
        self._in_rounds = in_rounds
        self._open: dict[tuple[int, int], _Conversation] = {}
        self.asked: set[asyncio.Task[list[Answer]]] = set()
        """Whose ends are answers; of the leader."""
        self._waiting = 0  # samples whose answer is due; the same number on every rank of the model copy

    @property
    def waiting(self) -> bool:
        """True while an environment's answer is due."""
        return self._waiting > 0

    def goes_on(self, request: Request) -> bool:
        """Return whether the request is of an environment that replies."""
        return self._most_turns(request) > 1

    def take_up(self, request: Request, of_harness: bool) -> bool:
        """Take a finished group of an earlier start from the journal, and have graded again what has no grade.

        False where there is none, and of a conversation or harness without a grade: nobody knows how it would have gone
        on.
        """
        group = self._finished.journal.group_for(request)
        if group is None or ((of_harness or self.goes_on(request)) and not group.is_graded):
            return False
        ungraded = []
        whole = request.source.environment in self._settings.by_group and not group.is_graded
        for sample, rollout in enumerate(group.rollouts):
            if whole or rollout.grade.failed:
                ungraded.append(self._said(request, sample, rollout.completion))
            else:
                self._finished.keep(request, sample, rollout, is_new=False)
        if ungraded:
            self._ask(ungraded)
        return True

    def add_turn(self, request: Request, completions: Sequence[Completion]) -> None:
        """Have a turn judged: the first one of a whole group, or a later one of one sample.

        A group that has waited with its grades keeps them.
        """
        if request.talks:
            self._keep_graded(request)
            return
        turns = enumerate(completions, start=request.place.first_sample)
        self._ask([self._said(request, sample, turn) for sample, turn in turns])

    def submit_turns(self, engine: Engine) -> None:
        """Give the ``engine`` the turns that go on from replies; collective in a model copy."""
        if not self.waiting:
            return
        answers = self._answers() if self._groups.leads_model else []
        if self._groups.model_group.size() > 1:
            rows = list(map(to_row, answers))
            rows = broadcast_json(rows, self._groups.model_leader(), self._groups.model_group)
            if not self._groups.leads_model:
                answers = [Answer(*from_row(row)) for row in rows]
        self._waiting -= len(answers)
        for answer in answers:
            if answer.reply:
                conversation = self._open[answer.index, answer.sample]
                conversation.reply = answer.reply
                if not self._groups.leads_model:
                    conversation.state = answer.state
                    conversation.earned += answer.turn_rewards
                engine.submit(self._next_turn(conversation))
            else:
                self._end(answer)

    def resume(self, request: Request, engine: Engine) -> None:
        """Go on with the conversations of a group that an earlier step has left behind their first turns."""
        self._keep_graded(request)
        asked = replace(request, so_far=(), talks=())
        for sample, (said, talk) in enumerate(zip(request.so_far, request.talks, strict=True)):
            if talk.ended is not None:
                continue
            before, reply, turn = divided(said)
            conversation = _Conversation(
                asked, sample, before, before, before.num_turns, talk.state, reply, list(talk.earned)
            )
            self._open[asked.index, sample] = conversation
            asked_now = self._next_turn(conversation)
            if turn.finish_reason is None:
                engine.submit(replace(asked_now, so_far=(turn,)))
            else:  # stopping the engine completed it, and nobody has judged it
                self.add_turn(asked_now, (turn,))

    def _keep_graded(self, request: Request) -> None:
        asked = replace(request, so_far=(), talks=())
        for sample, talk in enumerate(request.talks):
            if talk.ended is not None:
                self._finished.keep(asked, sample, talk.ended)

    def pause(self, unfinished: Sequence[Request]) -> list[Request]:
        """Return what is to go on in the next step, one request a group, of what the engine gave back.

        No answer may be due.
        """
        turns = {(r.index, r.place.first_sample): r.so_far[0] for r in unfinished if r.place.turn}
        begun = {index: conversation.request for (index, _), conversation in self._open.items()}
        paused = [self._paused(request, turns) for _, request in sorted(begun.items())]
        return [request for request in unfinished if not request.place.turn] + paused

    def _paused(self, request: Request, turns: Mapping[tuple[int, int], Completion]) -> Request:
        ended, samples = self._finished.give_back(request.index), []
        for sample in range(request.num_samples):
            if sample in ended:
                samples.append((ended[sample].completion, Talk(ended=ended[sample])))
                continue
            conversation = self._open.pop((request.index, sample))
            said = extended(conversation.said, conversation.reply, turns[request.index, sample])
            samples.append((said, Talk(conversation.state, tuple(conversation.earned))))
        so_far, talks = zip(*samples, strict=True)
        return replace(request, so_far=so_far, talks=talks)

    def _most_turns(self, request: Request) -> int:
        return self._settings.max_turns.get(request.source.environment, 1)

    def _said(self, request: Request, sample: int, turn: Completion) -> _Conversation:
        conversation = self._open.get((request.index, sample))
        if conversation is None:
            asked = replace(request, so_far=())  # of later turns nothing is drawn yet
            conversation = self._open[request.index, sample] = _Conversation(asked, sample, turn, turn)
        else:
            conversation.add_turn(turn)
        return conversation

    def _ask(self, conversations: Sequence[_Conversation]) -> None:
        self._waiting += len(conversations)
        if self._groups.leads_model:
            self.asked.add(asyncio.create_task(self._judged(conversations)))

    def _answers(self) -> list[Answer]:
        if self._in_rounds and not all(task.done() for task in self.asked):
            return []
        done = [task for task in self.asked if task.done()]
        self.asked.difference_update(done)
        return sorted((answer for task in done for answer in task.result()), key=lambda answer: answer[:2])

    async def _judged(self, conversations: Sequence[_Conversation]) -> list[Answer]:
        """Ask the environment about the last turns of samples of one group."""
        request = conversations[0].request
        environment, task = request.source.environment, request.source.task
        if not self.goes_on(request):
            answers = [self._transcript(conversation.said) for conversation in conversations]
            if grade_group := self._settings.by_group.get(environment):
                grades = await grade_group(task, answers)
            else:
                grades = await self._grade(environment, [(task, answer) for answer in answers])
            return [self._last_answer(*ended) for ended in zip(conversations, grades, strict=True)]
        items = [(task, c.state, self._turn(c)) for c in conversations]
        results = zip(conversations, await self._grade(environment, items), strict=True)
        return [self._answer(conversation, result) for conversation, result in results]

    def _transcript(self, said: Completion, parser: str = "") -> Transcript:
        return Transcript(self._tokenizer.decode(said.token_ids, parser), said.finish_reason, len(said.token_ids))

    def _turn(self, conversation: _Conversation) -> Turn:
        source = conversation.request.source
        calls = not isinstance(source.task.prompt, str) and self._tokenizer.chat_format(source.environment).tools
        parser = self._tokenizer.tool_call_parser(source.environment) if calls else ""
        return Turn(
            **vars(self._transcript(conversation.last, parser)),
            number=conversation.turns - 1,
            last=self._speaks_last(conversation),
            tool_call_parser=parser,
        )

    def _speaks_last(self, conversation: _Conversation) -> bool:
        # a reply has a token, and so has the turn after it
        full = len(conversation.token_ids) + 2 > self._settings.max_sequence_length
        return full or conversation.turns >= self._most_turns(conversation.request)

    def _answer(self, conversation: _Conversation, result: Grade) -> Answer:
        """Encode the reply, if there is one, and room for it and for something to say after it."""
        going_on = result.continuation
        conversation.earned.append(result.turn_reward)
        if going_on is None or self._speaks_last(conversation):
            return self._last_answer(conversation, result)
        said, source = conversation.last.token_ids, conversation.request.source
        ended = bool(said) and said[-1] in self._tokenizer.end_token_ids
        reply, problem = [], "the reply has no tokens"
        try:
            reply = self._tokenizer.encode_reply(source.task.prompt, going_on.messages, ended, source.environment)
        except EnvironmentFault as fault:
            problem = str(fault)
        if len(conversation.token_ids) + len(reply) >= self._settings.max_sequence_length:
            return self._last_answer(conversation, result, is_cut=True)
        if not reply:
            return self._last_answer(conversation, Grade(None, code="environment_exception", message=problem))
        conversation.state = going_on.state
        place, state = (conversation.request.index, conversation.sample), going_on.state if self._in_rounds else None
        return Answer(*place, reply, False, (result.turn_reward,), state, result)

    @staticmethod
    def _last_answer(conversation: _Conversation, result: Grade, is_cut: bool = False) -> Answer:
        grade, by_turn = conversation.total(replace(result, continuation=None, turn_reward=0.0))
        return Answer(conversation.request.index, conversation.sample, (), is_cut, by_turn, None, grade)

    def _end(self, answer: Answer) -> None:
        conversation = self._open.pop((answer.index, answer.sample))
        said = replace(conversation.said, turn_rewards=tuple(answer.turn_rewards))
        said = replace(said, finish_reason="length") if answer.cut else said
        self._finished.keep(conversation.request, answer.sample, Rollout(said, "", answer.grade))

    def _next_turn(self, conversation: _Conversation) -> Request:
        request = conversation.request
        prompt_ids = (*conversation.token_ids, *conversation.reply)
        room = self._settings.max_sequence_length - len(prompt_ids)
        return replace(
            request,
            prompt_ids=prompt_ids,
            num_samples=1,
            place=Place(conversation.sample, conversation.turns),
            sampling=replace(request.sampling, max_new_tokens=min(request.sampling.max_new_tokens, room)),
        )
