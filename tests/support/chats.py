"""Chats, and a template that refuses some of them."""

from __future__ import annotations

STRICT = r"""
{{- bos_token }}
{%- if messages[0].role == "system" %}{{- raise_exception("System role not supported") }}{%- endif %}
{%- for message in messages %}
    {%- if (message.role == "user") != (loop.index0 % 2 == 0) %}
        {{- raise_exception("Conversation roles must alternate user/assistant/user/assistant/...") }}
    {%- endif %}
    {{- "<start_of_turn>" + ("model" if message.role == "assistant" else message.role) + "\n" }}
    {{- (message.content | trim) + "<end_of_turn>\n" }}
{%- endfor %}
{%- if add_generation_prompt %}{{- "<start_of_turn>model\n" }}{%- endif %}
"""
"""Of Gemma 1 and 2, with Mistral's words of 2023: no system message, and roles that alternate."""


def chat(*turns: str) -> list[dict[str, str]]:
    """``chat("user: a", "assistant: b")``."""
    return [dict(zip(("role", "content"), turn.split(": ", 1), strict=True)) for turn in turns]
