"""Other APIs over chat requests: one file translates one API's requests to `ChatRequest` and its answers back.

An answer is a list of blocks, in this order: a thought, a text, calls of tools. A stream has one open block at a time:

    chunk        begin, open thought, more, more
    chunk        close thought, open text, more
    last_chunk   more, close text, one block for each call, finish
"""

from __future__ import annotations

import contextlib
import json
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from megatron_rl.endpoint.answers import Choice
from megatron_rl.endpoint.fields import ApiError
from megatron_rl.endpoint.protocol import ChatRequest
from megatron_rl.endpoint.sessions import ID_LENGTH
from megatron_rl.tokenizer import Tokenizer

SAME = ("model", "temperature", "top_p", "top_k", "min_p", "seed", "stream", "chat_template_kwargs")
"""Fields that have the name and meaning of chat completions' in every API."""
THOUGHT, TEXT = "thought", "text"
Event = dict[str, Any]
"""With its name as ``type``."""


class BlockWriter(Protocol):
    """Writes the one answer of a request; the public methods are those of `endpoint.responses.Envelope`."""

    end = b""

    def __init__(self, asked: ChatRequest, tokenizer: Tokenizer) -> None:
        self._asked, self._tokenizer = asked, tokenizer
        self.id, self._created = secrets.token_hex(ID_LENGTH // 2), int(time.time())
        self._num_prompt_tokens = 0
        self._open, self._index = "", -1
        """Kind and number of the block that is open; of the last one where none is."""

    def choice_json(self, index: int, choice: Choice, prompt_ids: Sequence[int]) -> str:
        """Return the JSON of the whole response; ``index`` is 0."""
        self._num_prompt_tokens = len(prompt_ids)
        return json.dumps(self._whole(choice))

    def response(
        self, choices: Sequence[str], usage: dict[str, Any], policy_version: int, prompt_ids: Sequence[int]
    ) -> str:
        """Return the JSON that `choice_json` has made."""
        return choices[0]

    def chunk(
        self, index: int, thought: str, text: str, ids: Sequence[int], prompt_ids: Sequence[int] | None = None
    ) -> bytes:
        """Return the events with more of a thought or text; with ``prompt_ids`` the first ones."""
        events: list[Event] = []
        if prompt_ids is not None:
            self._num_prompt_tokens = len(prompt_ids)
            events += self._begin()
        return _written([*events, *self._grown(thought, text)])

    def last_chunk(self, index: int, choice: Choice, thought: str, rest: str, ids: Sequence[int]) -> bytes:
        """Return the events that end the answer."""
        events = [*self._grown(thought, rest)]
        if self._open != TEXT and not choice.tool_calls:  # an answer without a call has a text, if an empty one
            events += self._moved(TEXT)
        events += self._moved("")
        for number, call in enumerate(choice.tool_calls):
            self._index += 1
            events += self._call(number, call)
        return _written([*events, *self._finish(choice)])

    def usage_chunk(self, usage: dict[str, Any]) -> bytes:
        """Return nothing: the last chunk has the numbers of tokens."""
        return b""

    def error(self, error: ApiError) -> bytes:
        """Return the event for an error after the stream has begun."""
        return _written([self._failed(error)])

    def _grown(self, thought: str, text: str) -> Iterator[Event]:
        for kind, more in ((THOUGHT, thought), (TEXT, text)):
            if more:
                yield from self._moved(kind)
                yield from self._more(kind, more)

    def _moved(self, kind: str) -> Iterator[Event]:
        """Close the open block unless it is of ``kind``, and open one; "" opens none."""
        if self._open == kind:
            return
        if self._open:
            yield from self._close(self._open)
        self._open = kind
        if kind:
            self._index += 1
            yield from self._opened(kind)

    # What an API writes: the whole response; the first events; those of block ``_index``, of a call all; the last ones.
    def _whole(self, choice: Choice) -> dict[str, Any]: ...
    def _begin(self) -> list[Event]: ...
    def _opened(self, kind: str) -> list[Event]: ...
    def _more(self, kind: str, text: str) -> list[Event]: ...
    def _close(self, kind: str) -> list[Event]: ...
    def _call(self, number: int, call: Mapping[str, Any]) -> list[Event]: ...
    def _finish(self, choice: Choice) -> list[Event]: ...
    def _failed(self, error: ApiError) -> Event: ...


@contextlib.contextmanager
def renaming(names: Mapping[str, str]) -> Iterator[None]:
    """Name the fields of a refusal as the client knows them: chat completions' name -> its own."""
    try:
        yield
    except ApiError as error:
        said = error.body["error"]
        param = said["param"] or ""
        name = next((name for name in names if f"{param}.".startswith((f"{name}.", f"{name}["))), None)
        if name is None:
            raise
        own = names[name] + param[len(name) :]
        raise ApiError(error.status, said["code"], said["message"].replace(repr(param), repr(own), 1), own) from error


def without_none(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that have a value."""
    return {name: value for name, value in body.items() if value is not None}


def _written(events: Sequence[Event]) -> bytes:
    return b"".join(
        f"event: {event['type']}\ndata: {json.dumps(event, ensure_ascii=False)}\n\n".encode() for event in events
    )
