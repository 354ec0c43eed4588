"""gpt-oss: a message to a function, on either side of its channel; ``<|call|>`` ends it, and the answer::

<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}<|call|>
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from megatron_rl.environments.tool_calls.parser import Example, MarkedParser

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
CALL, END = "<|call|>", "<|end|>"
THOUGHT = f"{CHANNEL}analysis{MESSAGE}It is cold there.{END}"


def _begin() -> re.Pattern[str]:
    to, channel, rest = r"to=functions\.(?P<{}>[^\s<]+)", re.escape(CHANNEL), rf"[^<]*(?:{re.escape(CONSTRAIN)}[^<]*)?"
    before = rf" ?{to.format('name')}{channel}"
    behind = rf"{channel}\w+ {to.format('behind')}"
    return re.compile(rf"(?:{re.escape(START)}assistant)?(?:{before}|{behind}){rest}{re.escape(MESSAGE)}")


class Harmony(MarkedParser):
    """Messages of other channels stay text, with their marks."""

    markers = (START, CHANNEL, CONSTRAIN, MESSAGE, CALL, END)
    begin, end = _begin(), re.compile(rf"\s*(?:{re.escape(CALL)}|{re.escape(END)})")
    json_form = f"{CHANNEL}commentary to=functions.{{}} {CONSTRAIN}json{MESSAGE}", CALL
    between, close = f"{START}assistant", CALL
    template = f'to=" + "functions." + tool_call.name + "{CHANNEL}commentary " + "json{MESSAGE}'
    examples = (
        Example(
            f'{THOUGHT}{START}assistant{CHANNEL}commentary to=functions.get_weather {CONSTRAIN}json{MESSAGE}{{"city": '
            f'"Oslo"}}{CALL}',
            (("get_weather", {"city": "Oslo"}),),
            content=THOUGHT,
        ),
        Example(
            f' to=functions.get_weather{CHANNEL}commentary json{MESSAGE}{{"city": "Oslo"}}',
            (("get_weather", {"city": "Oslo"}),),
        ),
    )

    def writes(self, template: str) -> bool:
        return CHANNEL in template and "functions." in template

    def turn(self, mark: str, result: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
        """Show a call: the template refuses a result without one, and shows the function's name with the result."""
        call = {"name": result.get("name", "unknown"), "arguments": mark}
        return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]}, '"'


PARSER = Harmony()
