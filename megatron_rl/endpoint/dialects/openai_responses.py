"""OpenAI's `/v1/responses`: items to chat messages, and an answer to items. Nothing is stored between requests.

    {"type": "function_call", "call_id": "call_1_0", "name": "add", "arguments": "{\"a\": 1}"}
    {"type": "function_call_output", "call_id": "call_1_0", "output": "3"}
    ──►
    assistant  tool_calls [{"id": "call_1_0", "function": {"name": "add", "arguments": "{\"a\": 1}"}}]
    tool       "3", of call_1_0

A thought, a text and calls that follow each other are one message of the assistant.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megatron_rl.endpoint.answers import Choice
from megatron_rl.endpoint.dialects import SAME, TEXT, THOUGHT, BlockWriter, Event, without_none
from megatron_rl.endpoint.fields import ApiError, Fields, refuse, typed
from megatron_rl.endpoint.options import refuse_unread
from megatron_rl.endpoint.protocol import ChatRequest, body_fields, read_chat, text_of
from megatron_rl.errors import shorten

NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "tool_choice.function": "tool_choice",
}
"""Fields whose names are others in chat completions."""
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "background": (False,), "truncation": ("disabled",), "conversation": (), "prompt": (), "max_tool_calls": (),
    "moderation": (), "context_management": ([],), "top_logprobs": (0,),
}  # fmt: skip
ROLES = ("system", "developer", "user", "assistant")
PARTS = {THOUGHT: "reasoning_text", TEXT: "output_text"}
TEXTS = ("input_text", "output_text", "text")


def read_responses(body: Any, vocab_size: int) -> ChatRequest:
    """Read the request in a parsed body; `ApiError` names the field that is wrong, see `NAMES` for the others."""
    fields = body_fields(body)
    if fields.take("previous_response_id") is not None:
        why = "is not supported: responses are not stored; send the whole history as 'input'"
        refuse("previous_response_id", why, "unsupported_parameter")
    if fields.take("input") is None:
        refuse("input", "is missing; give a text or items", "missing_required_parameter")
    instructions, tools = fields.get("instructions", str), fields.get("tools", list) or []
    choice, text = fields.take("tool_choice"), fields.get("text", dict) or {}
    chat = {
        **{name: fields.take(name) for name in (*SAME, "parallel_tool_calls")},
        "max_completion_tokens": fields.take("max_output_tokens"),
        "messages": [
            *([{"role": "system", "content": instructions}] if instructions else []), *_messages(fields.take("input")),
        ],
        "tools": [_tool(tool, f"tools[{n}]") for n, tool in enumerate(tools)] or None,
        "tool_choice": _tool_choice(choice),
        "response_format": _format(text),
    }  # fmt: skip
    _check_others(fields)
    shown = {
        "instructions": instructions, "tools": tools, "tool_choice": choice or "auto", "text": text,
        "parallel_tool_calls": chat["parallel_tool_calls"] is not False,
        "max_output_tokens": chat["max_completion_tokens"], "metadata": fields.take("metadata") or {},
        **{name: chat[name] for name in ("temperature", "top_p")},
    }  # fmt: skip
    return replace(read_chat(without_none(chat), vocab_size), shown=shown)


def _check_others(fields: Fields) -> None:
    """Refuse what would change the answer."""
    for name, value in (fields.get("reasoning", dict) or {}).items():
        if value is not None:
            why = "is not supported; switch thoughts on or off with 'chat_template_kwargs'"
            refuse(f"reasoning.{name}", why, "unsupported_parameter")
    for value in fields.get("include", list) or []:
        if value != "reasoning.encrypted_content":  # thoughts come as they are
            refuse("include", f"has {shorten(value)}, which is not supported; leave it out", "unsupported_parameter")
    for name in ("stream_options", "prompt_cache_options"):
        fields.take(name)
    refuse_unread(fields, UNSUPPORTED)


def _messages(value: Any) -> list[dict[str, Any]]:
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    messages: list[dict[str, Any]] = []
    for number, item in enumerate(typed(value, list, "input")):
        path = f"input[{number}]"
        fields = Fields(typed(item, dict, path), path + ".")
        kind = fields.get("type", str) or "message"
        if kind == "message":
            _add_message(messages, fields, path)
        elif kind == "function_call":
            called = {"name": fields.required("name", str), "arguments": fields.required("arguments", str)}
            call = {"id": fields.required("call_id", str), "type": "function", "function": called}
            _assistant(messages).setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            output = _text(fields, "output", path)
            messages.append({"role": "tool", "tool_call_id": fields.required("call_id", str), "content": output})
        elif kind == "reasoning":
            thought = text_of(fields.get("content", list), path + ".content", ("reasoning_text",))
            if thought:
                messages.append({"role": "assistant", "reasoning_content": thought})
        else:
            refuse(path + ".type", f"is {shorten(kind)}; give message, function_call or function_call_output")
    if not messages:
        refuse("input", "is empty; give at least one item")
    return messages


def _add_message(messages: list[dict[str, Any]], fields: Fields, path: str) -> None:
    role, content = fields.required("role", str), _text(fields, "content", path)
    if role not in ROLES:
        refuse(path + ".role", f"is {shorten(role)}; give one of {', '.join(ROLES)}")
    if role == "assistant":
        _assistant(messages, {"content", "tool_calls"})["content"] = content
    else:
        messages.append({"role": role, "content": content})


def _assistant(messages: list[dict[str, Any]], closed_by: set[str] = frozenset()) -> dict[str, Any]:
    """The last message if it is the assistant's and has nothing of ``closed_by``, else a new one."""
    if not messages or messages[-1]["role"] != "assistant" or closed_by & messages[-1].keys():
        messages.append({"role": "assistant"})
    return messages[-1]


