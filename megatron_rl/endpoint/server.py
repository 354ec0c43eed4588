"""OpenAI's routes over HTTP, in a thread with an event loop of its own; what takes long is done in the text thread.

    GET  /health                       without a token
    GET  /v1/models, /v1/models/{model}
    POST /v1/chat/completions, /v1/completions
    POST /v1/messages, /v1/messages/count_tokens, as Anthropic has them, and OpenAI's /v1/responses
    POST /tokenize, /detokenize        and GET /version, /metrics, as vLLM has them
    ...  /sessions/{session}/...       the same for a sample that is trained on
    ...  /sessions/{session}/agents/{agent}/...    the same for one agent of the sample
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import threading
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

import uvloop
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from megatron_rl.endpoint.dialects import BlockWriter, anthropic_messages, openai_responses, renaming
from megatron_rl.endpoint.dialects.anthropic_messages import MessagesWriter, read_messages
from megatron_rl.endpoint.dialects.openai_responses import ResponsesWriter, read_responses
from megatron_rl.endpoint.fields import ApiError, parsed
from megatron_rl.endpoint.pending_calls import PendingCall, PendingCalls
from megatron_rl.endpoint.protocol import ChatRequest, TextRequest, read_chat, read_text
from megatron_rl.endpoint.responses import Envelope, Stream, usage_of
from megatron_rl.endpoint.tokens import TokenRoutes
from megatron_rl.errors import ConfigError
from megatron_rl.tokenizer import Tokenizer

MAX_BODY_BYTES = 16 * 2**20
_SHUTDOWN_SECONDS = 1.0
"""For answers that are being written when the endpoint closes."""

_http_logger = logging.getLogger(__name__)
_MALFORMED = HttpProcessingError, web.RequestPayloadError
_http_logger.addFilter(lambda record: not (record.exc_info and isinstance(record.exc_info[1], _MALFORMED)))
"""Anyone can send malformed HTTP, without a token, and could fill the log with it."""

T = TypeVar("T")
AnyRequest = TypeVar("AnyRequest", ChatRequest, TextRequest)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class HttpThread:
    """Serves a `PendingCalls` from `start` to `close`."""

    def __init__(self, pending: PendingCalls, token: str, host: str, port: int) -> None:
        self._pending, self._address = pending, (host, port)
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="endpoint", daemon=True)
        self._runner = web.AppRunner(
            create_app(pending, token), access_log=None, shutdown_timeout=_SHUTDOWN_SECONDS,
            handler_cancellation=True, logger=_http_logger,  # cancelled when the client hangs up
        )  # fmt: skip
        self.url = ""

    def start(self) -> None:
        """Listen; ``url`` is known afterwards.

        Raises:
            ConfigError: the address cannot be had.
        """
        self._thread.start()
        self.result(self._listen())

    def close(self) -> None:
        """Answer pending calls with 503; nothing listens afterwards. Safe to call again."""
        if not self._thread.is_alive():
            return
        self.result(self._stop())
        self._pending.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def call(self, do: Callable[..., None], *arguments: Any) -> None:
        """Run ``do`` in the thread, in the order asked."""
        self._loop.call_soon_threadsafe(do, *arguments)

    def result(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of ``work`` in the thread, after all that was asked of it before."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _listen(self) -> None:
        host, port = self._address
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, host, port).start()
        except (OSError, OverflowError) as error:
            await self._runner.cleanup()
            raise ConfigError([f"cannot listen on {host}:{port} ({error}); give another host or port"]) from error
        self.url = f"http://{host}:{self._runner.addresses[0][1]}"

    async def _stop(self) -> None:
        self._pending.abort("the endpoint closes: no more answers are drawn")
        await self._runner.cleanup()


def create_app(pending: PendingCalls, token: str) -> web.Application:
    """Return the routes; all but ``/health`` need ``token``."""
    app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[_answering_errors, _asking_for(token)])
    app.router.add_get("/health", _health)
    routes, tokens = Routes(pending), TokenRoutes(pending)
    app.router.add_get("/version", tokens.version)
    app.router.add_get("/metrics", routes.metrics)
    for prefix in ("", "/sessions/{session}", "/sessions/{session}/agents/{agent}"):
        app.router.add_get(f"{prefix}/v1/models", routes.models)
        app.router.add_get(f"{prefix}/v1/models/{{model}}", routes.model)
        app.router.add_post(f"{prefix}/v1/chat/completions", routes.chat)
        app.router.add_post(f"{prefix}/v1/completions", routes.completions)
        app.router.add_post(f"{prefix}/v1/messages", routes.messages)
        app.router.add_post(f"{prefix}/v1/messages/count_tokens", tokens.count)
        app.router.add_post(f"{prefix}/v1/responses", routes.responses)
        app.router.add_post(f"{prefix}/tokenize", tokens.tokenize)
        app.router.add_post(f"{prefix}/detokenize", tokens.detokenize)
    return app


class Routes:
    """The handler of each route that needs the token."""

    def __init__(self, pending: PendingCalls) -> None:
        self._pending = pending
        self._model = {
            "id": pending.limits.model, "object": "model", "created": 0, "owned_by": "megatron-rl",
            "max_model_len": pending.limits.max_sequence_length,
        }  # fmt: skip

    async def models(self, request: web.Request) -> web.Response:
        """List the one model."""
        return web.json_response({"object": "list", "data": [self._model]})

    async def model(self, request: web.Request) -> web.Response:
        """Show the model."""
        self._pending.check_model(request.match_info["model"])
        return web.json_response(self._model)

    async def metrics(self, request: web.Request) -> web.Response:
        """Show what was answered, and what the engine has to do."""
        kind = {"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
        return web.Response(text=self._pending.metrics.text(), headers=kind)

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """Answer messages."""
        return await self._answer(request, read_chat, self._pending.ask_chat, _envelope)

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """Answer prompts."""
        return await self._answer(request, read_text, self._pending.ask_text, _envelope)

    async def messages(self, request: web.Request) -> web.StreamResponse:
        """Answer messages of Anthropic's API."""
        with renaming(anthropic_messages.NAMES):
            return await self._answer(request, read_messages, self._pending.ask_chat, MessagesWriter)

    async def responses(self, request: web.Request) -> web.StreamResponse:
        """Answer items of OpenAI's Responses API."""
        with renaming(openai_responses.NAMES):
            return await self._answer(request, read_responses, self._pending.ask_chat, ResponsesWriter)

    async def _answer(
        self, request: web.Request, read: Callable[..., AnyRequest],
        ask: Callable[[str | None, AnyRequest, Any], Awaitable[list[PendingCall]]],
        writer: Callable[[AnyRequest, Tokenizer], Envelope | BlockWriter],
    ) -> web.StreamResponse:  # fmt: skip
        in_text_thread, tokenizer = self._pending.in_text_thread, self._pending.tokenizer
        read = partial(read, vocab_size=tokenizer.vocab_size)
        asked = await in_text_thread(parsed, await request.read(), read)
        self._pending.check_model(asked.model)
        options, envelope = asked.options, writer(asked, tokenizer)
        stream = Stream(envelope, in_text_thread) if options.stream else None
        calls = await ask(_address(request), asked, stream and stream.add_tokens)
        calls[0].session.completions[envelope.id] = [call.call.number for call in calls]
        usage = partial(usage_of, calls, options.n)
        try:
            if stream is not None:
                return await stream.write(request, calls, usage if options.include_usage else None)
            await asyncio.wait([call.answer for call in calls])
        finally:
            self._pending.leave(calls)
        choices = [call.answer.result() for call in calls]
        # One by one: no other client is served while JSON is made of a value.
        texts = [
            await in_text_thread(envelope.choice_json, index, choice, calls[index].prompt_ids)
            for index, choice in enumerate(choices)
        ]
        version, prompt_ids = choices[0].completion.policy_version, calls[0].prompt_ids
        response = await in_text_thread(envelope.response, texts, usage(), version, prompt_ids)
        return web.Response(text=response, content_type="application/json")


