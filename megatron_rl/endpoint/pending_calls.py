"""What waits for answers: open sessions and calls.

All of it belongs to the HTTP thread, and what is in the sessions to a second one. Whatever reads texts runs there, job
by job in the order asked, so that no text keeps others from being heard. So there are no locks.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from megatron_rl.endpoint.answers import AnswerReader, Choice
from megatron_rl.endpoint.fields import ApiError, refuse
from megatron_rl.endpoint.protocol import Asked, ChatRequest, TextRequest
from megatron_rl.endpoint.sessions import Planned, Session, SessionEnd
from megatron_rl.errors import MegatronRLError, TextTooLong, one_line, shorten
from megatron_rl.tokenizer import Tokenizer
from megatron_rl.types import Completion, SamplingParams


@dataclass(frozen=True)
class Call:
    """One answer that is asked for: prompt ``P0 P1``, answered ``A0 E``, and then ``R0 R1`` goes on from it."""

    number: int
    """Unique in the endpoint."""
    session: str | None
    """None: nobody trains on it."""
    after: int | None
    """The call of the same session whose answer it goes on from; None: a root."""
    ids: tuple[int, ...]
    """Of a root the whole prompt, else what the model reads after that answer (``R0 R1``)."""
    branch: int
    """In a session which of the sample's sequences it draws; else the number of the choice. Each has its seeds."""
    max_new_tokens: int
    """There is room for so many."""
    stop: tuple[str, ...]
    """The caller's own, beside the run's."""
    sampling: SamplingParams | None
    """Where there is no session: the caller's, with ``max_new_tokens`` and ``stop``."""
    seed: int | None
    """The caller's, without a session."""
    wants_progress: bool
    """It is streamed: `Endpoint.progress` is wanted."""


Aside = Callable[..., Awaitable[Any]]
"""`PendingCalls.aside`."""
Shower = Callable[[int, tuple[int, ...]], None]
"""Takes the number of a choice and all its tokens so far."""


@dataclass(frozen=True)
class Limits:
    """What the endpoint can do."""

    model: str
    """Its name."""
    max_sequence_length: int
    max_new_tokens: int
    sampling: SamplingParams
    """What callers leave open."""


@dataclass(eq=False)
class Waiting:
    """A call whose client waits."""

    call: Call
    num_read: int
    """Tokens of the whole prompt."""
    reader: AnswerReader
    answer: asyncio.Future[Choice]
    show: Callable[[tuple[int, ...]], None] | None = None
    """Takes all tokens so far, where the client wants to see them."""


def usage_of(waiting: Sequence[Waiting], n: int) -> dict[str, Any]:
    """Tokens of prompts and answers, which all are there; ``n`` choices share a prompt, which counts once."""
    written = sum(len(each.answer.result().completion.token_ids) for each in waiting)
    read = sum(each.num_read for each in waiting[::n])
    cached = sum(each.answer.result().completion.cached_tokens for each in waiting[::n])
    return {
        "prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written,
        "prompt_tokens_details": {"cached_tokens": cached},
    }  # fmt: skip


