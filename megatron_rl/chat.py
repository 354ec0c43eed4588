"""How a chat becomes a prompt: the template, the variables and tools it is given, and a system message.

`--chat-template`, `--chat-template-kwargs` and `--system-prompt` say it for a run, and the keys ``chat_template``,
``chat_template_kwargs`` and ``system_prompt`` for one environment of the list.
"""

from __future__ import annotations

import hashlib
import logging
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from megatron_rl.errors import ChatRefused, one_line, shorten
from megatron_rl.json_text import check_bounds, dumps, loads
from megatron_rl.types import Message
from megatron_rl.user_files import read_text

MAX_TEMPLATE = 2**20
"""Bytes of a template; published ones have 1 to 20 KB."""
OURS = frozenset({
    "messages", "conversation", "chat_template", "add_generation_prompt", "continue_final_message", "tokenize",
    "padding", "truncation", "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask",
    "tokenizer_kwargs", "tools", "sanitize_control_tokens", "conversations",
})  # fmt: skip
"""Arguments of transformers' ``apply_chat_template`` that are no variables of the template, or that we set."""

T = TypeVar("T")
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ChatFormat:
    """One level of settings; what it leaves open, the level below decides: environment, run, tokenizer.

    ``ChatFormat(template_kwargs={"enable_thinking": False}, system_prompt="Be short.")``
    """

    template: str | None = None
    """Jinja source. None: that of the level below."""
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """JSON values, added to those of the level below."""
    system_prompt: str | None = None
    """Empty: none, whatever the level below has."""
    path: str | None = field(default=None, compare=False)
    """The template's file."""
    tools: Sequence[Mapping[str, Any]] = ()
    """Schemas as in OpenAI's API: ``{"type": "function", "function": {"name", "description", "parameters"}}``. Empty:
    those of the level below."""
    tool_call_parser: str | None = None
    """What reads the model's calls, by name. None: what the template's words say."""

    def over(self, below: ChatFormat) -> ChatFormat:
        """Fill what is open here from the level below."""
        chosen = below if self.template is None else self
        return ChatFormat(
            chosen.template,
            {**below.template_kwargs, **self.template_kwargs},
            below.system_prompt if self.system_prompt is None else self.system_prompt,
            chosen.path,
            self.tools or below.tools,
            self.tool_call_parser or below.tool_call_parser,
        )

    def conversation(self, messages: Sequence[Message], arguments_are_text: bool = False) -> list[dict[str, Any]]:
        """Return ``messages`` as the template gets them, the system prompt first unless they begin with their own.

        The arguments of calls become objects, or stay the JSON texts that the API has.
        """
        prepared = [_for_template(message, arguments_are_text) for message in messages]
        if self.system_prompt and not (prepared and prepared[0]["role"] == "system"):
            prepared.insert(0, {"role": "system", "content": self.system_prompt})
        return prepared

    def fingerprints(self) -> dict[str, str]:
        """Return setting -> digest: equal where all chats become the same prompts."""
        kwargs = dumps(dict(sorted(self.template_kwargs.items())))
        settings = {"template": self.template, "template_kwargs": kwargs, "system_prompt": self.system_prompt}
        if self.tools:
            settings["tools"] = dumps(list(self.tools))
        return {name: hashlib.sha256((text or "").encode()).hexdigest()[:16] for name, text in settings.items()}


def refusal(messages: Sequence[Message], error: Exception) -> ChatRefused:
    """Make the error of a chat, named by its roles and the beginning of the last text, that a template refuses."""
    roles = one_line(", ".join(message["role"] for message in messages), 80)
    last = shorten(messages[-1].get("content") if messages else "", 60)
    return ChatRefused(f"the chat template refuses {roles}, {last}: {reason_in_template(error)}")


def reason_in_template(error: BaseException) -> str:
    """Say what a template raised, and in which of its lines; jinja puts its own frames into tracebacks."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == "<template>"]
    line = getattr(error, "lineno", None) or (lines[-1] if lines else None)
    said = str(error) or "no reason given"
    return one_line(f"{type(error).__name__}: {said}", 300) + ("" if line is None else f", line {line}")


def unless_refused(encode: Callable[[], T], refused: dict[str, str], environment: str) -> T | None:
    """Return the encoded row; None if the template refuses it. ``refused`` has the first reason, which is logged."""
    try:
        return encode()
    except ChatRefused as refusal:
        if environment not in refused:
            refused[environment] = f"; {refusal}"
            logger.info("%s: a row is skipped, as are others like it: %s", environment, refusal)
        return None


def _for_template(message: Message, arguments_are_text: bool) -> dict[str, Any]:
    """Most templates want arguments of calls as an object, where the API has JSON text. Some join content to other
    text, which fails without any, and Llama's takes an empty list of calls for a message of calls."""
    prepared = {**message, "content": "" if message.get("content") is None else message["content"]}
    calls = prepared.pop("tool_calls", None)
    if calls and arguments_are_text:
        prepared["tool_calls"] = calls
    elif calls:
        prepared["tool_calls"] = [{**call, "function": _with_object(call["function"])} for call in calls]
    return prepared


def _with_object(function: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments that are no JSON object stay text: the model wrote them."""
    try:
        arguments = loads(function["arguments"])
    except (TypeError, ValueError):
        arguments = None
    return {**function, "arguments": arguments if isinstance(arguments, dict) else function["arguments"]}


def read_template(path: str) -> str:
    """Read the Jinja source in a file; ``ValueError`` says why it cannot be used."""
    try:
        text = read_text(path, MAX_TEMPLATE)
    except ValueError as error:
        raise ValueError(f"{error}; give a file with a Jinja chat template") from error
    if not text.strip():
        raise ValueError("is empty; give a file with a Jinja chat template, or leave it out for the tokenizer's own")
    return text


def kwargs_refusal(value: object) -> str | None:
    """Say why ``value`` cannot be the variables of a template; None if it can."""
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        return f"is {shorten(value)}; give a JSON object, such as {{\"enable_thinking\": false}}"
    try:
        check_bounds(value)
        dumps(dict(value))
    except (TypeError, ValueError) as error:
        return f"must be plain JSON values: {one_line(str(error))}"
    taken = [name for name in value if name in OURS]
    return f"has {taken[0]!r}, which is not for the template to know; leave it out" if taken else None
