"""OpenAI's JSON objects: a whole response, or server-sent events while tokens are sampled."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, ClassVar

from aiohttp import web

from megatron_rl.endpoint.answers import Choice
from megatron_rl.endpoint.dialects import BlockWriter
from megatron_rl.endpoint.fields import ApiError
from megatron_rl.endpoint.options import Options
from megatron_rl.endpoint.pending_calls import PendingCall
from megatron_rl.endpoint.sessions import ID_LENGTH
from megatron_rl.tokenizer import Tokenizer
from megatron_rl.types import Completion, TokenScore


@dataclass(frozen=True)
class Envelope:
    """The common fields of all objects of one response."""

    end: ClassVar[bytes] = b"data: [DONE]\n\n"

    is_chat: bool
    """``/v1/chat/completions``, not ``/v1/completions``."""
    model: str
    tokenizer: Tokenizer
    options: Options
    echo: bool = False
    """The prompt stands before each answer."""
    id: str = field(default_factory=lambda: secrets.token_hex(ID_LENGTH // 2))
    created: int = field(default_factory=lambda: int(time.time()))

    def response(
        self, choices: Sequence[str], usage: dict[str, Any], policy_version: int, prompt_ids: Sequence[int]
    ) -> str:
        """Return the JSON of a response that is not streamed, of ``choices`` as `choice_json` gives them."""
        fingerprint, prompt = f"policy-{policy_version}", self._prompt(prompt_ids, of_chat=True)
        rest = self._object([], usage=usage, system_fingerprint=fingerprint, **prompt)
        del rest["choices"]
        return f'{json.dumps(rest)[:-1]}, "choices": [{", ".join(choices)}]}}'

    def choice_json(self, index: int, choice: Choice, prompt_ids: Sequence[int]) -> str:
        """Return the JSON of one choice; ``prompt_ids`` are its whole prompt."""
        written = prompt_ids[_num_unwritten(prompt_ids, self.tokenizer) :]
        before = self.tokenizer.decode_raw(written) if self.echo else ""
        answer = {"message": choice.message} if self.is_chat else {"text": before + choice.text}
        ending = self._ending(choice, prompt_ids if self.echo else ())
        if self.options.prompt_logprobs is not None:
            scores = zip(prompt_ids[1:], choice.completion.prompt_scores, strict=True)
            ending["prompt_logprobs"] = [None, *(_prompt_entry(*each, self.tokenizer) for each in scores)]
        ids = self._ids(choice.completion.token_ids) | self._prompt(prompt_ids, of_chat=False)
        return json.dumps({"index": index, **answer, **ending, **ids})

    def chunk(
        self, index: int, thought: str, text: str, ids: Sequence[int], prompt_ids: Sequence[int] | None = None
    ) -> bytes:
        """Return the event with more text of a choice and the ``ids`` drawn since; the first with the prompt's."""
        delta = ({} if prompt_ids is None else {"role": "assistant", "content": ""}) | _delta(thought, text)
        answer = ({"delta": delta} if self.is_chat else {"text": text}) | {"logprobs": None, "finish_reason": None}
        of_text = self._ids(ids) | self._prompt(prompt_ids, of_chat=False)
        return self._event({"index": index, **answer, **of_text}, **self._prompt(prompt_ids, of_chat=True))

    def last_chunk(self, index: int, choice: Choice, thought: str, rest: str, ids: Sequence[int]) -> bytes:
        """Return the event that ends a choice: the rest of its text and ids, its tool calls, its log-probs."""
        calls = [{"index": number, **call} for number, call in enumerate(choice.tool_calls)]
        delta = _delta(thought, rest) | ({"tool_calls": calls} if calls else {})
        answer = {"delta": delta} if self.is_chat else {"text": rest}
        return self._event({"index": index, **answer, **self._ending(choice), **self._ids(ids)})

    def usage_chunk(self, usage: dict[str, Any]) -> bytes:
        """Return the event with the numbers of tokens."""
        return _event(self._object([], is_chunk=True, usage=usage))

    def error(self, error: ApiError) -> bytes:
        """Return the event for an error after the stream has begun."""
        return _event(error.body)

    def _event(self, choice: dict[str, Any], **more: Any) -> bytes:
        return _event(self._object([choice], is_chunk=True, **more))

    def _ids(self, ids: Sequence[int]) -> dict[str, Any]:
        return {"token_ids": list(ids)} if self.options.returns_ids else {}

    def _prompt(self, prompt_ids: Sequence[int] | None, of_chat: bool) -> dict[str, Any]:
        """Of a chat they stand beside the choices, of a text within each, as in vLLM."""
        is_shown = self.options.returns_ids and prompt_ids is not None and of_chat == self.is_chat
        return {"prompt_token_ids": list(prompt_ids)} if is_shown else {}

    def _object(self, choices: list[dict[str, Any]], is_chunk: bool = False, **more: Any) -> dict[str, Any]:
        kind = "text_completion"
        if self.is_chat:
            kind = "chat.completion.chunk" if is_chunk else "chat.completion"
        return {
            "id": f"{'chatcmpl' if self.is_chat else 'cmpl'}-{self.id}", "object": kind, "created": self.created,
            "model": self.model, "choices": choices, **more,
        }  # fmt: skip

    def _ending(self, choice: Choice, echoed: Sequence[int] = ()) -> dict[str, Any]:
        logprobs = None
        if self.options.logprobs:
            of = choice.completion, self.tokenizer
            logprobs = _chat_logprobs(*of) if self.is_chat else _text_logprobs(*of, echoed)
        return {"logprobs": logprobs, "finish_reason": choice.finish_reason}