class PendingCalls:
    """Sessions and calls, by id and number."""

    def __init__(
        self, tokenizer: Tokenizer, limits: Limits, put: Callable[[Call], None], drop: Callable[[int], None]
    ) -> None:
        """``put`` hands calls over to who answers them; ``drop`` says that one needs no answer."""
        self.tokenizer, self.limits = tokenizer, limits
        self._put, self._drop = put, drop
        self._sessions: dict[str, Session] = {}
        self._parsers: dict[str, str] = {}
        """Of calls of tools, by environment."""
        self.waiting: dict[int, Waiting] = {}
        self._numbers = itertools.count()
        self._aborted: ApiError | None = None
        self._reader = ThreadPoolExecutor(1, "endpoint-texts")

    def aside(self, do: Callable[..., Any], *arguments: Any) -> asyncio.Future[Any]:
        """What ``do`` returns in the thread for texts, after all that was asked of it before."""
        return asyncio.get_running_loop().run_in_executor(self._reader, do, *arguments)

    def close(self) -> None:
        """End that thread; the event loop must still run, and nobody asks any more."""
        self._reader.shutdown(cancel_futures=True)

    # -- sessions --------------------------------------------------------------------------------

    async def open_session(self, environment: str) -> str:
        """Its id."""
        session = secrets.token_urlsafe(12)
        self._sessions[session] = Session(environment, self.tokenizer)
        return session

    async def close_session(self, session: str) -> SessionEnd:
        """Calls of it that wait get 410."""
        self._fail(_over(), lambda waiting: waiting.call.session == session)
        return await self.aside(self._sessions.pop(session).end)

    # -- calls -----------------------------------------------------------------------------------

    def check_model(self, name: str) -> None:
        """404 for another than there is."""
        if name != self.limits.model:
            known = f"there is no model {shorten(name)}; here is {self.limits.model!r}"
            raise ApiError(404, "model_not_found", known, "model")

    async def ask_chat(self, session: str | None, request: ChatRequest, show: Shower | None) -> list[Waiting]:
        """The calls of ``request``, one a choice; ``show`` wants to see them meanwhile.

        Raises:
            ApiError: the session is over, the template refuses the messages, or there is no room for an answer.
        """
        among = self._session(session)
        parser = await self.aside(self._parser, among.environment) if request.tools else ""
        # No other call of its conversation has these ids, and they are the same in each run.
        prefix = f"call_{len(request.messages)}"
        reads = parser if request.reads_calls else ""
        reader = AnswerReader(self.tokenizer, request.asked.stop, reads, request.tools, prefix)
        plan = partial(among.begin_chat, messages=request.messages, tools=request.tools)
        return await self._ask(session, among, request.asked, [("messages", plan)], reader, show)

    async def ask_text(self, session: str | None, request: TextRequest, show: Shower | None) -> list[Waiting]:
        """The same for prompts: the choices of the first one first."""
        among, reader = self._session(session), AnswerReader(self.tokenizer, request.asked.stop)
        plans = [("prompt", partial(among.begin_text, prompt=prompt)) for prompt in request.prompts]
        return await self._ask(session, among, request.asked, plans, reader, show)

    async def _ask(
        self,
        session: str | None,
        among: Session,
        asked: Asked,
        plans: list[tuple[str, Callable[[Sequence[int]], list[Planned]]]],
        reader: AnswerReader,
        show: Shower | None,
    ) -> list[Waiting]:
        """All are planned before one is handed over: of a request that is refused nothing is answered."""
        self.check_model(asked.model)
        numbers: list[int] = []
        begun: list[Planned] = []
        with ExitStack() as refused:  # or hung up meanwhile
            refused.callback(lambda: self._reader.submit(among.forget, numbers))
            for param, plan in plans:
                new = list(itertools.islice(self._numbers, asked.n))
                numbers += new
                begun += await self._planned(partial(plan, new), param)
            if self._aborted is not None:
                raise self._aborted
            if session is not None and session not in self._sessions:
                raise _over()
            refused.pop_all()
        waiting = []
        for index, (number, planned) in enumerate(zip(numbers, begun, strict=True)):
            call = self._call(number, session, planned, asked, index % asked.n)
            answer = asyncio.get_running_loop().create_future()
            self.waiting[number] = Waiting(call, planned.num_read, reader, answer, show and partial(show, index))
            self._put(call)
            waiting.append(self.waiting[number])
        return waiting

    async def _planned(self, plan: Callable[[], list[Planned]], param: str) -> list[Planned]:
        try:
            planned = await self.aside(plan)
        except TextTooLong as error:
            raise _beyond(self.limits.max_sequence_length, str(error), param) from error
        except MegatronRLError as error:
            refuse(param, f"cannot be put to this model: {one_line(str(error))}")
        for each in planned:
            self._check_room(each, param)
        return planned

    def _parser(self, environment: str) -> str:
        """Which one reads calls in this model's answers; raises ApiError where tools are of no use to it."""
        if environment not in self._parsers:
            parser = self.tokenizer.tool_call_parser(environment)
            if not parser:
                refuse("tools", "are of no use: no parser knows how this model writes calls; see --rl-tool-call-parser")
            if self.tokenizer.ignores_tools(environment):
                refuse("tools", "are of no use: this model's chat template does not show them; see --chat-template")
            self._parsers[environment] = parser
        return self._parsers[environment]

    def _check_room(self, planned: Planned, param: str) -> None:
        if planned.num_read == 0:
            refuse(param, "is empty; give the model a word to go on from")
        if planned.num_read >= self.limits.max_sequence_length:
            raise _beyond(self.limits.max_sequence_length, str(planned.num_read), param)

    def _call(self, number: int, session: str | None, planned: Planned, asked: Asked, choice: int) -> Call:
        limits = self.limits
        room = limits.max_sequence_length - planned.num_read
        most = min(limits.max_new_tokens, room, asked.max_new_tokens or room)
        sampling = None if session is not None else sampling_of(asked, limits.sampling, most)
        return Call(
            number, session, planned.after, planned.ids, choice if session is None else planned.branch, most,
            asked.stop, sampling, asked.seed if session is None else None, asked.stream,
        )  # fmt: skip

    def _session(self, session: str | None) -> Session:
        """Without one the call is the only one of its own."""
        if session is None:
            return Session("", self.tokenizer)
        if session not in self._sessions:
            raise _over()
        return self._sessions[session]

    # -- answers ---------------------------------------------------------------------------------

    def deliver(self, number: int, completion: Completion) -> None:
        """Of a call that nobody waits for any more it is forgotten."""
        waiting = self.waiting.pop(number, None)
        if waiting is None:
            return
        session = None if waiting.call.session is None else self._sessions[waiting.call.session]
        self.aside(_read, waiting, session, completion).add_done_callback(partial(_settle, waiting.answer))

    def progress(self, number: int, token_ids: tuple[int, ...]) -> None:
        """All tokens of a call so far."""
        waiting = self.waiting.get(number)
        if waiting is not None and waiting.show is not None:
            waiting.show(token_ids)

    def leave(self, all_waiting: Sequence[Waiting]) -> None:
        """The client of these is gone: what is not answered is as if it had never been asked."""
        for waiting in all_waiting:
            if waiting.call.number in self.waiting:
                self._forget(waiting)

    def abort(self, why: str) -> None:
        """All calls that wait get 503."""
        self._aborted = ApiError(503, "no_rollout", why)
        self._fail(self._aborted, lambda waiting: True)

    def _fail(self, error: ApiError, concerned: Callable[[Waiting], bool]) -> None:
        for waiting in [waiting for waiting in self.waiting.values() if concerned(waiting)]:
            self._forget(waiting)
            waiting.answer.set_exception(error)
            waiting.answer.exception()  # one choice of several tells the client; asyncio would log the others

    def _forget(self, waiting: Waiting) -> None:
        number = waiting.call.number
        del self.waiting[number]
        self._drop(number)
        session = self._sessions.get(waiting.call.session or "")
        if session is not None:
            self._reader.submit(session.forget, [number])


