"""Requests to `/v1/chat/completions` and `/v1/completions`, checked: what is not supported is refused by name.

A field that would change the answer is refused, and so is an unknown one. Of a message, what no template reads is
ignored: clients send back all they have of an answer. Messages come in one form:

    {"role": "user", "content": [{"type": "text", "text": "2 + "}, {"type": "text", "text": "3?"}]}
    ──► {"role": "user", "content": "2 + 3?"}
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron_rl.endpoint.fields import ApiError, Fields, refuse, typed
from megatron_rl.environments.tool_calls import Tools, checked_tools
from megatron_rl.errors import shorten
from megatron_rl.types import Message

MAX_CHOICES = 128
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 256
MAX_ANSWERS = 256
"""Choices of all prompts together."""
MIN_TEMPERATURE = 1e-3
"""Logits divided by less have log-probs that are not finite."""
ROLES = ("system", "developer", "user", "assistant", "tool")
IGNORED = frozenset({
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "prediction",
})  # fmt: skip
"""Fields that change no answer."""
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (0, 0.0),
    "frequency_penalty": (0, 0.0),
    "repetition_penalty": (1, 1.0),
    "min_p": (0, 0.0),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "top_logprobs": (0,),
    "echo": (False,),
    "suffix": ("",),
    "functions": ([],),
    "function_call": ("none",),
    "audio": (),
    "reasoning_effort": (),
    "verbosity": (),
    "web_search_options": (),
}
"""Fields that are not supported, and the values with which they change nothing."""


@dataclass(frozen=True)
class Options:
    """What both kinds of request have; None: the caller leaves it open."""

    n: int = 1
    max_new_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stream: bool = False
    include_usage: bool = False
    logprobs: bool = False


@dataclass(frozen=True)
class ChatRequest:
    """Of `/v1/chat/completions`."""

    model: str
    options: Options
    messages: tuple[Message, ...]
    tools: Tools = ()
    reads_calls: bool = False
    """The answer is searched for calls of the tools."""


@dataclass(frozen=True)
class TextRequest:
    """Of `/v1/completions`: each prompt is a text or token ids."""

    model: str
    options: Options
    prompts: tuple[str | tuple[int, ...], ...]


def read_chat(body: Any) -> ChatRequest:
    """Read the request in a parsed body; `ApiError` names the field that is wrong."""
    fields = _fields(body)
    messages = _messages(fields.required("messages", list))
    tools, reads_calls = _tools(fields)
    model, logprobs = fields.required("model", str), bool(fields.get("logprobs", bool))
    limits = [fields.number(name, int, 1) for name in ("max_completion_tokens", "max_tokens")]
    options = _options(fields, logprobs, min((limit for limit in limits if limit is not None), default=None))
    return ChatRequest(model, options, messages, tools, reads_calls)


def read_text(body: Any, vocab_size: int) -> TextRequest:
    """Read the request in a parsed body; `ApiError` names the field that is wrong. Ids are below ``vocab_size``."""
    fields = _fields(body)
    prompts = _prompts(fields.take("prompt"), vocab_size)
    model, logprobs = fields.required("model", str), fields.get("logprobs", int)
    if logprobs:
        refuse("logprobs", f"is {shorten(logprobs)}; 0 gives those of the sampled tokens, others are not known")
    best_of = fields.number("best_of", int, 1)
    options = _options(fields, logprobs is not None, fields.number("max_tokens", int, 1))
    n = options.n
    if len(prompts) * n > MAX_ANSWERS:
        refuse("n", f"is {n} for each of {len(prompts)} prompts; ask for at most {MAX_ANSWERS} answers at once")
    if best_of not in (None, n):
        refuse("best_of", f"is {best_of}, which is not supported; ask for 'n' answers and choose among them")
    return TextRequest(model, options, prompts)


def _fields(body: Any) -> Fields:
    if not isinstance(body, dict):
        raise ApiError(400, "invalid_type", f"the body is {shorten(body)}; give a JSON object")
    return Fields(body)


def _options(fields: Fields, logprobs: bool, max_new_tokens: int | None) -> Options:
    """The fields that both kinds have; everything else of the request has been read before."""
    stream_options = Fields(fields.get("stream_options", dict) or {}, "stream_options.")
    temperature, top_p = fields.number("temperature", float, 0, 100), fields.number("top_p", float, 0, 1)
    if temperature and temperature < MIN_TEMPERATURE:
        refuse("temperature", f"is {temperature}; give 0 for the likeliest token, or {MIN_TEMPERATURE} at least")
    if top_p == 0:
        refuse("top_p", "is 0, which leaves no token; give a number above 0, or temperature 0")
    top_k = fields.number("top_k", int, -1)
    options = Options(
        n=fields.number("n", int, 1, MAX_CHOICES) or 1,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k if top_k is None else max(top_k, 0),
        seed=fields.number("seed", int, -(2**63), 2**63 - 1),
        stop=_stop(fields.take("stop")),
        stream=bool(fields.get("stream", bool)),
        include_usage=bool(stream_options.get("include_usage", bool)),
        logprobs=logprobs,
    )
    _refuse_unread(fields)
    return options


def _stop(value: Any) -> tuple[str, ...]:
    strings = [value] if isinstance(value, str) else typed(value, list, "stop") if value is not None else []
    if len(strings) > MAX_STOPS:
        refuse("stop", f"has {len(strings)} texts; give at most {MAX_STOPS}")
    for index, text in enumerate(strings):
        if not typed(text, str, f"stop[{index}]"):
            refuse(f"stop[{index}]", "is empty; every answer would stop before it begins")
        if len(text) > MAX_STOP_CHARACTERS:
            refuse(f"stop[{index}]", f"has {len(text):,} characters; give at most {MAX_STOP_CHARACTERS}")
    return tuple(dict.fromkeys(strings))


def _refuse_unread(fields: Fields) -> None:
    for name, neutral in UNSUPPORTED.items():
        value = fields.take(name)
        if value is not None and not any(type(value) is type(same) and value == same for same in neutral):
            instead = f"leave it out{f', or give {neutral[0]!r}' if neutral else ''}"
            refuse(name, f"is {shorten(value)}, which is not supported; {instead}", "unsupported_parameter")
    for name in sorted(fields.unread - IGNORED):
        refuse(name, "is no field that is known here; leave it out", "unknown_parameter")


def _prompts(value: Any, vocab_size: int) -> tuple[str | tuple[int, ...], ...]:
    if value is None:
        refuse("prompt", "is missing; give a text, or token ids", "missing_required_parameter")
    if isinstance(value, list) and value and not all(type(item) is int for item in value):
        return tuple(_prompt(each, vocab_size, f"prompt[{index}]") for index, each in enumerate(value))
    return (_prompt(value, vocab_size, "prompt"),)


def _prompt(value: Any, vocab_size: int, param: str) -> str | tuple[int, ...]:
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not all(type(item) is int for item in value):
        refuse(param, f"is {shorten(value)}; give a text, or a list of token ids", "invalid_type")
    wrong = next((item for item in value if not 0 <= item < vocab_size), None)
    if wrong is not None:
        refuse(param, f"has the token id {shorten(wrong)}; the vocabulary has 0 to {vocab_size - 1}")
    return tuple(value)


def _tools(fields: Fields) -> tuple[Tools, bool]:
    """The tools that the template shows, and whether the answer is searched for calls."""
    given, choice = fields.get("tools", list) or [], fields.take("tool_choice")
    several = fields.get("parallel_tool_calls", bool)
    try:
        tools = checked_tools(given)
    except ValueError as error:
        raise ApiError(400, "invalid_tools", f"'tools': {error}", "tools") from error
    if choice not in (None, "auto", "none"):
        refuse("tool_choice", f"is {shorten(choice)}, which nothing makes the model heed; give 'auto' or 'none'")
    if several is False and tools:
        refuse("parallel_tool_calls", "is false, which nothing makes the model heed; leave it out")
    return tools, bool(tools) and choice != "none"


def _messages(values: list[Any]) -> tuple[Message, ...]:
    """Role, content, and where there are any tool_calls, tool_call_id, name."""
    if not values:
        refuse("messages", "is empty; give at least one message")
    return tuple(_message(typed(value, dict, f"messages[{n}]"), f"messages[{n}].") for n, value in enumerate(values))


def _message(value: dict[str, Any], path: str) -> Message:
    fields = Fields(value, path)
    role = fields.required("role", str)
    if role not in ROLES:
        refuse(path + "role", f"is {shorten(role)}; give one of {', '.join(ROLES)}")
    calls = fields.get("tool_calls", list) or []
    if calls and role != "assistant":
        refuse(path + "tool_calls", f"are of the assistant; the role is {role!r}")
    content = _content(fields.take("content"), path + "content")
    if content is None and role != "assistant":
        refuse(path + "content", "is missing; give a text", "missing_required_parameter")
    message: dict[str, Any] = {"role": "system" if role == "developer" else role, "content": content}
    if calls:
        message["tool_calls"] = [_call(call, f"{path}tool_calls[{n}]") for n, call in enumerate(calls)]
    if role == "tool":
        message["tool_call_id"] = fields.required("tool_call_id", str)
    name = fields.get("name", str)
    if name is not None:
        message["name"] = name
    return message


def _content(value: Any, path: str) -> str | None:
    """Text, or the text of all parts."""
    if value is None or isinstance(value, str):
        return value
    texts = []
    for index, part in enumerate(typed(value, list, path)):
        fields = Fields(typed(part, dict, f"{path}[{index}]"), f"{path}[{index}].")
        kind = fields.required("type", str)
        if kind != "text":
            refuse(f"{path}[{index}].type", f"is {shorten(kind)}; only texts are supported")
        texts.append(fields.required("text", str))
    return "".join(texts)


def _call(value: Any, path: str) -> dict[str, Any]:
    fields = Fields(typed(value, dict, path), path + ".")
    kind = fields.get("type", str) or "function"
    if kind != "function":
        refuse(path + ".type", f"is {shorten(kind)}; only functions are supported")
    function = Fields(fields.required("function", dict), path + ".function.")
    called = {"name": function.required("name", str), "arguments": function.required("arguments", str)}
    return {"id": fields.required("id", str), "type": "function", "function": called}
