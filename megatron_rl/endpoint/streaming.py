"""Answers as server-sent events, while they are drawn."""

from __future__ import annotations

import asyncio

from aiohttp import web

from megatron_rl.endpoint.answers import Envelope, event
from megatron_rl.endpoint.fields import ApiError
from megatron_rl.endpoint.pending_calls import Aside, Waiting, usage_of
from megatron_rl.tokenizer import Tokenizer


class Stream:
    """The events of one request: chunks of all its choices as they come, in any order between choices."""

    def __init__(self, include_usage: bool, aside: Aside) -> None:
        self._include_usage, self._aside = include_usage, aside
        self._changed: asyncio.Queue[int] = asyncio.Queue()
        """Numbers of choices that have more tokens, or their answer."""
        self._drawn: dict[int, tuple[int, ...]] = {}
        """All tokens of a choice so far, unless they were read."""

    def show(self, index: int, token_ids: tuple[int, ...]) -> None:
        """All tokens so far of choice ``index``."""
        if index not in self._drawn:
            self._changed.put_nowait(index)
        self._drawn[index] = token_ids

    async def write(
        self,
        request: web.Request,
        envelope: Envelope,
        waiting: list[Waiting],
        n: int,
        logprobs: Tokenizer | None,
    ) -> web.StreamResponse:
        """All of it; an error after the first byte is an event, too."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        try:
            await self._write_choices(response, envelope, waiting, logprobs)
            if self._include_usage:
                await response.write(event(envelope.around([], chunk=True, usage=usage_of(waiting, n))))
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
        shown, open_choices, drawn = [""] * len(waiting), len(waiting), [each.reader.growing() for each in waiting]
        while open_choices:
            index = await self._changed.get()
            token_ids, before = self._drawn.pop(index, None), shown[index]
            if token_ids is None:
                choice, open_choices = waiting[index].answer.result(), open_choices - 1
                chunks = [] if before else [envelope.delta(index, "", first=True)]
                chunks.append(await self._aside(envelope.last, index, choice, choice.text[len(before) :], logprobs))
            else:
                certain = waiting[index].reader.certain(drawn[index].read(token_ids))
                shown[index] = max(before, certain, key=len)
                more = shown[index][len(before) :]
                chunks = [envelope.delta(index, more, first=not before)] if more else []
            for chunk in chunks:
                await response.write(chunk)
