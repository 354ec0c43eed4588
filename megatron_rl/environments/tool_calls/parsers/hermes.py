"""Hermes, Qwen2.5 and Qwen3: ``<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>``, any number of them."""

from __future__ import annotations

import re
from collections.abc import Sequence

from megatron_rl.environments.tool_calls.parser import (
    Example,
    Piece,
    Schemas,
    SearchingParser,
    Unreadable,
    Written,
    call_of,
)
from megatron_rl.json_text import dumps, first_value

OPEN, CLOSE = "<tool_call>", "</tool_call>"
TAGS, SPACE = re.compile(f"{OPEN}|{CLOSE}"), re.compile(r"\s*")


class Hermes(SearchingParser):
    """An answer may end without the last ``</tool_call>``: a stop string may have taken it."""

    markers = (OPEN, CLOSE)
    begin = re.compile(OPEN)
    json_form = f'{OPEN}\n{{"name": {{}}, "arguments": ', f"}}\n{CLOSE}"
    close = CLOSE
    template = '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
    examples = (
        Example(
            '<tool_call>\n{"name": "get_current_temperature", "arguments": {"location": "Paris, France", '
            '"unit": "celsius"}}\n</tool_call>',
            (("get_current_temperature", {"location": "Paris, France", "unit": "celsius"}),),
        ),
        Example(
            'Both at once.\n<tool_call>\n{"arguments": {"symbol": "TSLA"}, "name": "fundamentals"}\n</tool_call>\n'
            '<tool_call>{"name": "now", "arguments": "{}"}</tool_call>',
            (("fundamentals", {"symbol": "TSLA"}), ("now", {})),
            content="Both at once.",
        ),
    )

    def writes(self, template: str) -> bool:
        """Return whether the template has Hermes' calls: others write tags, not JSON, into ``<tool_call>``."""
        return OPEN in template and "arguments" in template and not any(
            other in template for other in ("<arg_key>", "<function=")
        )

    def write(self, calls: Sequence[Written]) -> str:
        shown = (dumps({"name": name, "arguments": dict(arguments)}) for name, arguments in calls)
        return "\n".join(f"{OPEN}\n{call}\n{CLOSE}" for call in shown)

    def call(self, text: str, begin: re.Match[str], schemas: Schemas) -> tuple[Piece, int]:
        at = SPACE.match(text, begin.end()).end()
        try:
            value, at = first_value(text, at)
            if not isinstance(value, dict):
                raise ValueError("it is no JSON object")
            found = call_of(value.get("name"), value.get("arguments", {}))
            at = SPACE.match(text, at).end()
            if at < len(text) and not text.startswith(CLOSE, at):
                raise ValueError(f"{CLOSE} does not follow its JSON")
            return found, min(at + len(CLOSE), len(text))
        except ValueError as error:
            tag = TAGS.search(text, at)
            end = len(text) if tag is None else tag.end() if tag[0] == CLOSE else tag.start()
            return Unreadable(text[begin.start() : end], str(error)), end


PARSER = Hermes()
