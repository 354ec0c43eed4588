"""The seam between the HTTP thread and the thread that steps the engine.

    HTTP thread                                    engine's thread, between two steps
    request ──► PendingCalls: session, new ids ──► Call ──► take() ──► Request ──► Engine.submit
    answer  ◄── PendingCalls: text, calls, log-probs ◄── deliver(number, completion) ◄── Engine.step
    stream  ◄── text so far ◄── progress(number, ids) ◄── show(engine): Engine.unfinished_tokens
    hung up ──► PendingCalls ──► take_cancelled() ──► Engine.cancel
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from megatron_rl.endpoint.asked import Call as Call
from megatron_rl.endpoint.asked import Limits
from megatron_rl.endpoint.fields import ApiError
from megatron_rl.endpoint.metrics import Metrics
from megatron_rl.endpoint.pending_calls import PendingCalls
from megatron_rl.endpoint.server import HttpThread
from megatron_rl.endpoint.sessions import SessionEnd
from megatron_rl.errors import MegatronRLError, one_line
from megatron_rl.inference.engine import Engine, EngineLoad
from megatron_rl.inference.sampler import fingerprint
from megatron_rl.platform.device import is_out_of_memory
from megatron_rl.tokenizer import Tokenizer
from megatron_rl.types import Completion, Constraints, Hints, Place, Request, SamplingParams, SourcedTask, Task

logger = logging.getLogger(__name__)

POLICY = "policy"


class Endpoint:
    """An OpenAI-compatible endpoint; its methods are for the thread of the engine that answers its calls."""

    def __init__(
        self, tokenizer: Tokenizer, *, max_sequence_length: int, max_new_tokens: int,
        sampling: SamplingParams | None = None, model: str = POLICY, host: str = "127.0.0.1", port: int = 0,
        token: str | None = None, fixed: str = "", unscored: str = "", reasoning: str = "none",
    ) -> None:  # fmt: skip
        """Nothing listens before `start`.

        Args:
            max_new_tokens: of an answer, whatever its caller asks for.
            sampling: what callers outside sessions leave open.
            model: its name.
            port: 0 is any that is free.
            token: what callers must send; None makes one.
            fixed: why the engine draws from the model's own distribution alone; empty where it need not.
            unscored: why it knows the log-probs of drawn tokens alone; empty where it knows those of others.
            reasoning: the parser of thoughts.
        """
        self.token = token or secrets.token_urlsafe(32)
        sizes, said = (max_sequence_length, max_new_tokens), (fixed, unscored, reasoning)
        limits = Limits(model, *sizes, sampling or SamplingParams(), *said)
        tokenizer = tokenizer.reading_at_most(max_sequence_length)
        self._pending = PendingCalls(tokenizer, limits, Metrics(model, self._load), self._put, self._drop)
        self._http = HttpThread(self._pending, self.token, host, port)
        self._condition = threading.Condition()
        """Guards the three below, which the HTTP thread fills."""
        self._calls: list[Call] = []
        self._cancelled: list[int] = []
        self._wakers: set[Callable[[], object]] = set()
        self._engine: Engine | None = None
        """The one whose progress was shown."""

    def start(self) -> None:
        """Listen.

        Raises:
            ConfigError: the address cannot be had.
        """
        self._http.start()

    def close(self) -> None:
        """Answer pending calls with 503; nothing listens afterwards."""
        self._http.close()

    @property
    def url(self) -> str:
        """``http://127.0.0.1:PORT``, of an endpoint that was started."""
        return self._http.url

    def base_url(self, session: str | None = None) -> str:
        """Return what an OpenAI client is given."""
        return f"{self.url}/sessions/{session}/v1" if session else f"{self.url}/v1"

    # -- sessions --------------------------------------------------------------------------------

    def open_session(self, environment: str) -> str:
        """Return the id of a session for a sample of ``environment``, see `base_url`."""
        return self._http.result(self._pending.open_session(environment))

    def close_session(self, session: str) -> SessionEnd:
        """End the session of a sample that has its reward: its pending calls, and later ones, get 410."""
        return self._http.result(self._pending.close_session(session))

    # -- calls -----------------------------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        """Calls without an answer whose clients wait, taken or not."""
        return len(self._pending)

    def take(self) -> list[Call]:
        """Return the calls that came since it was asked last; never waits."""
        with self._condition:
            calls, self._calls = self._calls, []
            return calls

    def take_cancelled(self) -> list[int]:
        """Return the numbers of calls, taken before, that nobody waits for any more; each once. Answer none of them."""
        with self._condition:
            cancelled, self._cancelled = self._cancelled, []
            return cancelled

    def wait_blocking(self, timeout: float) -> None:
        """Wait until there is a call, for ``timeout`` seconds at most."""
        with self._condition:
            if not self._calls:
                self._condition.wait(timeout)

    async def wait(self, timeout: float) -> None:
        """Wait as `answer` does, in a thread with an event loop."""
        came = asyncio.Event()
        wake = partial(asyncio.get_running_loop().call_soon_threadsafe, came.set)
        with self._condition:
            if self._calls:
                return
            self._wakers.add(wake)
        try:
            await asyncio.wait_for(came.wait(), timeout)
        except TimeoutError:
            pass
        finally:
            with self._condition:
                self._wakers.discard(wake)

    def _put(self, call: Call) -> None:
        """Hand a call over and wake who waits; of the HTTP thread."""
        with self._condition:
            self._calls.append(call)
            self._condition.notify_all()
            for wake in self._wakers:
                wake()

    def _drop(self, number: int) -> None:
        """Take back a call that nobody waits for, or cancel it where it was taken; of the HTTP thread."""
        with self._condition:
            others = [call for call in self._calls if call.number != number]
            if len(others) == len(self._calls):
                self._cancelled.append(number)
            self._calls = others

    def _load(self) -> EngineLoad | None:
        """What the engine has to do, and calls that it has not got yet; of the HTTP thread."""
        load, waiting = self._engine and self._engine.load(), len(self._calls)
        return load and load._replace(waiting=load.waiting + waiting)

    # -- answers ---------------------------------------------------------------------------------

    def deliver(self, number: int, completion: Completion) -> None:
        """Answer a call; nobody may wait for it any more."""
        self._http.call(self._pending.deliver, number, completion)

    def fail(self, number: int, error: Exception) -> None:
        """Answer a call with the error of its submission."""
        is_known = isinstance(error, MegatronRLError)
        if not is_known:
            logger.error("a call of the endpoint cannot be submitted", exc_info=error)
        status, code = (400, "invalid_value") if is_known else (500, "internal_error")
        self._http.call(self._pending.fail, number, ApiError(status, code, one_line(str(error))))

    def progress(self, number: int, token_ids: Sequence[int]) -> None:
        """Report all tokens so far of a call."""
        self._http.call(self._pending.progress, number, tuple(token_ids))

    def show(self, engine: Engine) -> None:
        """Report the progress of all calls that are streamed; reads the device for those alone."""
        self._engine = engine
        streams = engine.unfinished_tokens(lambda request: self._pending.is_streamed(request.place.call))
        for request, token_ids in streams:
            self.progress(request.place.call, token_ids)


