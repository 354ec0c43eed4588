"""Requests to `/v1/chat/completions` and `/v1/completions`, checked: what is not supported is refused by name.

Fields that only say who asks, or how to keep house, are read over (`HARMLESS`). A field that would change the answer
and is not supported is refused, and so is one that nobody knows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron_rl.endpoint.fields import ApiError, Fields, refuse, typed
from megatron_rl.endpoint.messages import read_messages
from megatron_rl.environments.tool_calls import Tools, checked_tools
from megatron_rl.errors import shorten
from megatron_rl.types import Message

MAX_CHOICES = 128
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 256
MAX_PROMPTS = 256
MAX_ANSWERS = 256
"""Choices of all prompts together."""
LEAST_TEMPERATURE = 1e-3
"""Logits divided by less have log-probs that are no numbers."""
HARMLESS = frozenset({
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "prediction",
})  # fmt: skip
"""They change no answer."""
NEUTRAL: dict[str, tuple[Any, ...]] = {
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
class Asked:
    """How answers are asked for; None: the caller leaves it open."""

    model: str
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

    asked: Asked
    messages: tuple[Message, ...]
    tools: Tools = ()
    reads_calls: bool = False
    """The answer is searched for calls of the tools."""


@dataclass(frozen=True)
class TextRequest:
    """Of `/v1/completions`: each prompt is a text or token ids."""

    asked: Asked
    prompts: tuple[str | tuple[int, ...], ...]


def read_chat(body: Any) -> ChatRequest:
    """The request in a parsed body.

    Raises:
        ApiError: 400, names the field.
    """
    fields = _fields(body)
    messages = read_messages(fields.required("messages", list))
    tools, reads_calls = _tools(fields)
    logprobs = bool(fields.get("logprobs", bool))
    limits = [fields.number(name, int, 1) for name in ("max_completion_tokens", "max_tokens")]
    asked = _asked(fields, logprobs, min((limit for limit in limits if limit is not None), default=None))
    return ChatRequest(asked, messages, tools, reads_calls)


def read_text(body: Any, vocab_size: int) -> TextRequest:
    """The request in a parsed body; token ids are below ``vocab_size``.

    Raises:
        ApiError: 400, names the field.
    """
    fields = _fields(body)
    prompts = _prompts(fields.take("prompt"), vocab_size)
    logprobs = fields.get("logprobs", int)
    if logprobs:
        refuse("logprobs", f"is {shorten(logprobs)}; 0 gives those of the sampled tokens, others are not known")
    best_of = fields.number("best_of", int, 1)
    asked = _asked(fields, logprobs is not None, fields.number("max_tokens", int, 1))
    if len(prompts) * asked.n > MAX_ANSWERS:
        refuse("n", f"is {asked.n} for each of {len(prompts)} prompts; ask for at most {MAX_ANSWERS} answers at once")
    if best_of not in (None, asked.n):
        refuse("best_of", f"is {best_of}, which is not supported; ask for 'n' answers and choose among them")
    return TextRequest(asked, prompts)


def _fields(body: Any) -> Fields:
    if not isinstance(body, dict):
        raise ApiError(400, "invalid_type", f"the body is {shorten(body)}; give a JSON object")
    return Fields(body)


def _asked(fields: Fields, logprobs: bool, max_new_tokens: int | None) -> Asked:
    """The fields of both kinds; everything else of the request has been read before."""
    options = Fields(fields.get("stream_options", dict) or {}, "stream_options.")
    top_k = fields.number("top_k", int, -1)
    asked = Asked(
        model=fields.required("model", str),
        n=fields.number("n", int, 1, MAX_CHOICES) or 1,
        max_new_tokens=max_new_tokens,
        temperature=_temperature(fields),
        top_p=_share(fields),
        top_k=top_k if top_k is None else max(top_k, 0),
        seed=fields.number("seed", int, -(2**63), 2**63 - 1),
        stop=_stop(fields.take("stop")),
        stream=bool(fields.get("stream", bool)),
        include_usage=bool(options.get("include_usage", bool)),
        logprobs=logprobs,
    )
    _refuse_others(fields)
    return asked


def _temperature(fields: Fields) -> float | None:
    temperature = fields.number("temperature", float, 0, 100)
    if temperature and temperature < LEAST_TEMPERATURE:
        refuse("temperature", f"is {temperature}; give 0 for the likeliest token, or {LEAST_TEMPERATURE} at least")
    return temperature


def _share(fields: Fields) -> float | None:
    top_p = fields.number("top_p", float, 0, 1)
    if top_p == 0:
        refuse("top_p", "is 0, which leaves no token; give a number above 0, or temperature 0")
    return top_p


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


def _prompts(value: Any, vocab_size: int) -> tuple[str | tuple[int, ...], ...]:
    if value is None:
        refuse("prompt", "is missing; give a text, or token ids", "missing_required_parameter")
    several = isinstance(value, list) and value and not all(type(item) is int for item in value)
    prompts = value if several else [value]
    if len(prompts) > MAX_PROMPTS:
        refuse("prompt", f"has {len(prompts)} prompts; give at most {MAX_PROMPTS}")
    return tuple(_prompt(each, vocab_size, f"prompt[{n}]" if several else "prompt") for n, each in enumerate(prompts))


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
    """The tools that the model is told of, and whether its calls are looked for."""
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


def _refuse_others(fields: Fields) -> None:
    for name, neutral in NEUTRAL.items():
        value = fields.take(name)
        if value is not None and not any(type(value) is type(same) and value == same for same in neutral):
            instead = f"leave it out{f', or give {neutral[0]!r}' if neutral else ''}"
            refuse(name, f"is {shorten(value)}, which is not supported; {instead}", "unsupported_parameter")
    unknown = sorted(fields.unread - HARMLESS)
    if unknown:
        refuse(unknown[0], "is no field that is known here; leave it out", "unknown_parameter")
