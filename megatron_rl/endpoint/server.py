"""OpenAI's routes over HTTP, in a thread with an event loop of its own; what takes long is done in another
(`PendingCalls.aside`).

    GET  /health                       without a token
    GET  /v1/models, /v1/models/{model}
    POST /v1/chat/completions, /v1/completions
    ...  /sessions/{session}/v1/...    the same for a sample that is trained on
"""

from __future__ import annotations

import asyncio
import hmac
import threading
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

import uvloop
from aiohttp import web

from megatron_rl.endpoint.answers import Envelope
from megatron_rl.endpoint.fields import ApiError
from megatron_rl.endpoint.pending_calls import PendingCalls, Waiting, usage_of
from megatron_rl.endpoint.protocol import ChatRequest, TextRequest, read_chat, read_text
from megatron_rl.endpoint.streaming import Stream
from megatron_rl.errors import ConfigError, one_line
from megatron_rl.json_text import MAX_VALUES, check_bounds, loads

MAX_BODY_BYTES = 16 * 2**20
_SHUTDOWN_SECONDS = 1.0
"""For answers that are being written when the endpoint closes."""

T = TypeVar("T")
Wanted = TypeVar("Wanted", ChatRequest, TextRequest)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class HttpThread:
    """Serves a `PendingCalls` from `start` to `close`."""

    def __init__(self, pending: PendingCalls, token: str, host: str, port: int) -> None:
        self._pending, self._token, self._address = pending, token, (host, port)
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="endpoint", daemon=True)
        self._runner: web.AppRunner | None = None
        self.url = ""

    def start(self) -> None:
        """Listen; ``url`` is known afterwards.

        Raises:
            ConfigError: the address cannot be had.
        """
        self._thread.start()
        self.result(self._listen())

    def close(self) -> None:
        """Calls that wait get 503, and nothing listens afterwards. Safe to call again."""
        if not self._thread.is_alive():
            return
        self.result(self._stop())
        self._pending.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def call(self, do: Callable[..., None], *arguments: Any) -> None:
        """``do`` in the thread; in the order asked."""
        self._loop.call_soon_threadsafe(do, *arguments)

    def result(self, work: Coroutine[Any, Any, T]) -> T:
        """What ``work`` returns in the thread, after all that was asked of it before."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _listen(self) -> None:
        host, port = self._address
        self._runner = web.AppRunner(
            create_app(self._pending, self._token), access_log=None, shutdown_timeout=_SHUTDOWN_SECONDS,
            handler_cancellation=True,  # when the client hangs up
        )
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, host, port).start()
        except (OSError, OverflowError) as error:
            await self._runner.cleanup()
            raise ConfigError([f"cannot listen on {host}:{port} ({error}); give another host or port"]) from error
        self.url = f"http://{host}:{self._runner.addresses[0][1]}"

    async def _stop(self) -> None:
        self._pending.abort("the endpoint closes: no more answers are drawn")
        if self._runner is not None:
            await self._runner.cleanup()


def create_app(pending: PendingCalls, token: str) -> web.Application:
    """The routes; all but ``/health`` need ``token``."""
    app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[_telling_errors, _asking_for(token)])
    app.router.add_get("/health", _health)
    routes = Routes(pending)
    for prefix in ("/v1", "/sessions/{session}/v1"):
        app.router.add_get(f"{prefix}/models", routes.models)
        app.router.add_get(f"{prefix}/models/{{model}}", routes.model)
        app.router.add_post(f"{prefix}/chat/completions", routes.chat)
        app.router.add_post(f"{prefix}/completions", routes.completions)
    return app


class Routes:
    """What each route answers."""

    def __init__(self, pending: PendingCalls) -> None:
        self._pending = pending
        self._model = {
            "id": pending.limits.model, "object": "model", "created": 0, "owned_by": "megatron-rl",
            "max_model_len": pending.limits.max_sequence_length,
        }  # fmt: skip

    async def models(self, request: web.Request) -> web.Response:
        """Those there are."""
        return web.json_response({"object": "list", "data": [self._model]})

    async def model(self, request: web.Request) -> web.Response:
        """One by its name."""
        self._pending.check_model(request.match_info["model"])
        return web.json_response(self._model)

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """An answer to messages."""
        wanted = await self._pending.aside(_wanted, await request.read(), read_chat)
        return await self._answer(request, "chat.completion", wanted, self._pending.ask_chat)

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """Answers to prompts."""
        read = partial(read_text, vocab_size=self._pending.tokenizer.vocab_size)
        wanted = await self._pending.aside(_wanted, await request.read(), read)
        return await self._answer(request, "text_completion", wanted, self._pending.ask_text)

    async def _answer(
        self,
        request: web.Request,
        kind: str,
        wanted: Wanted,
        ask: Callable[[str | None, Wanted, Any], Awaitable[list[Waiting]]],
    ) -> web.StreamResponse:
        asked, aside = wanted.asked, self._pending.aside
        stream, envelope = Stream(asked.include_usage, aside) if asked.stream else None, Envelope(kind, asked.model)
        waiting = await ask(request.match_info.get("session"), wanted, stream and stream.show)
        decoder = self._pending.tokenizer if asked.logprobs else None
        try:
            if stream is not None:
                return await stream.write(request, envelope, waiting, asked.n, decoder)
            await asyncio.wait([each.answer for each in waiting])
        finally:
            self._pending.leave(waiting)
        choices = [each.answer.result() for each in waiting]
        # One by one: nobody is heard while JSON is made of a value.
        shown = [await aside(envelope.shown, index, choice, decoder) for index, choice in enumerate(choices)]
        version = choices[0].completion.policy_version
        text = envelope.whole(shown, usage_of(waiting, asked.n), version)
        return web.Response(text=text, content_type="application/json")


async def _health(request: web.Request) -> web.Response:
    return web.json_response({"status": "ok"})


def _wanted(data: bytes, read: Callable[[Any], Wanted]) -> Wanted:
    """The request in the bytes of a body; raises ApiError."""
    # Nobody is heard while JSON is read, and ten million empty lists take seconds.
    if sum(map(data.count, (b",", b"[", b"{"))) > MAX_VALUES:
        raise ApiError(413, "too_large", f"the body has more than {MAX_VALUES:,} commas and brackets; send less")
    try:
        body = loads(data)
        check_bounds(body)
    except ValueError as error:
        raise ApiError(400, "invalid_json", f"the body is not JSON: {one_line(str(error), 200)}") from error
    return read(body)


def _asking_for(token: str) -> Callable[[web.Request, Handler], Awaitable[web.StreamResponse]]:
    expected = f"Bearer {token}".encode()

    @web.middleware
    async def authenticate(request: web.Request, handler: Handler) -> web.StreamResponse:
        given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        if request.path != "/health" and not hmac.compare_digest(given, expected):
            raise ApiError(401, "invalid_api_key", "the token is missing or wrong: give it as the API key")
        return await handler(request)

    return authenticate


@web.middleware
async def _telling_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """All errors have OpenAI's form."""
    try:
        return await handler(request)
    except ApiError as error:
        told = error
    except web.HTTPRequestEntityTooLarge:
        told = ApiError(413, "too_large", f"the body has more than {MAX_BODY_BYTES // 2**20} MiB")
    except web.HTTPMethodNotAllowed as error:
        allowed = error.headers["Allow"]
        told = ApiError(405, "method_not_allowed", f"{request.method} is not for {request.path}; {allowed} is")
    except web.HTTPNotFound:
        told = ApiError(404, "not_found", f"there is no {request.path[:200]}; see /v1/models, /v1/chat/completions")
    return web.json_response(told.body, status=told.status)