class Stream:
    """The events of one request: chunks of all its choices as they come, in any order between choices."""

    def __init__(self, envelope: Envelope | BlockWriter, in_text_thread: Callable[..., Awaitable[Any]]) -> None:
        self._envelope, self._in_text_thread = envelope, in_text_thread
        self._changed: asyncio.Queue[int] = asyncio.Queue()
        """Indices of choices that have more tokens or are complete."""
        self._sampled: dict[int, tuple[int, ...]] = {}
        """All tokens so far of the choices with tokens that were not sent."""

    def add_tokens(self, index: int, token_ids: tuple[int, ...]) -> None:
        """Queue ``token_ids``, all tokens so far of choice ``index``."""
        if index not in self._sampled:
            self._changed.put_nowait(index)
        self._sampled[index] = token_ids

    async def write(
        self, request: web.Request, pending: list[PendingCall], usage: Callable[[], dict[str, Any]] | None
    ) -> web.StreamResponse:
        """Send all events until every choice is complete, at last the ``usage``; later errors are events, too."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        try:
            await self._write_choices(response, pending)
            if usage is not None:
                await response.write(self._envelope.usage_chunk(usage()))
            await response.write(self._envelope.end)
        except ApiError as error:
            await response.write(self._envelope.error(error))
        except ConnectionError:  # the client has hung up
            return response
        await response.write_eof()
        return response

    async def _write_choices(self, response: web.StreamResponse, pending: list[PendingCall]) -> None:
        for index, call in enumerate(pending):
            call.answer.add_done_callback(lambda _, index=index: self._changed.put_nowait(index))
        sent, num_open = [("", "")] * len(pending), len(pending)
        sent_ids, decoders = [0] * len(pending), [call.reader.decoder() for call in pending]
        while num_open:
            index = await self._changed.get()
            token_ids, before = self._sampled.pop(index, None), sent[index]
            prompt_ids = None if any(before) else pending[index].prompt_ids
            if token_ids is None:
                choice, num_open = pending[index].answer.result(), num_open - 1
                chunks = [] if any(before) else [self._envelope.chunk(index, "", "", (), prompt_ids)]
                rest = *_rest((choice.thought, choice.text), before), choice.completion.token_ids[sent_ids[index] :]
                chunks.append(await self._in_text_thread(self._envelope.last_chunk, index, choice, *rest))
            else:
                final = pending[index].reader.final_parts(decoders[index].decode(token_ids), token_ids)
                more, new_ids = _rest(final, before), token_ids[sent_ids[index] :]
                chunks = [self._envelope.chunk(index, *more, new_ids, prompt_ids)] if any(more) else []
                if any(more):
                    sent[index] = before[0] + more[0], before[1] + more[1]
                    sent_ids[index] = len(token_ids)
            for chunk in chunks:
                await response.write(chunk)


def _rest(parts: tuple[str, str], sent: tuple[str, str]) -> tuple[str, str]:
    """Thought and answer without what was sent of them."""
    return parts[0][len(sent[0]) :], parts[1][len(sent[1]) :]


def _delta(thought: str, text: str) -> dict[str, Any]:
    return {name: part for name, part in (("reasoning_content", thought), ("content", text)) if part}


def usage_of(pending: Sequence[PendingCall], n: int) -> dict[str, Any]:
    """Count the tokens of prompts and answers, which are all there; the ``n`` choices of a prompt count it once."""
    completions = [call.answer.result().completion for call in pending]
    num_prompt = sum(len(call.prompt_ids) for call in pending[::n])
    num_sampled = sum(len(completion.token_ids) for completion in completions)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_sampled,
        "total_tokens": num_prompt + num_sampled,
        "prompt_tokens_details": {"cached_tokens": sum(completion.cached_tokens for completion in completions[::n])},
    }


def _chat_logprobs(completion: Completion, tokenizer: Tokenizer) -> dict[str, Any]:
    """Of every sampled token, end tokens among them; natural logarithms."""
    tops = [score.top for score in completion.scores] or [()] * len(completion.token_ids)
    rows = zip(completion.token_ids, completion.inference_logprobs, tops, strict=True)
    content = [
        _token(token, logprob, tokenizer) | {"top_logprobs": [_token(*each, tokenizer) for each in top]}
        for token, logprob, top in rows
    ]
    return {"content": content, "refusal": None}


def _token(token: int, logprob: float, tokenizer: Tokenizer) -> dict[str, Any]:
    own = list(tokenizer.token_bytes(token))
    return {"token": tokenizer.decode_raw([token]), "logprob": _finite(logprob), "bytes": own}


def _text_logprobs(completion: Completion, tokenizer: Tokenizer, echoed: Sequence[int] = ()) -> dict[str, Any]:
    """The same for `/v1/completions`, of the ``echoed`` prompt, too; the first token of a prompt has no log-prob.

    Offsets count characters of the tokens' own texts, as far as the choice's text shows them: no special tokens of an
    answer, and none that was put before the prompt.
    """
    texts = [tokenizer.decode_raw([token]) for token in (*echoed, *completion.token_ids)]
    logprobs: list[float | None] = list(completion.inference_logprobs)
    tops = [_tops(score, tokenizer) for score in completion.scores]
    if echoed:
        logprobs = [None, *(score.logprob for score in completion.prompt_scores), *logprobs]
        tops = [None, *(_tops(score, tokenizer) for score in completion.prompt_scores), *tops]
    unwritten, answered = _num_unwritten(echoed, tokenizer), (tokenizer.decode([id]) for id in completion.token_ids)
    shown = [*[""] * unwritten, *texts[unwritten : len(echoed)], *answered]
    offsets = [0, *accumulate(map(len, shown))][:-1]
    return {
        "tokens": texts, "token_logprobs": logprobs, "text_offset": offsets,
        "top_logprobs": tops if completion.scores else None,
    }  # fmt: skip


def _num_unwritten(prompt_ids: Sequence[int], tokenizer: Tokenizer) -> int:
    """Return how many tokens the tokenizer has put before a text that became ``prompt_ids``."""
    before = tuple(tokenizer.encode_prompt(""))
    return len(before) if tuple(prompt_ids[: len(before)]) == before else 0


def _tops(score: TokenScore, tokenizer: Tokenizer) -> dict[str, float]:
    """Text -> log-prob; the likelier one of tokens with one text."""
    return {tokenizer.decode_raw([token]): _finite(logprob) for token, logprob in reversed(score.top)}


def _prompt_entry(token: int, score: TokenScore, tokenizer: Tokenizer) -> dict[str, Any]:
    """A prompt token and the likeliest ones in its place, as vLLM shows them: id -> log-prob and text."""
    known = dict(score.top) | {token: score.logprob}
    return {
        str(each): {"logprob": _finite(logprob), "decoded_token": tokenizer.decode_raw([each])}
        for each, logprob in known.items()
    }


def _finite(logprob: float) -> float:
    """What cannot be drawn has -inf, which is no JSON: OpenAI's API has -9999 there."""
    return max(logprob, -9999.0)


def _event(value: Any) -> bytes:
    """A server-sent event."""
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n".encode()
