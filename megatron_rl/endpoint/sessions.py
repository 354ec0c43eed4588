"""What a sample's calls have to do with each other: which answer a call goes on from, and what is new in it.

An OpenAI client sends the whole history with every call. Tokens that were sampled must not be made of text a second
time: other tokens may come of it. So the history is looked for among the answered calls, and only the rest is encoded.
Answers may come back without white space around them, and with a stop string of their call behind them.

    call 0   system, user                          root: encoded whole
    call 1   system, user, ANSWER 0, tool          goes on from call 0: the tool's message is encoded
    call 2   system, user, ANSWER 0, other tool    goes on from call 0, too: a branch
    call 3   system, summary                       a root: another branch

Bookkeeping without I/O, in the endpoint's text thread, see `PendingCalls`.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import zlib
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from hashlib import blake2b
from typing import Any

from megatron_rl.environments.agents import MAIN
from megatron_rl.json_text import parse_json
from megatron_rl.tokenizer import Tokenizer
from megatron_rl.types import Completion, Message

ID_LENGTH = 24
"""Characters of a response's id without what its route puts before them."""
_SEPARATOR = b"\n"
"""Between messages in the fingerprint of a history."""


@dataclass(frozen=True)
class PlannedCall:
    """A call as it is put to the engine."""

    after: int | None
    """The call whose answer it goes on from; None: a root."""
    ids: tuple[int, ...]
    """Of a root the whole prompt, else what the model reads after that answer."""
    branch: int
    """The lowest number that no other call of the agent with the very same prompt has, see `Place.branch`."""
    num_prompt_tokens: int
    """Of the whole prompt."""
    fingerprint: bytes
    """Of the whole prompt."""
    prompt_ids: tuple[int, ...] = field(default=(), compare=False)
    """The whole prompt; sessions do not keep it, as each turn has the earlier ones in it."""


@dataclass(frozen=True)
class SessionEnd:
    """The result of a session."""

    edited: int
    """Calls whose history has assistant messages that nobody sampled here, those of the first call aside."""
    calls: tuple[int, ...]
    """Those with answers, in the order asked."""
    completions: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """The answered calls of each response, by the last `ID_LENGTH` characters of its id: one a choice."""
    agents: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """``calls`` by agent, where another than ``main`` has some; else empty."""


def of_agents(ends: Mapping[str, SessionEnd]) -> SessionEnd:
    """Return the result of a sample whose agents have had a session each."""
    if len(ends) == 1:
        return ends[MAIN]
    calls = {name: end.calls for name, end in sorted(ends.items()) if end.calls}
    completions = {id: numbers for end in ends.values() for id, numbers in end.completions.items()}
    answered, edited = tuple(sorted(itertools.chain(*calls.values()))), sum(end.edited for end in ends.values())
    return SessionEnd(edited, answered, completions, {} if [*calls] == [MAIN] else calls)


@dataclass
class _Node:
    planned: PlannedCall
    prompt: str | blake2b | None
    """A text, or the fingerprint of the messages; None: ids."""
    is_edited: bool = False
    completion: Completion | None = None
    """None while the call waits for its answer."""
    num_followers: int = 0
    """Calls that go on from its answer."""
    thought: str | None = None
    """Where it is no part of the answer's text."""
    texts: tuple[str, ...] = ()
    """Of a text prompt with its answer: as returned, and with the stop string that ended it."""