def _address(request: web.Request) -> str | None:
    """Return what `PendingCalls.session` takes."""
    session, agent = map(request.match_info.get, ("session", "agent"))
    return session if agent is None else f"{session}/{agent}"


def _envelope(asked: ChatRequest | TextRequest, tokenizer: Tokenizer) -> Envelope:
    return Envelope(isinstance(asked, ChatRequest), asked.model, tokenizer, asked.options, asked.echo)


async def _health(request: web.Request) -> web.Response:
    return web.json_response({"status": "ok"})


def _asking_for(token: str) -> Callable[[web.Request, Handler], Awaitable[web.StreamResponse]]:
    expected = f"Bearer {token}".encode()

    @web.middleware
    async def authenticate(request: web.Request, handler: Handler) -> web.StreamResponse:
        keys = request.headers.get("Authorization", ""), f"Bearer {request.headers.get('x-api-key', '')}"
        given = [hmac.compare_digest(key.encode("utf-8", "surrogateescape"), expected) for key in keys]
        if request.path != "/health" and not any(given):
            raise ApiError(401, "invalid_api_key", "the token is missing or wrong: give it as the API key")
        return await handler(request)

    return authenticate


@web.middleware
async def _answering_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """All errors have the form that the route's clients read."""
    try:
        return await handler(request)
    except ApiError as error:
        answer = error
    except web.HTTPRequestEntityTooLarge:
        answer = ApiError(413, "too_large", f"the body has more than {MAX_BODY_BYTES // 2**20} MiB")
    except web.HTTPMethodNotAllowed as error:
        allowed = error.headers["Allow"]
        answer = ApiError(405, "method_not_allowed", f"{request.method} is not for {request.path}; {allowed} is")
    except web.HTTPNotFound:
        answer = ApiError(404, "not_found", f"there is no {request.path[:200]}; see /v1/models, /v1/chat/completions")
    is_anthropic = anthropic_messages.is_messages(request.path)
    body = anthropic_messages.error_body(answer) if is_anthropic else answer.body
    return web.json_response(body, status=answer.status)