def _text(fields: Fields, name: str, path: str) -> str:
    text = text_of(fields.take(name), f"{path}.{name}", TEXTS)
    if text is None:
        refuse(f"{path}.{name}", "is missing; give a text", "missing_required_parameter")
    return text


def _tool(value: Any, path: str) -> dict[str, Any]:
    fields = Fields(typed(value, dict, path), path + ".")
    kind = fields.required("type", str)
    if kind != "function":
        refuse(path + ".type", f"is {shorten(kind)}; only functions are supported")
    names = {"description": str, "parameters": dict}
    function = {"name": fields.required("name", str)} | {name: fields.get(name, kind) for name, kind in names.items()}
    return {"type": "function", "function": without_none(function)}


def _tool_choice(given: Any) -> Any:
    if not isinstance(given, dict):
        return given
    fields = Fields(given, "tool_choice.")
    kind = fields.required("type", str)
    if kind != "function":
        refuse("tool_choice.type", f"is {shorten(kind)}; give 'auto', 'none', 'required' or a function")
    return {"type": "function", "function": {"name": fields.required("name", str)}}


def _format(text: Mapping[str, Any]) -> dict[str, Any] | None:
    fields = Fields(text, "text.")
    given = fields.get("format", dict)
    if fields.get("verbosity", str) not in (None, "medium"):
        refuse("text.verbosity", "is not supported; leave it out", "unsupported_parameter")
    for name in sorted(fields.unread):
        refuse(f"text.{name}", "is no field that is known here; leave it out", "unknown_parameter")
    return given and {"type": given.get("type"), "json_schema": {"schema": given.get("schema")}}


# -- answers -----------------------------------------------------------------------------------------


