"""Messages of a chat as clients send them, checked and in one form.

    {"role": "user", "content": [{"type": "text", "text": "2 + "}, {"type": "text", "text": "3?"}]}
    ──► {"role": "user", "content": "2 + 3?"}

What clients echo of an answer and no template reads (``refusal``, ``audio``, ``annotations``) is left out.
"""

from __future__ import annotations

from typing import Any

from megatron_rl.endpoint.fields import Fields, refuse, typed
from megatron_rl.errors import shorten
from megatron_rl.types import Message

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
"""What templates call those of OpenAI's API."""
_ECHOED = frozenset({"refusal", "audio", "annotations", "function_call"})


def read_messages(values: list[Any]) -> tuple[Message, ...]:
    """The messages of a request: role, content, and where there are any tool_calls, tool_call_id, name.

    Raises:
        ApiError: 400, names the message and its field.
    """
    if not values:
        refuse("messages", "is empty; give at least one message")
    return tuple(_message(typed(value, dict, f"messages[{n}]"), f"messages[{n}].") for n, value in enumerate(values))


def _message(value: dict[str, Any], path: str) -> Message:
    fields = Fields(value, path)
    said = fields.required("role", str)
    if said not in ROLES:
        refuse(path + "role", f"is {shorten(said)}; give one of {', '.join(ROLES)}")
    role = ROLES[said]
    calls = fields.get("tool_calls", list) or []
    if calls and role != "assistant":
        refuse(path + "tool_calls", f"are of the assistant; the role is {said!r}")
    content = _content(fields.take("content"), path + "content")
    if content is None and role != "assistant":
        refuse(path + "content", "is missing; give a text", "missing_required_parameter")
    message: dict[str, Any] = {"role": role, "content": content}
    if calls:
        message["tool_calls"] = [_call(call, f"{path}tool_calls[{n}]") for n, call in enumerate(calls)]
    if role == "tool":
        message["tool_call_id"] = fields.required("tool_call_id", str)
    name = fields.get("name", str)
    if name is not None:
        message["name"] = name
    unknown = sorted(fields.unread - _ECHOED)
    if unknown:
        refuse(path + unknown[0], "is no field of a message that is known here; leave it out", "unknown_parameter")
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