class Session:
    """The calls of one sample, or of one of its agents, a tree; with several roots where the harness began anew."""

    def __init__(self, environment: str, tokenizer: Tokenizer, id: str | None = None) -> None:
        """``environment`` may have its own settings of chats; without ``id`` it holds one request that is not kept."""
        self.environment, self.id = environment, id
        self._tokenizer = tokenizer
        self._first_branch = 0
        self.completions: dict[str, Sequence[int]] = {}
        """Calls of each response, see `SessionEnd.completions`."""
        self._nodes: dict[int, _Node] = {}
        """By number of the call, in the order asked."""
        self._histories: dict[bytes, list[int]] = {}
        """Fingerprint of messages up to and with an answer -> the calls that gave it."""
        self._with_stop: dict[bytes, blake2b] = {}
        """The same with a stop string behind the answer -> the fingerprint without it."""
        self._branches: dict[bytes, set[int]] = {}
        """Fingerprint of a prompt -> the branches of its calls."""
        self._known_messages: set[str] = set()
        """The assistant's messages that are no edits: sampled ones, and those that an earlier call had."""

    def of_agent(self, name: str) -> Session:
        """Return a session for another agent of the sample: it goes on from its own answers alone."""
        other = Session(self.environment, self._tokenizer, self.id)
        # Agents with the very same prompt draw different answers, whichever of them asks first.
        other._first_branch = (1 + zlib.crc32(name.encode())) << 16
        return other

    def end(self) -> SessionEnd:
        """Return what came of the session; the sample has its reward."""
        answered = {number: node for number, node in self._nodes.items() if node.completion is not None}
        named = {id: calls for id, calls in dict(self.completions).items() if answered.keys() >= set(calls)}
        return SessionEnd(sum(node.is_edited for node in answered.values()), tuple(answered), named)

    # -- a call comes ----------------------------------------------------------------------------

    def begin_chat(
        self, numbers: Sequence[int], messages: tuple[Message, ...], tools: tuple[Mapping[str, Any], ...] = (),
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[PlannedCall]:  # fmt: skip
        """Plan calls with one chat: they go on from the longest history that was answered. Contents are text or None.

        A history with other tools or ``template_kwargs``, variables of the template, is another one.

        Raises:
            ChatRefused: the chat template refuses the messages; there was no call then.
            TextTooLong: see `Tokenizer.reading_at_most`.
        """
        tokenizer = self._tokenizer
        if template_kwargs:
            tokenizer = tokenizer.with_variables(self.environment, template_kwargs)
        texts = [_canonical(message) for message in messages]
        begin = _sorted([list(tools), dict(template_kwargs or {})])
        history, answered, num_known = blake2b(begin.encode(), digest_size=16), [], 0
        for count, text in enumerate(texts, start=1):
            history = _followed(history, text)
            if history.digest() not in self._histories:
                history = self._with_stop.get(history.digest(), history)
            if found := self._histories.get(history.digest()):
                answered, num_known = found, count

        thought = messages[num_known - 1].get("reasoning_content") if answered else None
        answered = [call for call in answered if self._nodes[call].thought == thought] or answered

        def encode(after: int | None) -> Sequence[int]:
            if after is None:
                return tokenizer.encode_prompt(messages, self.environment, tools)
            before, said, ended = messages[: num_known - 1], messages[num_known - 1], self._has_ended(after)
            new = [_named(message, said) for message in messages[num_known:]]
            return tokenizer.encode_reply(before, new, ended, self.environment, tools)

        planned = self._begin(numbers, answered, encode, history)
        new = zip(messages[num_known:], texts[num_known:], strict=True)
        given = {text for message, text in new if message["role"] == "assistant"}
        # The first call may bring examples. The choices of one request are edited together: the first of them counts.
        is_first = len(self._nodes) == len(numbers)
        self._nodes[numbers[0]].is_edited = not is_first and not given <= self._known_messages
        self._known_messages |= given
        return planned

    def begin_text(self, numbers: Sequence[int], prompt: str | tuple[int, ...]) -> list[PlannedCall]:
        """Plan calls with a text or ids: they go on from the longest prompt with its answer that it begins with."""
        lengths = self._texts_begun(prompt) if isinstance(prompt, str) else self._ids_begun(prompt)
        longest = max(lengths.values(), default=0)
        answered = [call for call, length in lengths.items() if length == longest > 0]

        def encode(after: int | None) -> Sequence[int]:
            if not isinstance(prompt, str):
                return prompt[longest:]
            if after is None:
                return self._tokenizer.encode_prompt(prompt, self.environment)
            # Texts are returned without the end token; one that the caller has put there stands for it.
            rest = prompt[longest:]
            return self._tokenizer.encode(self._tokenizer.without_end_token(rest) if self._has_ended(after) else rest)

        return self._begin(numbers, answered, encode, prompt if isinstance(prompt, str) else None)

    def _texts_begun(self, prompt: str) -> dict[int, int]:
        """Call -> characters of its prompt and answer, where ``prompt`` begins with them, else 0."""
        # An answer without text leaves the prompt as it was: who asks the same once more does not go on from it.
        others = ((call, node.texts) for call, node in self._nodes.items() if node.prompt != prompt)
        return {call: max((len(t) for t in texts if prompt.startswith(t)), default=0) for call, texts in others}

    def _ids_begun(self, prompt: tuple[int, ...]) -> dict[int, int]:
        """The same in ids; a call stands behind the one that it goes on from."""
        lengths: dict[int, int] = {}
        for call, node in self._nodes.items():
            after = node.planned.after
            if node.completion is not None and (after is None or after in lengths):
                begin, part = lengths.get(after, 0), node.planned.ids + node.completion.token_ids
                if prompt[begin : begin + len(part)] == part:
                    lengths[call] = begin + len(part)
        return lengths

    def _begin(
        self, numbers: Sequence[int], answered: Sequence[int], encode: Callable[[int | None], Sequence[int]], prompt:
        str | blake2b | None,
    ) -> list[PlannedCall]:  # fmt: skip
        """Each goes on from one of ``answered``, calls with one history, if there are any; it is encoded once."""

        @cache
        def encoded(after: int | None) -> tuple[tuple[int, ...], bytes, tuple[int, ...]]:
            ids = tuple(encode(after))
            whole = (() if after is None else self._tokens_with_answer(after)) + ids
            # By their prompts: the order in which they come differs from run to run where several come at once.
            return ids, blake2b(array("q", whole).tobytes(), digest_size=16).digest(), whole

        planned: list[PlannedCall] = []
        for number in numbers:
            # The first that nothing goes on from, so that equal answers keep their own.
            after = min(answered, key=lambda call: (self._nodes[call].num_followers > 0, call), default=None)
            ids, fingerprint, whole = encoded(after)
            taken = self._branches.setdefault(fingerprint, set())
            branch = next(branch for branch in itertools.count(self._first_branch) if branch not in taken)
            taken.add(branch)
            if after is not None:
                self._nodes[after].num_followers += 1
            self._nodes[number] = _Node(PlannedCall(after, ids, branch, len(whole), fingerprint), prompt)
            planned.append(replace(self._nodes[number].planned, prompt_ids=whole))
        return planned

    def forget(self, numbers: Sequence[int]) -> None:
        """Drop calls without an answer: they were refused, perhaps before they began, or their client hung up."""
        for node in [self._nodes.pop(number) for number in numbers if number in self._nodes]:
            self._branches[node.planned.fingerprint].remove(node.planned.branch)
            if node.planned.after is not None:
                self._nodes[node.planned.after].num_followers -= 1

    # -- its answer ------------------------------------------------------------------------------

    def add_answer(self, number: int, message: Message, completion: Completion, stop: Sequence[str] = ()) -> None:
        """Keep what was sampled, and the assistant's message that the caller gets, of a text prompt its content.

        ``stop``: the caller's own strings. Some callers write one behind the answer, whether it ended there or not.
        """
        node = self._nodes[number]
        node.completion, node.thought = completion, message.get("reasoning_content")
        if isinstance(node.prompt, str):
            whole = self._tokenizer.decode(completion.token_ids)
            node.texts = tuple(node.prompt + text for text in dict.fromkeys((message["content"], whole)))
        elif node.prompt is not None:
            content = message["content"] or ""
            own, *others = [_canonical({**message, "content": content + end}) for end in ("", *stop)]
            history = _followed(node.prompt, own)
            self._histories.setdefault(history.digest(), []).append(number)
            self._with_stop |= {_followed(node.prompt, text).digest(): history for text in others if text != own}
            self._known_messages |= {own, *others}

    def _has_ended(self, number: int) -> bool:
        """By an end token, not by a limit or a stop string."""
        token_ids = self._nodes[number].completion.token_ids
        return bool(token_ids) and token_ids[-1] in self._tokenizer.end_token_ids

    def _tokens_with_answer(self, number: int) -> tuple[int, ...]:
        """The whole prompt of a call, and its answer."""
        parts: list[tuple[int, ...]] = []
        at: int | None = number
        while at is not None:
            node = self._nodes[at]
            parts += [node.completion.token_ids, node.planned.ids]
            at = node.planned.after
        return tuple(token for part in reversed(parts) for token in part)


def _followed(prompt: blake2b, text: str) -> blake2b:
    history = prompt.copy()
    history.update(_SEPARATOR + text.encode())
    return history


def _named(message: Message, said: Message) -> Message:
    """Return a tool's result with the name of the function that was called in ``said``: some templates show it."""
    calls = said.get("tool_calls") or ()
    names = [call["function"]["name"] for call in calls if call.get("id") == message.get("tool_call_id")]
    return {"name": names[0], **message} if names and message["role"] == "tool" else message


def _canonical(message: Message) -> str:
    """JSON that is equal for a message and what a client makes of it: one without a value for what it sent without."""
    content = message.get("content") or ""
    if message["role"] != "assistant":
        return _sorted({name: value for name, value in message.items() if value is not None} | {"content": content})
    calls = [_canonical_call(call["function"]) for call in message.get("tool_calls") or ()]
    return _sorted({"role": "assistant", "content": content.strip(), "tool_calls": calls})


def _canonical_call(function: Mapping[str, Any]) -> list[Any]:
    """Name and arguments: the latter are JSON in a string, which some clients read and write again."""
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError):  # else as the model wrote them
            arguments = parse_json(arguments)
    return [function.get("name"), arguments]


def _sorted(value: Any) -> str:
    return json.dumps(value, sort_keys=True)
