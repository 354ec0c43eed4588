"""Anthropic's `/v1/messages`: blocks of content to chat messages, and an answer to blocks.

    assistant  [{"type": "tool_use", "id": "call_1_0", "name": "add", "input": {"a": 1}}]
    user       [{"type": "tool_result", "tool_use_id": "call_1_0", "content": "3"}, {"type": "text", "text": "So?"}]
    ──►
    assistant  tool_calls [{"id": "call_1_0", "function": {"name": "add", "arguments": "{\"a\": 1}"}}]
    tool       "3", of call_1_0
    user       "So?"
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from megatron_rl.endpoint.answers import Choice
from megatron_rl.endpoint.dialects import SAME, THOUGHT, BlockWriter, Event, without_none
from megatron_rl.endpoint.fields import ApiError, Fields, refuse, typed
from megatron_rl.endpoint.options import refuse_unread
from megatron_rl.endpoint.protocol import ChatRequest, TokenizeRequest, body_fields, read_chat, text_of
from megatron_rl.errors import shorten
from megatron_rl.json_text import dumps

NAMES = {
    "stop": "stop_sequences",
    "response_format.json_schema": "output_config.format",
    "response_format": "output_config.format",
    "tool_choice.function": "tool_choice",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
}
"""Fields whose names are others in chat completions."""
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "container": (), "context_management": (), "mcp_servers": ([],), "inference_geo": (), "speed": ("standard",),
    "diagnostics": (), "user_profile_id": (), "workspace_id": (),
}  # fmt: skip
THINKING = {"disabled": False, "enabled": True, "adaptive": True}
CHOICES = {"auto": "auto", "any": "required", "none": "none"}
STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}
ERRORS = {401: "authentication_error", 404: "not_found_error", 410: "not_found_error", 413: "request_too_large"}


def is_messages(path: str) -> bool:
    """Return whether the client of a path expects Anthropic's errors."""
    return "/v1/messages" in path


def error_body(error: ApiError) -> dict[str, Any]:
    """Return an error in Anthropic's form."""
    kind = "invalid_request_error" if error.status < 500 else "overloaded_error"
    message = error.body["error"]["message"]
    return {"type": "error", "error": {"type": ERRORS.get(error.status, kind), "message": message}, "request_id": None}


# -- requests ----------------------------------------------------------------------------------------


def read_messages(body: Any, vocab_size: int) -> ChatRequest:
    """Read the request in a parsed body; `ApiError` names the field that is wrong, see `NAMES` for the others."""
    fields = body_fields(body)
    choice, is_single = _tool_choice(fields)
    chat = {
        **{name: fields.take(name) for name in (*SAME, "max_tokens")},
        "messages": [*_system(fields), *_messages(fields.required("messages", list))],
        "tools": [_tool(tool, f"tools[{n}]") for n, tool in enumerate(fields.get("tools", list) or [])] or None,
        "tool_choice": choice,
        "parallel_tool_calls": False if is_single else None,
        "stop": fields.get("stop_sequences", list),
        "response_format": _format(fields),
    }
    chat["chat_template_kwargs"] = _template_kwargs(fields, chat["chat_template_kwargs"])
    fields.take("cache_control")
    refuse_unread(fields, UNSUPPORTED)
    return read_chat(without_none(chat), vocab_size)


def read_count(body: Any, vocab_size: int) -> tuple[str, TokenizeRequest]:
    """Read a request whose prompt is to be counted; the same fields."""
    asked = read_messages(body, vocab_size)
    return asked.model, TokenizeRequest("", False, asked.messages, asked.tools, asked.template_kwargs)


def _system(fields: Fields) -> list[dict[str, Any]]:
    text = text_of(fields.take("system"), "system")
    return [{"role": "system", "content": text}] if text else []