def _read(waiting: Waiting, session: Session | None, completion: Completion) -> Choice:
    choice = waiting.reader.choice(completion)
    if session is not None:
        session.answered(waiting.call.number, choice.message, completion)
    return choice


def _settle(answer: asyncio.Future[Choice], read: asyncio.Future[Choice]) -> None:
    if read.cancelled():  # the endpoint has closed
        answer.cancel()
    elif (error := read.exception()) is not None:
        answer.set_exception(error)
    else:
        answer.set_result(read.result())


def sampling_of(asked: Asked, default: SamplingParams, max_new_tokens: int) -> SamplingParams:
    """What the caller asks for, and ``default`` where it leaves something open. Temperature 0 is greedy."""
    temperature = default.temperature if asked.temperature is None else asked.temperature
    return replace(
        default,
        temperature=temperature or 1.0,
        greedy=temperature == 0 or (asked.temperature is None and default.greedy),
        top_k=default.top_k if asked.top_k is None else asked.top_k,
        top_p=default.top_p if asked.top_p is None else asked.top_p,
        max_new_tokens=max_new_tokens,
        stop=tuple(dict.fromkeys((*default.stop, *asked.stop))),
    )


def _beyond(longest: int, has: str, param: str) -> ApiError:
    return ApiError(
        400, "context_length_exceeded",
        f"the maximum context length is {longest} tokens for prompt and answer, and the prompt has {has}; shorten it",
        param,
    )  # fmt: skip


def _over() -> ApiError:
    return ApiError(410, "session_over", "no such session is open: its sample has its reward, or it never began")
