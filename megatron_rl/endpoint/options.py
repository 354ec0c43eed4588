"""The fields that both kinds of request have: how answers are drawn, where they end, and what comes back of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_rl.endpoint.fields import Fields, refuse, token_ids, typed
from megatron_rl.endpoint.structured import Shape, read_shape
from megatron_rl.errors import shorten
from megatron_rl.inference.sampler import MOST_SCORED
from megatron_rl.types import Constraints

MAX_CHOICES = 128
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 256
MAX_BIASES = 1024
MIN_REPETITION = 0.01
MIN_TEMPERATURE = 1e-3
"""Logits divided by less have log-probs that are not finite."""
IGNORED = frozenset({
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "prediction",
})  # fmt: skip
"""Fields that change no answer."""
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "modalities": (["text"],), "continue_final_message": (False,), "suffix": ("",), "functions": ([],),
    "function_call": ("none",), "audio": (), "reasoning_effort": (), "verbosity": (), "web_search_options": (),
}  # fmt: skip
"""Fields that are not supported, and the values with which they change nothing."""


@dataclass(frozen=True)
class Drawing:
    """The sampling of an answer and where it ends; None: the caller leaves it open."""

    max_new_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    constraints: Constraints | None = None
    """None: the distribution is the model's. Its grammar is made of `Options.shape`."""
    constrained_by: str = ""
    """The first field that asks for them."""


@dataclass(frozen=True)
class Options:
    """The options of both kinds of request."""

    n: int = 1
    seed: int | None = None
    stream: bool = False
    include_usage: bool = False
    logprobs: bool = False
    top_logprobs: int = 0
    """How many of the likeliest tokens come with them."""
    prompt_logprobs: int | None = None
    """The same for the prompt's tokens, which have log-probs unless it is None."""
    shape: Shape | None = None
    """What the answer has to look like; None: any text."""
    drawing: Drawing = Drawing()
    returns_ids: bool = False
    """The response has the ids of its tokens and of the prompt's."""


def read_options(
    fields: Fields, logprobs: int | None, max_new_tokens: int | None, vocab_size: int, echo: bool = False
) -> Options:
    """Read the fields that both kinds have; everything else of the request has been read before.

    ``logprobs``: of how many of the likeliest tokens; None: of no token. With ``echo`` the prompt has them, too.
    """
    of_prompt = fields.number("prompt_logprobs", int, 0, MOST_SCORED)
    stream_options = Fields(fields.get("stream_options", dict) or {}, "stream_options.")
    options = Options(
        n=fields.number("n", int, 1, MAX_CHOICES) or 1,
        seed=fields.number("seed", int, -(2**63), 2**63 - 1),
        stream=bool(fields.get("stream", bool)),
        include_usage=bool(stream_options.get("include_usage", bool)),
        logprobs=logprobs is not None,
        top_logprobs=logprobs or 0,
        prompt_logprobs=max((n for n in (of_prompt, logprobs if echo else None) if n is not None), default=None),
        shape=read_shape(fields),
        drawing=_drawing(fields, max_new_tokens, vocab_size),
        returns_ids=bool(fields.get("return_token_ids", bool)),
    )
    if options.stream and (echo or options.prompt_logprobs is not None):
        refuse("stream", "is true, and the prompt does not come in a stream; leave out 'echo' and 'prompt_logprobs'")
    refuse_unread(fields)
    return options


def _drawing(fields: Fields, max_new_tokens: int | None, vocab_size: int) -> Drawing:
    temperature, top_p = fields.number("temperature", float, 0, 100), fields.number("top_p", float, 0, 1)
    if temperature and temperature < MIN_TEMPERATURE:
        refuse("temperature", f"is {temperature}; give 0 for the likeliest token, or {MIN_TEMPERATURE} at least")
    if top_p == 0:
        refuse("top_p", "is 0, which leaves no token; give a number above 0, or temperature 0")
    top_k = fields.number("top_k", int, -1)
    repetition = fields.number("repetition_penalty", float, MIN_REPETITION, 1 / MIN_REPETITION)
    asked = {
        "logit_bias": _logit_bias(fields, vocab_size),
        "presence_penalty": fields.number("presence_penalty", float, -2, 2),
        "frequency_penalty": fields.number("frequency_penalty", float, -2, 2),
        "repetition_penalty": None if repetition == 1 else repetition,
        "min_tokens": fields.number("min_tokens", int, 0),
        "ignores_end": fields.get("ignore_eos", bool),
    }
    constraints = {name: value for name, value in asked.items() if value}
    return Drawing(
        max_new_tokens, temperature, top_p, top_k if top_k is None else max(top_k, 0),
        fields.number("min_p", float, 0, 1), _stop(fields.take("stop")), _token_ids(fields, vocab_size),
        Constraints(**constraints) if constraints else None,
        next(iter(constraints), "").replace("ignores_end", "ignore_eos"),
    )  # fmt: skip


def _logit_bias(fields: Fields, vocab_size: int) -> tuple[tuple[int, float], ...]:
    given = fields.get("logit_bias", dict) or {}
    if len(given) > MAX_BIASES:
        refuse("logit_bias", f"has {len(given):,} tokens; give at most {MAX_BIASES:,}")
    biases = Fields(given, "logit_bias.")
    for name in given:
        # By their digits: "１" and "1_0" are whole numbers for Python.
        if not (name.isascii() and name.isdecimal() and len(name) < 10 and int(name) < vocab_size):
            refuse("logit_bias", f"has the key {shorten(name)}; give token ids from 0 to {vocab_size - 1}")
    return tuple((int(name), bias) for name in given if (bias := biases.number(name, float, -100, 100)))


def _token_ids(fields: Fields, vocab_size: int) -> tuple[int, ...]:
    given = fields.get("stop_token_ids", list) or []
    if len(given) > MAX_STOPS:
        refuse("stop_token_ids", f"has {len(given)} ids; give at most {MAX_STOPS}")
    return tuple(dict.fromkeys(token_ids(given, vocab_size, "stop_token_ids")))


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


def refuse_unread(fields: Fields, unsupported: Mapping[str, tuple[Any, ...]] = UNSUPPORTED) -> None:
    """Refuse what nobody has read, unless it changes nothing."""
    for name, neutral in unsupported.items():
        value = fields.take(name)
        if value is not None and not any(type(value) is type(same) and value == same for same in neutral):
            instead = f"leave it out{f', or give {neutral[0]!r}' if neutral else ''}"
            refuse(name, f"is {shorten(value)}, which is not supported; {instead}", "unsupported_parameter")
    for name in sorted(fields.unread - IGNORED):
        refuse(name, "is no field that is known here; leave it out", "unknown_parameter")