@contextlib.contextmanager
def failing_alone(endpoint: Endpoint | None, number: int) -> Iterator[None]:
    """Turn an error in submitting a call into the answer of that call; the leader's ``endpoint`` sends it.

    The ranks of a model copy submit the same, so all of them fail; not where one of them is out of memory.
    """
    try:
        yield
    except Exception as error:
        if is_out_of_memory(error):
            raise
        if endpoint is not None:
            endpoint.fail(number, error)


def outside_sessions(call: Call, seed: str) -> dict[str, Any]:
    """Return a call outside sessions as JSON for `request_of` on all ranks, with ``seed`` where its caller has none.

    Nobody trains on its answer, and its caller says how it is sampled.
    """
    return {
        "number": call.number, "ids": call.ids, "sampling": asdict(call.sampling), "choice": call.branch,
        "hints": call.hints, "seed": seed if call.seed is None else f"seed {call.seed}",
    }  # fmt: skip


def request_of(
    number: int, ids: Sequence[int], sampling: dict[str, Any], seed: str, choice: int, hints: dict[str, Any]
) -> Request:
    """Return what the engine is asked for."""
    source = SourcedTask("endpoint", Task(f"{seed} {fingerprint(ids)}", ""), prompt_ids=tuple(ids))
    constraints = sampling["constraints"]
    if constraints is not None:
        constraints = Constraints(**constraints | {"logit_bias": tuple(map(tuple, constraints["logit_bias"]))})
    ends = {name: tuple(sampling[name]) for name in ("stop", "stop_token_ids")}
    params = SamplingParams(**sampling | ends | {"constraints": constraints})
    place = Place(call=number, branch=choice)
    return Request(source, tuple(ids), 1, params, place=place, hints=Hints(goes_on=True, **hints))
