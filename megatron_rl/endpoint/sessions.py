"""What a sample's calls have to do with each other: which answer a call goes on from, and what is new in it.

An OpenAI client sends the whole history with every call. Tokens that were sampled must not be made of text a second
time: other tokens may come of it. So the history is looked for among the answered calls, and only the rest is encoded.

    call 0   system, user                          root: encoded whole
    call 1   system, user, ANSWER 0, tool          goes on from call 0: the tool's message is encoded
    call 2   system, user, ANSWER 0, other tool    goes on from call 0, too: a branch
    call 3   system, summary                       a root: another branch

Pure bookkeeping without I/O; the endpoint's HTTP thread owns it.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_rl.errors import EnvironmentFault
from megatron_rl.json_text import parse_json
from megatron_rl.tokenizer import Tokenizer
from megatron_rl.types import Completion, Message


@dataclass(frozen=True)
class Planned:
    """How a call is put to the engine."""

    after: int | None
    """The call whose answer it goes on from; None: a root."""
    ids: tuple[int, ...]
    """Of a root the whole prompt, else what the model reads after that answer."""
    branch: int
    """The lowest number that no other call of the sample with the very same prompt has, see `Request.branch`."""
    num_read: int
    """Tokens of the whole prompt."""


@dataclass(frozen=True)
class SessionEnd:
    """What came of a session."""

    edited: int
    """Calls whose history has assistant messages that nobody sampled here, those of the first call aside."""
    calls: tuple[int, ...]
    """The answered ones, in the order asked."""


@dataclass
class _Node:
    planned: Planned
    prompt: bytes
    """Fingerprint of its tokens."""
    asked: tuple[Message, ...] | str | tuple[int, ...]
    """What the caller sent: messages, text, or ids."""
    tools: tuple[Mapping[str, Any], ...]
    is_edited: bool
    completion: Completion | None = None
    """None while the call waits for its answer."""
    texts: tuple[str, ...] = ()
    """Of a text prompt with its answer: as returned, and with the stop string that ended it."""


class Session:
    """The calls of one sample, a tree; with several roots where the harness began anew."""

    def __init__(self, environment: str, tokenizer: Tokenizer) -> None:
        """``environment`` may have its own settings of chats."""
        self.environment = environment
        self._tokenizer = tokenizer
        self._nodes: dict[int, _Node] = {}
        """By number of the call, in the order asked."""
        self._histories: dict[bytes, list[int]] = {}
        """Fingerprint of messages up to and with an answer -> the calls that gave it."""
        self._known: set[str] = set()
        """The assistant messages that are no news: sampled ones, and those that an earlier call had."""

    def end(self) -> SessionEnd:
        """The sample has its reward."""
        answered = tuple(number for number, node in self._nodes.items() if node.completion is not None)
        return SessionEnd(sum(node.is_edited for node in self._nodes.values()), answered)

    # -- a call comes ----------------------------------------------------------------------------

    def begin_chat(
        self, number: int, messages: tuple[Message, ...], tools: tuple[Mapping[str, Any], ...] = ()
    ) -> Planned:
        """A call with a chat: it goes on from the longest history that was answered. Contents are text or None.

        Raises:
            EnvironmentFault: the chat template refuses the messages; there was no call then.
        """
        after, known = None, 0
        for count, fingerprint in enumerate(_fingerprints(messages, tools), start=1):
            if fingerprint in self._histories:
                after, known = self._pick(self._histories[fingerprint]), count
        new, before = messages[known:], messages[: known - 1]
        try:
            if after is None:
                ids = self._tokenizer.encode_prompt(messages, self.environment, tools)
            else:
                ids = self._tokenizer.encode_reply(before, new, self._has_ended(after), self.environment, tools)
        except EnvironmentFault:
            raise
        except Exception as error:  # a template raises whatever its author chose
            raise EnvironmentFault(f"the chat template refuses the messages: {error}") from error
        unsampled = {_canonical(message) for message in new if message["role"] == "assistant"}
        is_edited = bool(self._nodes and unsampled - self._known)
        self._known |= unsampled
        return self._begin(number, after, ids, messages, tools, is_edited)

    def begin_text(self, number: int, prompt: str | tuple[int, ...]) -> Planned:
        """A call with a text or ids: it goes on from the longest prompt with its answer that it begins with."""
        found = {call: known for call in self.end().calls if (known := self._known_of(prompt, call))}
        if not found:
            ids = self._tokenizer.encode_prompt(prompt, self.environment) if isinstance(prompt, str) else prompt
            return self._begin(number, None, ids, prompt)
        longest = max(found.values())
        after, rest = self._pick([call for call, known in found.items() if known == longest]), prompt[longest:]
        if isinstance(rest, str):
            # Texts are returned without the end token; one that the caller has put there stands for it.
            rest = self._tokenizer.without_end_token(rest) if self._has_ended(after) else rest
            rest = self._tokenizer.encode(rest)
        return self._begin(number, after, rest, prompt)

    def _known_of(self, prompt: str | tuple[int, ...], number: int) -> int:
        """Characters or ids of a call's prompt with its answer, if ``prompt`` begins with them; else 0."""
        if not isinstance(prompt, str):
            ids = self._history(number)
            return len(ids) if prompt[: len(ids)] == ids else 0
        node = self._nodes[number]
        # An answer without text leaves the prompt as it was: who asks the same once more does not go on from it.
        return max((len(t) for t in node.texts if prompt.startswith(t) and prompt != node.asked), default=0)

    def forget(self, number: int) -> None:
        """The call began, and has no answer: it was refused, or its client hung up."""
        del self._nodes[number]

    def _begin(
        self,
        number: int,
        after: int | None,
        ids: Sequence[int],
        asked: tuple[Message, ...] | str | tuple[int, ...],
        tools: tuple[Mapping[str, Any], ...] = (),
        is_edited: bool = False,
    ) -> Planned:
        prompt_ids = (() if after is None else self._history(after)) + tuple(ids)
        # By their prompts: the order in which they come differs from run to run where several come at once.
        prompt = hashlib.blake2b(array("q", prompt_ids).tobytes(), digest_size=16).digest()
        taken = {node.planned.branch for node in self._nodes.values() if node.prompt == prompt}
        branch = next(number for number in itertools.count() if number not in taken)
        planned = Planned(after, tuple(ids), branch, len(prompt_ids))
        self._nodes[number] = _Node(planned, prompt, asked, tools, is_edited)
        return planned

    # -- its answer ------------------------------------------------------------------------------

    def answered(self, number: int, message: Message, completion: Completion) -> None:
        """What was sampled, and the assistant's message that the caller gets for it; of a text prompt its content."""
        node = self._nodes[number]
        node.completion = completion
        if isinstance(node.asked, str):
            whole = self._tokenizer.decode(completion.token_ids)
            node.texts = tuple(node.asked + said for said in dict.fromkeys((message["content"], whole)))
        elif node.asked and isinstance(node.asked[0], Mapping):
            *_, fingerprint = _fingerprints((*node.asked, message), node.tools)
            self._histories.setdefault(fingerprint, []).append(number)
            self._known.add(_canonical(message))

    # -- parts -----------------------------------------------------------------------------------

    def _pick(self, numbers: Sequence[int]) -> int:
        """Of calls with one history: the first that nothing goes on from, so that equal answers keep their own."""
        gone_on = {node.planned.after for node in self._nodes.values()}
        return min(numbers, key=lambda number: (number in gone_on, number))

    def _has_ended(self, number: int) -> bool:
        """By an end token, not by a limit or a stop string."""
        token_ids = self._nodes[number].completion.token_ids
        return bool(token_ids) and token_ids[-1] in self._tokenizer.end_token_ids

    def _history(self, number: int) -> tuple[int, ...]:
        """All ids of an answered call, its answer included."""
        parts: list[tuple[int, ...]] = []
        at: int | None = number
        while at is not None:
            node = self._nodes[at]
            parts += [node.completion.token_ids, node.planned.ids]
            at = node.planned.after
        return tuple(token for part in reversed(parts) for token in part)


def _fingerprints(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> Iterator[bytes]:
    """One after each message: of the tools and of all messages up to it."""
    sofar = hashlib.blake2b(_sorted(list(tools)).encode(), digest_size=16)
    for message in messages:
        sofar.update(b"\n" + _canonical(message).encode())
        yield sofar.digest()


def _canonical(message: Message) -> str:
    """JSON that is equal for a message and what a client makes of it: one without a value for what it sent without."""
    content = message.get("content") or ""
    if message["role"] != "assistant":
        return _sorted({name: value for name, value in message.items() if value is not None} | {"content": content})
    calls = [_canonical_call(call["function"]) for call in message.get("tool_calls") or ()]
    return _sorted({"role": "assistant", "content": content, "tool_calls": calls})


def _canonical_call(function: Mapping[str, Any]) -> list[Any]:
    """Name and arguments: the latter are JSON in a string, which some clients read and write again."""
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError):  # else as the model wrote them
            arguments = parse_json(arguments)
    return [function.get("name"), arguments]


def _sorted(value: Any) -> str:
    return json.dumps(value, sort_keys=True)