def _messages(values: list[Any]) -> Iterator[dict[str, Any]]:
    if not values:
        refuse("messages", "is empty; give at least one message")
    role = ""
    for number, value in enumerate(values):
        path = f"messages[{number}]"
        fields = Fields(typed(value, dict, path), path + ".")
        role, content = fields.required("role", str), fields.take("content")
        if content is None:
            refuse(path + ".content", "is missing; give a text or blocks", "missing_required_parameter")
        if role == "assistant":
            yield _assistant(content, path + ".content")
        elif role == "user":
            yield from _user(content, path + ".content")
        elif role == "system":
            yield {"role": role, "content": text_of(content, path + ".content")}
        else:
            refuse(path + ".role", f"is {shorten(role)}; give user, assistant or system")
    if role == "assistant":
        why = "begins the answer, which is not supported; end with a message of the user"
        refuse(path, why, "unsupported_parameter")


def _blocks(content: Any, path: str) -> Iterator[tuple[str, Fields, str]]:
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    for number, block in enumerate(typed(content, list, path)):
        own = f"{path}[{number}]"
        fields = Fields(typed(block, dict, own), own + ".")
        yield fields.required("type", str), fields, own


def _user(content: Any, path: str) -> Iterator[dict[str, Any]]:
    """Results of tools are messages of their own, text before and behind them too."""
    texts: list[str] = []
    is_empty = True
    for kind, block, own in _blocks(content, path):
        if kind == "text":
            texts.append(block.required("text", str))
        elif kind == "tool_result":
            if texts:
                yield {"role": "user", "content": "".join(texts)}
            result = text_of(block.take("content"), own + ".content") or ""
            yield {"role": "tool", "tool_call_id": block.required("tool_use_id", str), "content": result}
            texts, is_empty = [], False
        else:
            refuse(own + ".type", f"is {shorten(kind)}; only text and tool_result are supported")
    if texts or is_empty:
        yield {"role": "user", "content": "".join(texts)}


def _assistant(content: Any, path: str) -> dict[str, Any]:
    parts: dict[str, list[str]] = {"text": [], "thinking": []}
    calls = []
    for kind, block, own in _blocks(content, path):
        if kind in parts:
            parts[kind].append(block.required(kind, str))
        elif kind == "tool_use":
            called = {"name": block.required("name", str), "arguments": dumps(block.required("input", dict))}
            calls.append({"id": block.required("id", str), "type": "function", "function": called})
        else:
            refuse(own + ".type", f"is {shorten(kind)}; only text, thinking and tool_use are supported")
    message: dict[str, Any] = {"role": "assistant", "content": "".join(parts["text"])}
    if parts["thinking"]:
        message["reasoning_content"] = "".join(parts["thinking"])
    return message | ({"tool_calls": calls} if calls else {})


def _tool(value: Any, path: str) -> dict[str, Any]:
    fields = Fields(typed(value, dict, path), path + ".")
    kind = fields.get("type", str) or "custom"
    if kind != "custom":
        refuse(path + ".type", f"is {shorten(kind)}; only tools of the client are supported")
    function = {
        "name": fields.required("name", str), "description": fields.get("description", str),
        "parameters": fields.required("input_schema", dict),
    }  # fmt: skip
    return {"type": "function", "function": without_none(function)}


def _tool_choice(fields: Fields) -> tuple[Any, bool]:
    """Chat completions' choice, and whether there is to be one call at most."""
    given = fields.get("tool_choice", dict)
    if given is None:
        return None, False
    choice = Fields(given, "tool_choice.")
    kind, is_single = choice.required("type", str), bool(choice.get("disable_parallel_tool_use", bool))
    if kind == "tool":
        return {"type": "function", "function": {"name": choice.required("name", str)}}, is_single
    if kind not in CHOICES:
        refuse("tool_choice.type", f"is {shorten(kind)}; give auto, any, tool or none")
    return CHOICES[kind], is_single


def _format(fields: Fields) -> dict[str, Any] | None:
    config = Fields(fields.get("output_config", dict) or {}, "output_config.")
    given = config.get("format", dict)
    for name in sorted(config.unread):
        refuse(f"output_config.{name}", "is not supported; leave it out", "unsupported_parameter")
    if given is None:
        return None
    return {"type": given.get("type", "json_schema"), "json_schema": {"schema": given.get("schema")}}


