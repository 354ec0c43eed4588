"""Requests to `/v1/chat/completions` and `/v1/completions`, checked: what is not supported is refused by name.

A field that would change the answer is refused, and so is an unknown one. Of a message, what no template reads is
ignored: clients send back all they have of an answer. Messages come in one form:

    {"role": "user", "content": [{"type": "text", "text": "2 + "}, {"type": "text", "text": "3?"}]}
    ──► {"role": "user", "content": "2 + 3?"}
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_rl.chat import kwargs_refusal
from megatron_rl.endpoint.fields import ApiError, Fields, refuse, token_ids, typed
from megatron_rl.endpoint.options import Options, read_options, refuse_unread
from megatron_rl.environments.tool_calls import Tools, checked_tools
from megatron_rl.errors import shorten
from megatron_rl.inference.sampler import MOST_SCORED
from megatron_rl.types import Message

MAX_ANSWERS, MAX_VARIABLES = 256, 64
"""Choices of all prompts together; variables of a chat template."""
ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass(frozen=True)
class ChatRequest:
    """A request of `/v1/chat/completions`."""

    model: str
    options: Options
    messages: tuple[Message, ...]
    tools: Tools = ()
    reads_calls: bool = False
    """The answer is searched for calls of the tools."""
    forced: Tools = ()
    """The answer is a call of one of these."""
    one_call: bool = False
    """It ends with its first call."""
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the chat template, beside the run's."""
    echo: bool = False
    shown: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the request that its response repeats."""


@dataclass(frozen=True)
class TextRequest:
    """A request of `/v1/completions`: each prompt is a text or token ids."""

    model: str
    options: Options
    prompts: tuple[str | tuple[int, ...], ...]
    echo: bool = False
    """The prompt stands before each answer."""


@dataclass(frozen=True)
class TokenizeRequest:
    """A request of `/tokenize`: a text or messages."""

    prompt: str = ""
    adds_special_tokens: bool = True
    """Those that stand before a text; a chat template writes its own."""
    messages: tuple[Message, ...] = ()
    tools: Tools = ()
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    names: bool = False
    """The tokens come as the vocabulary spells them, too."""


def read_chat(body: Any, vocab_size: int) -> ChatRequest:
    """Read the request in a parsed body; `ApiError` names the field that is wrong. Ids are below ``vocab_size``."""
    fields = body_fields(body)
    messages = _messages(fields.required("messages", list))
    tools, choice, forced = _tools(fields)
    several = fields.get("parallel_tool_calls", bool)
    model, logprobs = fields.required("model", str), fields.get("logprobs", bool)
    most = fields.number("top_logprobs", int, 0, MOST_SCORED)
    if most and not logprobs:
        refuse("top_logprobs", f"is {most}, and 'logprobs' is not true; set it")
    limits = [fields.number(name, int, 1) for name in ("max_completion_tokens", "max_tokens")]
    max_new_tokens = min((limit for limit in limits if limit is not None), default=None)
    template_kwargs = _template_kwargs(fields)
    options = read_options(fields, most or 0 if logprobs else None, max_new_tokens, vocab_size)
    one_call = bool(tools) and (several is False or choice == "function")
    if forced and options.shape is not None:
        refuse("tool_choice", f"forces a call, and {options.shape.param!r} another answer; give one of them")
    reads_calls = bool(tools) and choice != "none"
    return ChatRequest(model, options, messages, tools, reads_calls, forced, one_call, template_kwargs)


def read_text(body: Any, vocab_size: int) -> TextRequest:
    """Read the request in a parsed body; `ApiError` names the field that is wrong. Ids are below ``vocab_size``."""
    fields = body_fields(body)
    prompts = _prompts(fields.take("prompt"), vocab_size)
    model, logprobs = fields.required("model", str), fields.number("logprobs", int, 0, MOST_SCORED)
    echo = bool(fields.get("echo", bool))
    best_of = fields.number("best_of", int, 1)
    options = read_options(fields, logprobs, fields.number("max_tokens", int, 1), vocab_size, echo)
    n = options.n
    if len(prompts) * n > MAX_ANSWERS:
        refuse("n", f"is {n} for each of {len(prompts)} prompts; ask for at most {MAX_ANSWERS} answers at once")
    if best_of not in (None, n):
        refuse("best_of", f"is {best_of}, which is not supported; ask for 'n' answers and choose among them")
    return TextRequest(model, options, prompts, echo)


def read_tokenize(body: Any) -> tuple[str | None, TokenizeRequest]:
    """Read the model, if any is named, and the request in a parsed body; errors as of `read_chat`."""
    fields = body_fields(body)
    model, names = fields.get("model", str), bool(fields.get("return_token_strs", bool))
    special = fields.get("add_special_tokens", bool)
    if fields.take("messages") is None:
        asked = TokenizeRequest(fields.required("prompt", str), special is not False, names=names)
    else:
        messages, tools = _messages(fields.required("messages", list)), _checked_tools(fields)
        template_kwargs = _template_kwargs(fields)
        if special:
            refuse("add_special_tokens", "is true, and a chat template writes its own; leave it out")
        if fields.get("add_generation_prompt", bool) is False:
            template_kwargs = {**template_kwargs, "add_generation_prompt": False}
        asked = TokenizeRequest("", False, messages, tools, template_kwargs, names)
    refuse_unread(fields)
    return model, asked


def read_detokenize(body: Any, vocab_size: int) -> tuple[str | None, tuple[int, ...]]:
    """Read the model, if any is named, and the token ids in a parsed body; errors as of `read_chat`."""
    fields = body_fields(body)
    model, tokens = fields.get("model", str), token_ids(fields.required("tokens", list), vocab_size, "tokens")
    refuse_unread(fields)
    return model, tokens


def body_fields(body: Any) -> Fields:
    """Return the fields of a parsed body, which must be an object."""
    if not isinstance(body, dict):
        raise ApiError(400, "invalid_type", f"the body is {shorten(body)}; give a JSON object")
    return Fields(body)


def _template_kwargs(fields: Fields) -> dict[str, Any]:
    given = fields.get("chat_template_kwargs", dict) or {}
    if len(given) > MAX_VARIABLES:
        refuse("chat_template_kwargs", f"has {len(given):,} variables; give at most {MAX_VARIABLES}")
    refusal = kwargs_refusal(given)
    if refusal is not None:
        refuse("chat_template_kwargs", refusal)
    return given


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
    return token_ids(value, vocab_size, param)


def _tools(fields: Fields) -> tuple[Tools, str, Tools]:
    """The tools that the template shows; auto, none, required or function; and those of which one must be called."""
    tools, choice = _checked_tools(fields), fields.take("tool_choice")
    if choice in (None, "auto", "none"):
        return tools, choice or "auto", ()
    if choice == "required":
        if not tools:
            refuse("tool_choice", "is 'required', and there are no 'tools' to call")
        return tools, choice, tools
    if not isinstance(choice, dict):
        refuse("tool_choice", f"is {shorten(choice)}; give 'auto', 'none', 'required' or a function")
    function = Fields(choice, "tool_choice.").required("function", dict)
    name = Fields(function, "tool_choice.function.").required("name", str)
    forced = tuple(tool for tool in tools if tool["function"]["name"] == name)
    if not forced:
        refuse("tool_choice.function.name", f"is {shorten(name)}, which is none of 'tools'")
    return tools, "function", forced


def _checked_tools(fields: Fields) -> Tools:
    try:
        return checked_tools(fields.get("tools", list) or [])
    except ValueError as error:
        raise ApiError(400, "invalid_tools", f"'tools': {error}", "tools") from error


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
    content = text_of(fields.take("content"), path + "content")
    if content is None and role != "assistant":
        refuse(path + "content", "is missing; give a text", "missing_required_parameter")
    message: dict[str, Any] = {"role": "system" if role == "developer" else role, "content": content}
    thought = value.get("reasoning_content")
    if role == "assistant" and isinstance(thought, str) and thought:
        message["reasoning_content"] = thought
    if calls:
        message["tool_calls"] = [_call(call, f"{path}tool_calls[{n}]") for n, call in enumerate(calls)]
    if role == "tool":
        message["tool_call_id"] = fields.required("tool_call_id", str)
    name = fields.get("name", str)
    if name is not None:
        message["name"] = name
    return message


def text_of(value: Any, path: str, kinds: Collection[str] = ("text",)) -> str | None:
    """Return a text, or the text of all parts, which must be of ``kinds``; None for none."""
    if value is None or isinstance(value, str):
        return value
    texts = []
    for index, part in enumerate(typed(value, list, path)):
        fields = Fields(typed(part, dict, f"{path}[{index}]"), f"{path}[{index}].")
        kind = fields.required("type", str)
        if kind not in kinds:
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
