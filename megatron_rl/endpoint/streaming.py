"""Answers as server-sent events, while they are drawn."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from aiohttp import web

from megatron_rl.endpoint.answers import Choice, Envelope, event, usage_of
from megatron_rl.endpoint.desk import Waiting
from megatron_rl.endpoint.fields import ApiError
from megatron_rl.endpoint.protocol import Asked
from megatron_rl.tokenizer import Tokenizer


@dataclass
class _Shown:
    """What the client has of a choice."""

    text: str = ""
    begun: bool = False


class Stream:
    """The events of one request: chunks of all its choices as they come, in any order between choices."""

    def __init__(self, include_usage: bool) -> None:
        self._include_usage = include_usage
        self._changed: asyncio.Queue[int] = asyncio.Queue()
        """Numbers of choices that have more tokens, or their answer."""
        self._drawn: dict[int, tuple[int, ...]] = {}
        """All tokens of a choice so far, unless they were read: what came meanwhile is decoded once."""

    @classmethod
    def of(cls, asked: Asked) -> Stream | None:
        """None where the request does not stream."""
        return cls(asked.include_usage) if asked.stream else None

    def shower(self, index: int) -> Callable[[tuple[int, ...]], None]:
        """What takes the tokens of choice ``index``."""

        def show(token_ids: tuple[int, ...]) -> None:
            if index not in self._drawn:
                self._changed.put_nowait(index)
            self._drawn[index] = token_ids

        return show

    async def write(
        self,
        request: web.Request,
        envelope: Envelope,
        waiting: list[Waiting],
        num_read: int,
        logprobs: Tokenizer | None,
    ) -> web.StreamResponse:
        """All of it; an error after the first byte is an event, too."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        try:
            await self._write_choices(response, envelope, waiting, logprobs)
            if self._include_usage:
                usage = usage_of(num_read, [each.answer.result() for each in waiting])
                await response.write(event(envelope.around([], chunk=True, usage=usage)))
            await response.write(event("[DONE]"))
        except ApiError as error:
            await response.write(event(error.body))
        except ConnectionError:  # the client has hung up
            return response
        await response.write_eof()
        return response

    async def _write_choices(
        self, response: web.StreamResponse, envelope: Envelope, waiting: list[Waiting], logprobs: Tokenizer | None
    ) -> None:
        for index, each in enumerate(waiting):
            each.answer.add_done_callback(lambda _, index=index: self._changed.put_nowait(index))
        shown, open_choices = [_Shown() for _ in waiting], len(waiting)
        while open_choices:
            index = await self._changed.get()
            each, sofar, token_ids = waiting[index], shown[index], self._drawn.pop(index, None)
            if token_ids is not None:
                chunks = self._more(envelope, index, each.reader.so_far(token_ids), sofar)
            else:
                chunks = self._last(envelope, index, each.answer.result(), sofar, logprobs)
                open_choices -= 1
            for chunk in chunks:
                await response.write(event(chunk))

    def _more(self, envelope: Envelope, index: int, text: str, sofar: _Shown) -> list[dict]:
        if len(text) <= len(sofar.text):
            return []
        chunk = envelope.delta(index, text[len(sofar.text) :], first=not sofar.begun)
        sofar.text, sofar.begun = text, True
        return [chunk]

    def _last(
        self, envelope: Envelope, index: int, choice: Choice, sofar: _Shown, logprobs: Tokenizer | None
    ) -> list[dict]:
        opening = [] if sofar.begun else [envelope.delta(index, "", first=True)]
        return [*opening, envelope.last(index, choice, choice.text[len(sofar.text) :], logprobs)]