def _template_kwargs(fields: Fields, given: Any) -> Any:
    """With Anthropic's switch as the variable that most templates have for it."""
    thinking = fields.get("thinking", dict)
    if thinking is None:
        return given
    kind = Fields(thinking, "thinking.").required("type", str)
    if kind not in THINKING:
        refuse("thinking.type", f"is {shorten(kind)}; give {', '.join(THINKING)}")
    return {"enable_thinking": THINKING[kind]} | typed(given or {}, dict, "chat_template_kwargs")


# -- answers -----------------------------------------------------------------------------------------


class MessagesWriter(BlockWriter):
    """A message of Anthropic's API, or its events."""

    def _whole(self, choice: Choice) -> dict[str, Any]:
        content: list[dict[str, Any]] = []
        if choice.thought:
            content.append({"type": "thinking", "thinking": choice.thought, "signature": ""})
        if choice.text or not choice.tool_calls:
            content.append({"type": "text", "text": choice.text})
        content += [_tool_use(call, json.loads(call["function"]["arguments"])) for call in choice.tool_calls]
        return self._message(content) | self._ending(choice) | {"usage": self._usage(choice)}

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        own = {"id": f"msg_{self.id}", "type": "message", "role": "assistant", "model": self._asked.model}
        return own | {"content": content, "stop_reason": None, "stop_sequence": None}

    def _ending(self, choice: Choice) -> dict[str, Any]:
        reason, stop = STOP_REASONS.get(choice.finish_reason, "end_turn"), None
        if choice.finish_reason == "stop":
            text = self._tokenizer.decode(choice.completion.token_ids)
            found = [string for string in self._asked.options.drawing.stop if string in text]
            if found:
                reason, stop = "stop_sequence", min(found, key=text.find)
        return {"stop_reason": reason, "stop_sequence": stop}

    def _usage(self, choice: Choice | None) -> dict[str, int]:
        """Anthropic counts tokens from the cache apart from the others; they are known with the answer."""
        cached = choice.completion.cached_tokens if choice else 0
        return {
            "input_tokens": self._num_prompt_tokens - cached, "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached, "output_tokens": len(choice.completion.token_ids) if choice else 0,
        }  # fmt: skip

    def _begin(self) -> list[Event]:
        return [{"type": "message_start", "message": self._message([]) | {"usage": self._usage(None)}}]

    def _opened(self, kind: str) -> list[Event]:
        empty = {"type": "text", "text": ""}
        return self._start({"type": "thinking", "thinking": "", "signature": ""} if kind == THOUGHT else empty)

    def _start(self, block: dict[str, Any]) -> list[Event]:
        return [{"type": "content_block_start", "index": self._index, "content_block": block}]

    def _more(self, kind: str, text: str) -> list[Event]:
        name = "thinking" if kind == THOUGHT else "text"
        return self._delta({"type": f"{name}_delta", name: text})

    def _delta(self, delta: dict[str, Any]) -> list[Event]:
        return [{"type": "content_block_delta", "index": self._index, "delta": delta}]

    def _close(self, kind: str) -> list[Event]:
        return [{"type": "content_block_stop", "index": self._index}]

    def _call(self, number: int, call: Mapping[str, Any]) -> list[Event]:
        arguments = {"type": "input_json_delta", "partial_json": call["function"]["arguments"]}
        return [*self._start(_tool_use(call, {})), *self._delta(arguments), *self._close("")]

    def _finish(self, choice: Choice) -> list[Event]:
        delta = {"type": "message_delta", "delta": self._ending(choice), "usage": self._usage(choice)}
        return [delta, {"type": "message_stop"}]

    def _failed(self, error: ApiError) -> Event:
        return error_body(error)


def _tool_use(call: Mapping[str, Any], arguments: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": arguments}
