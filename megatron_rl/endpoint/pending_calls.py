"""Open sessions, and the calls that wait for answers.

All of it belongs to the HTTP thread, but for the contents of sessions: they belong to the text thread, where everything
that reads texts runs, in the order asked, so that no long text keeps other clients waiting. So there are no locks.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from megatron_rl.endpoint.answers import AnswerReader, Choice
from megatron_rl.endpoint.asked import Call, Limits, sampling_of
from megatron_rl.endpoint.fields import ApiError, refuse
from megatron_rl.endpoint.metrics import Metrics
from megatron_rl.endpoint.options import Options
from megatron_rl.endpoint.protocol import ChatRequest, TextRequest
from megatron_rl.endpoint.sessions import PlannedCall, Session, SessionEnd, of_agents
from megatron_rl.endpoint.shaping import Shaping
from megatron_rl.environments.agents import MAIN, MOST, name_problem
from megatron_rl.errors import MegatronRLError, TextTooLong, one_line, shorten
from megatron_rl.tokenizer import Tokenizer
from megatron_rl.types import Completion

OnProgress = Callable[[int, tuple[int, ...]], None]
"""Takes the index of a choice and all its tokens so far."""


@dataclass(eq=False)
class PendingCall:
    """A call whose client waits."""

    call: Call
    session: Session
    prompt_ids: tuple[int, ...]
    """The whole prompt."""
    reader: AnswerReader
    answer: asyncio.Future[Choice]
    on_progress: Callable[[tuple[int, ...]], None] | None = None
    """Takes all tokens so far; of a stream."""


class PendingCalls:
    """Sessions by id, and calls by number."""

    def __init__(
        self, tokenizer: Tokenizer, limits: Limits, metrics: Metrics,
        put: Callable[[Call], None], drop: Callable[[int], None],
    ) -> None:  # fmt: skip
        """``put`` hands a call to the engine's thread; ``drop`` says that a call needs no answer."""
        self.tokenizer, self.limits, self.metrics = tokenizer, limits, metrics
        self._put, self._drop = put, drop
        self._sessions: dict[str, dict[str, Session]] = {}
        """The open ones by id: a sample's agents by name, of which ``main`` is always there."""
        self._parsers: dict[str, str] = {}
        """Of tool calls, by environment."""
        self._pending: dict[int, PendingCall] = {}
        self._numbers = itertools.count()
        self._aborted: ApiError | None = None
        self._shaping = Shaping(tokenizer, limits.fixed)
        self._text_thread = ThreadPoolExecutor(1, "endpoint-texts")

    def __len__(self) -> int:
        """Calls whose clients wait; may be asked from any thread."""
        return len(self._pending)

    def in_text_thread(self, do: Callable[..., Any], *arguments: Any) -> asyncio.Future[Any]:
        """Return the result of ``do`` in the text thread, after all that was asked of it before."""
        return asyncio.get_running_loop().run_in_executor(self._text_thread, do, *arguments)

    def close(self) -> None:
        """End the text thread; the event loop must still run, and nobody asks any more."""
        self._text_thread.shutdown(cancel_futures=True)

    # -- sessions --------------------------------------------------------------------------------

    async def open_session(self, environment: str) -> str:
        """Return the id of a new session."""
        session_id = secrets.token_urlsafe(12)
        self._sessions[session_id] = {MAIN: Session(environment, self.tokenizer, session_id)}
        return session_id

    async def close_session(self, session_id: str) -> SessionEnd:
        """Answer its pending calls with 410."""
        agents = self._sessions.pop(session_id)
        self._fail(_session_over(), [pending for pending in self._pending.values() if pending.session.id == session_id])
        return of_agents({name: await self.in_text_thread(session.end) for name, session in agents.items()})

    def session(self, address: str | None) -> Session:
        """Return an open one by its id, or by ``ID/AGENT``. A call without a session is the only one of its own.

        Raises:
            ApiError: it is not open, or has no place for an agent of that name.
        """
        if address is None:
            return Session("", self.tokenizer)
        session_id, _, agent = address.partition("/")
        agents = self._sessions.get(session_id)
        if agents is None:
            raise _session_over()
        if (agent or MAIN) not in agents:
            problem = name_problem(agent)
            if len(agents) == MOST:
                problem = problem or f"{agent!r} is one agent too many: a sample has up to {MOST}, main among them"
            if problem:
                raise ApiError(400, "invalid_value", problem, "agent")
            agents[agent] = agents[MAIN].of_agent(agent)
        return agents[agent or MAIN]

    # -- calls -----------------------------------------------------------------------------------

    def check_model(self, name: str) -> None:
        """Raise 404 for another model than there is."""
        if name != self.limits.model:
            known = f"there is no model {shorten(name)}; here is {self.limits.model!r}"
            raise ApiError(404, "model_not_found", known, "model")

    async def ask_chat(
        self, address: str | None, request: ChatRequest, on_progress: OnProgress | None
    ) -> list[PendingCall]:
        """Hand over the calls of ``request``, one a choice.

        Raises:
            ApiError: the session is over, the template refuses the messages, or there is no room for an answer.
        """
        session = self.session(address)
        parser = await self.in_text_thread(self._parser, session.environment) if request.tools else ""
        drawing = await self.in_text_thread(self._shaping.of_chat, request, parser, session.id is not None)
        # No other call of its conversation has these ids, and they are the same in each run.
        prefix, stop = f"call_{len(request.messages)}", request.options.drawing.stop
        # Within a grammar there is no thought.
        reasoning = "none" if drawing.constraints and drawing.constraints.grammar else self.limits.reasoning
        calls = parser if request.reads_calls else ""
        reading = partial(AnswerReader, self.tokenizer, stop, calls, request.tools, prefix, reasoning)
        asked = {"tools": request.tools, "template_kwargs": request.template_kwargs}
        plan = partial(session.begin_chat, messages=request.messages, **asked)
        options = replace(request.options, drawing=drawing)
        return await self._ask(session, options, "messages", [plan], reading, on_progress)

    async def ask_text(
        self, address: str | None, request: TextRequest, on_progress: OnProgress | None
    ) -> list[PendingCall]:
        """Hand over the calls of ``request``, the choices of the first prompt first; errors as of `ask_chat`."""
        session, options = self.session(address), request.options
        reading = partial(AnswerReader, self.tokenizer, options.drawing.stop)
        drawing = await self.in_text_thread(self._shaping.of_text, options, session.id is not None)
        plans = [partial(session.begin_text, prompt=prompt) for prompt in request.prompts]
        return await self._ask(session, replace(options, drawing=drawing), "prompt", plans, reading, on_progress)

    async def _ask(
        self, session: Session, options: Options, param: str, plans: list[Callable[[Sequence[int]], list[PlannedCall]]],
        reading: Callable[..., AnswerReader], on_progress: OnProgress | None,
    ) -> list[PendingCall]:  # fmt: skip
        """All are planned before one is handed over: of a request that is refused nothing is answered."""
        self._check_scores(session, options)
        numbers: list[int] = []
        planned: list[PlannedCall] = []
        try:
            for plan in plans:
                new = list(itertools.islice(self._numbers, options.n))
                numbers += new
                planned += await self._planned(partial(plan, new), param)
            if self._aborted is not None:
                raise self._aborted
            self.session(session.id)  # it may be over by now
        except BaseException:  # the request is refused, or its client has hung up
            self._text_thread.submit(session.forget, numbers)
            raise
        least = options.drawing.constraints.min_tokens if options.drawing.constraints else 0
        pending, reader = [], reading(prompt_ids=planned[0].prompt_ids, min_tokens=least)
        for index, (number, plan) in enumerate(zip(numbers, planned, strict=True)):
            call = self._call(number, session, plan, options, index % options.n)
            answer = asyncio.get_running_loop().create_future()
            report = on_progress and partial(on_progress, index)
            self._pending[number] = PendingCall(call, session, plan.prompt_ids, reader, answer, report)
            self._put(call)
            pending.append(self._pending[number])
        return pending

    async def _planned(self, plan: Callable[[], list[PlannedCall]], param: str) -> list[PlannedCall]:
        longest = self.limits.max_sequence_length
        with self.refusing(param):
            planned = await self.in_text_thread(plan)
        for each in planned:
            if each.num_prompt_tokens == 0:
                refuse(param, "is empty; give the model a word to go on from")
            if each.num_prompt_tokens >= longest:
                raise _too_long(longest, str(each.num_prompt_tokens), param)
        return planned

    @contextlib.contextmanager
    def refusing(self, param: str) -> Iterator[None]:
        """Refuse ``param`` where it cannot be encoded."""
        try:
            yield
        except TextTooLong as error:
            raise _too_long(self.limits.max_sequence_length, str(error), param) from error
        except MegatronRLError as error:
            refuse(param, f"cannot be put to this model: {one_line(str(error))}")

    def _parser(self, environment: str) -> str:
        """The parser of calls in this model's answers; refuses tools that are of no use to it."""
        if environment not in self._parsers:
            parser = self.tokenizer.tool_call_parser(environment)
            if not parser:
                refuse("tools", "are of no use: no parser knows how this model writes calls; see --rl-tool-call-parser")
            if self.tokenizer.ignores_tools(environment):
                refuse("tools", "are of no use: this model's chat template does not show them; see --chat-template")
            self._parsers[environment] = parser
        return self._parsers[environment]

    def _check_scores(self, session: Session, options: Options) -> None:
        """Refuse log-probs that nobody computes."""
        of_prompt = options.prompt_logprobs is not None
        if options.top_logprobs or of_prompt:
            why = self.limits.unscored if session.id is None else "a session keeps those of the sampled tokens alone"
            if why:
                name = "prompt_logprobs" if of_prompt else "top_logprobs"
                refuse(name, f"are not to be had: {why}; leave them out", "unsupported_parameter")

    def _call(self, number: int, session: Session, planned: PlannedCall, options: Options, choice: int) -> Call:
        drawing = options.drawing
        room = self.limits.max_sequence_length - planned.num_prompt_tokens
        max_new_tokens = min(self.limits.max_new_tokens, room, drawing.max_new_tokens or room)
        is_trained, scored = session.id is not None, options.prompt_logprobs is not None
        return Call(
            number, session.id, planned.after, planned.ids, planned.branch if is_trained else choice, max_new_tokens,
            drawing.stop, drawing.stop_token_ids,
            sampling=None if is_trained else sampling_of(drawing, self.limits.sampling, max_new_tokens),
            seed=None if is_trained else options.seed,
            hints={"top_logprobs": options.top_logprobs, "scores_prompt": scored, "streams": options.stream},
        )  # fmt: skip

    # -- answers ---------------------------------------------------------------------------------

    def deliver(self, number: int, completion: Completion) -> None:
        """Take the answer to a call; it is dropped where nobody waits any more."""
        if completion.finish_reason == "error":
            where, why = len(completion.token_ids), "its grammar allows no token there, or is too complex; simplify it"
            self.fail(number, ApiError(400, "invalid_value", f"the answer cannot go on after {where} tokens: {why}"))
            return
        pending = self._pending.pop(number, None)
        if pending is not None:
            self.metrics.count(len(pending.prompt_ids), completion)
            reading = self.in_text_thread(_read, pending, completion)
            reading.add_done_callback(partial(_settle, pending.answer))

    def fail(self, number: int, error: ApiError) -> None:
        """Take the error of a call that the engine cannot answer."""
        if number in self._pending:
            self._fail(error, [self._pending[number]])

    def is_streamed(self, number: int) -> bool:
        """Return whether `progress` of a call is wanted; may be asked from any thread."""
        pending = self._pending.get(number)
        return pending is not None and pending.on_progress is not None

    def progress(self, number: int, token_ids: tuple[int, ...]) -> None:
        """Take all tokens of a call so far."""
        if self.is_streamed(number):
            self._pending[number].on_progress(token_ids)

    def leave(self, all_pending: Sequence[PendingCall]) -> None:
        """Forget those without an answer: their client is gone, and it is as if they had never been asked."""
        for pending in all_pending:
            if pending.call.number in self._pending:
                self._forget(pending)

    def abort(self, why: str) -> None:
        """Answer all pending calls, and later ones, with 503."""
        self._aborted = ApiError(503, "no_rollout", why)
        self._fail(self._aborted, list(self._pending.values()))

    def _fail(self, error: ApiError, all_pending: Sequence[PendingCall]) -> None:
        for pending in all_pending:
            self._forget(pending)
            pending.answer.set_exception(error)
            pending.answer.exception()  # one choice of several tells the client; asyncio would log the others

    def _forget(self, pending: PendingCall) -> None:
        number = pending.call.number
        del self._pending[number]
        self._drop(number)
        self._text_thread.submit(pending.session.forget, [number])


def _read(pending: PendingCall, completion: Completion) -> Choice:
    choice = pending.reader.choice(completion)
    if pending.session.id is not None:
        pending.session.add_answer(pending.call.number, choice.message, completion, pending.call.stop)
    return choice


def _settle(answer: asyncio.Future[Choice], reading: asyncio.Future[Choice]) -> None:
    if reading.cancelled():  # the endpoint has closed
        answer.cancel()
    elif (error := reading.exception()) is not None:
        answer.set_exception(error)
    else:
        answer.set_result(reading.result())


def _too_long(longest: int, has: str, param: str) -> ApiError:
    why = f"the maximum context length is {longest} tokens for prompt and answer, and the prompt has {has}; shorten it"
    return ApiError(400, "context_length_exceeded", why, param)


def _session_over() -> ApiError:
    return ApiError(410, "session_over", "no such session is open: its sample has its reward, or it never began")