class ResponsesWriter(BlockWriter):
    """A response of OpenAI's API, or its events. ``output_index`` counts blocks, each is an item."""

    def __init__(self, *of: Any) -> None:
        super().__init__(*of)
        self._num_events = 0
        self._said = ""
        """The text of the open item."""

    def _whole(self, choice: Choice) -> dict[str, Any]:
        """The usage has a thought's tokens as its text is encoded."""
        completion, is_cut = choice.completion, choice.finish_reason == "length"
        output = [self._item(THOUGHT, choice.thought)] if choice.thought else []
        if choice.text or not choice.tool_calls:
            output.append(self._item(TEXT, choice.text, "incomplete" if is_cut else "completed"))
        output += [self._call_item(number, call) for number, call in enumerate(choice.tool_calls)]
        num_sampled, num_thought = len(completion.token_ids), len(self._tokenizer.encode(choice.thought))
        usage = {
            "input_tokens": self._num_prompt_tokens,
            "input_tokens_details": {"cached_tokens": completion.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": num_sampled,
            "output_tokens_details": {"reasoning_tokens": num_thought},
            "total_tokens": self._num_prompt_tokens + num_sampled,
        }
        return self._response("incomplete" if is_cut else "completed", output, usage)

    def _response(self, status: str, output: list[dict[str, Any]], usage: dict[str, Any] | None) -> dict[str, Any]:
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            "id": f"resp_{self.id}", "object": "response", "created_at": self._created, "status": status,
            "model": self._asked.model, "output": output, "usage": usage, "error": None, "incomplete_details": cut,
            "previous_response_id": None, "store": False, "truncation": "disabled", **self._asked.shown,
        }  # fmt: skip

    def _item(self, kind: str, text: str, status: str = "completed") -> dict[str, Any]:
        own = {"id": self._item_id(kind), "status": status, "content": [_part(kind, text)]}
        if kind == THOUGHT:
            return own | {"type": "reasoning", "summary": []}
        return own | {"type": "message", "role": "assistant"}

    def _item_id(self, kind: str) -> str:
        return f"{'rs' if kind == THOUGHT else 'msg'}_{self.id}"

    def _call_item(self, number: int, call: Mapping[str, Any]) -> dict[str, Any]:
        own = {"type": "function_call", "id": f"fc_{self.id}_{number}", "status": "completed"}
        return own | {"call_id": call["id"], **call["function"]}

    def _event(self, kind: str, **more: Any) -> Event:
        self._num_events += 1
        return {"type": kind, "sequence_number": self._num_events - 1, **more}

    def _begin(self) -> list[Event]:
        begun = self._response("in_progress", [], None)
        return [self._event(f"response.{name}", response=begun) for name in ("created", "in_progress")]

    def _opened(self, kind: str) -> list[Event]:
        self._said = ""
        item = self._item(kind, "", "in_progress") | {"content": []}
        added = self._event("response.output_item.added", output_index=self._index, item=item)
        return [added, self._of_part("response.content_part.added", kind, part=_part(kind, ""))]

    def _of_part(self, name: str, kind: str, **more: Any) -> Event:
        return self._event(name, item_id=self._item_id(kind), output_index=self._index, content_index=0, **more)

    def _more(self, kind: str, text: str) -> list[Event]:
        self._said += text
        return [self._of_part(f"response.{PARTS[kind]}.delta", kind, delta=text, logprobs=[])]

    def _close(self, kind: str) -> list[Event]:
        return [
            self._of_part(f"response.{PARTS[kind]}.done", kind, text=self._said, logprobs=[]),
            self._of_part("response.content_part.done", kind, part=_part(kind, self._said)),
            self._event("response.output_item.done", output_index=self._index, item=self._item(kind, self._said)),
        ]

    def _call(self, number: int, call: Mapping[str, Any]) -> list[Event]:
        item, place = self._call_item(number, call), {"output_index": self._index}
        empty, arguments = {"status": "in_progress", "arguments": ""}, item["arguments"]
        own = {"item_id": item["id"], **place}
        return [
            self._event("response.output_item.added", item=item | empty, **place),
            self._event("response.function_call_arguments.delta", delta=arguments, **own),
            self._event("response.function_call_arguments.done", arguments=arguments, name=item["name"], **own),
            self._event("response.output_item.done", item=item, **place),
        ]

    def _finish(self, choice: Choice) -> list[Event]:
        response = self._whole(choice)
        return [self._event(f"response.{response['status']}", response=response)]

    def _failed(self, error: ApiError) -> Event:
        """With the object in which OpenAI's client looks for an error."""
        said = error.body["error"]
        return self._event("error", **{name: said[name] for name in ("code", "message", "param")}, error=said)


def _part(kind: str, text: str) -> dict[str, Any]:
    part = {"type": PARTS[kind], "text": text}
    return part if kind == THOUGHT else part | {"annotations": [], "logprobs": []}
