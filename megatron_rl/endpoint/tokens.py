"""vLLM's routes that ask nothing of the model: `/tokenize`, `/detokenize` and `/version`.

    {"prompt": "ab"}          {"count": 2, "max_model_len": 200, "tokens": [64, 65], "token_strs": null}
    {"messages": [...]}       the same of a chat's whole prompt
    {"tokens": [64, 65]}      {"prompt": "ab"}
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from aiohttp import web

from megatron_rl import __version__
from megatron_rl.endpoint.dialects import anthropic_messages, renaming
from megatron_rl.endpoint.dialects.anthropic_messages import read_count
from megatron_rl.endpoint.fields import parsed
from megatron_rl.endpoint.pending_calls import PendingCalls
from megatron_rl.endpoint.protocol import TokenizeRequest, read_detokenize, read_tokenize
from megatron_rl.endpoint.sessions import Session
from megatron_rl.json_text import dumps

T = TypeVar("T")


class TokenRoutes:
    """The handlers; below a session they take the chat settings of its environment."""

    def __init__(self, pending: PendingCalls) -> None:
        self._pending = pending

    async def tokenize(self, request: web.Request) -> web.Response:
        """Show the tokens of a text, or of the prompt that a chat becomes as a first call."""
        environment = self._pending.session(request.match_info.get("session")).environment
        return await self._answer(request, read_tokenize, partial(self._tokens, environment))

    async def count(self, request: web.Request) -> web.Response:
        """Show how many tokens the prompt of a message has, in Anthropic's form."""
        environment = self._pending.session(request.match_info.get("session")).environment
        read = partial(read_count, vocab_size=self._pending.tokenizer.vocab_size)

        def shown(asked: TokenizeRequest) -> dict[str, Any]:
            return {"input_tokens": self._tokens(environment, asked)["count"]}

        with renaming(anthropic_messages.NAMES):
            return await self._answer(request, read, shown)

    async def detokenize(self, request: web.Request) -> web.Response:
        """Show the text of tokens, special ones by name."""
        tokenizer = self._pending.tokenizer
        read = partial(read_detokenize, vocab_size=tokenizer.vocab_size)
        return await self._answer(request, read, lambda tokens: {"prompt": tokenizer.decode_raw(tokens)})

    async def version(self, request: web.Request) -> web.Response:
        """Show the version of this package."""
        return web.json_response({"version": __version__})

    async def _answer(
        self, request: web.Request, read: Callable[[Any], tuple[str | None, T]], result: Callable[[T], dict[str, Any]]
    ) -> web.Response:
        in_text_thread = self._pending.in_text_thread
        model, asked = await in_text_thread(parsed, await request.read(), read)
        if model is not None:
            self._pending.check_model(model)
        return web.Response(text=await in_text_thread(lambda: dumps(result(asked))), content_type="application/json")

    def _tokens(self, environment: str, asked: TokenizeRequest) -> dict[str, Any]:
        tokenizer, longest = self._pending.tokenizer, self._pending.limits.max_sequence_length
        session = Session(environment, tokenizer)
        with self._pending.refusing("messages" if asked.messages else "prompt"):
            if asked.messages:
                (planned,) = session.begin_chat([0], asked.messages, asked.tools, asked.template_kwargs)
                ids = planned.prompt_ids
            elif asked.adds_special_tokens:
                ids = session.begin_text([0], asked.prompt)[0].prompt_ids
            else:
                ids = tokenizer.encode(asked.prompt)
        names = tokenizer.token_names(ids) if asked.names else None
        return {"count": len(ids), "max_model_len": longest, "tokens": list(ids), "token_strs": names}
