"""GLM-4.5 and later: the name and the arguments one by one, texts as they are and everything else as JSON::

<tool_call>add
<arg_key>a</arg_key>
<arg_value>1</arg_value>
</tool_call>
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megatron_rl.json_text import dumps, loads
from megatron_rl.tool_calls.parser import Example, Parser, Piece, Schemas, Unreadable, Written, call_of
from megatron_rl.tool_calls.schemas import fault_of, types_of

OPEN, CLOSE = "<tool_call>", "</tool_call>"
KEY = re.compile(r"\s*<arg_key>([^<]*)</arg_key>\s*<arg_value>")
END_OF_VALUE = "</arg_value>"
TAGS = re.compile(f"{OPEN}|{CLOSE}")
NAME = re.compile(r"[^<]*")
END = re.compile(rf"\s*{CLOSE}")
WEATHER = {"get_weather": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}}


class Glm(Parser):
    """What an argument is depends on its schema: ``5`` is a text where the schema asks for one."""

    markers = (OPEN, CLOSE, "<arg_key>", "</arg_key>", "<arg_value>", END_OF_VALUE)
    template = "<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>\n<arg_value>{arg-value-1}</arg_value>"
    examples = (
        Example(
            "Let me look.\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Beijing</arg_value>\n"
            "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>",
            (("get_weather", {"city": "Beijing", "days": 3}),),
            content="Let me look.",
            tools=WEATHER,
        ),
        Example("<tool_call>now</tool_call>\n<tool_call>now\n</tool_call>", (("now", {}), ("now", {}))),
    )

    def writes(self, template: str) -> bool:
        return "<arg_key>" in template and "<arg_value>" in template

    def read(self, text: str, schemas: Schemas) -> Iterator[Piece]:
        at = 0
        while (start := text.find(OPEN, at)) >= 0:
            yield text[at:start]
            piece, at = _call(text, start, schemas)
            yield piece
        yield text[at:]

    def write(self, calls: Sequence[Written]) -> str:
        return "\n".join(_written(name, arguments) for name, arguments in calls)


def _call(text: str, start: int, schemas: Schemas) -> tuple[Piece, int]:
    """What begins at ``start`` with `OPEN`, and where the text goes on."""
    named = NAME.match(text, start + len(OPEN))
    name, at = named[0].strip(), named.end()
    properties = schemas.get(name, {}).get("properties", {})
    arguments: dict[str, Any] = {}
    try:
        while (key := KEY.match(text, at)) is not None:
            close = text.find(END_OF_VALUE, key.end())
            if close < 0:
                return Unreadable(text[start:], f"the value of {key[1].strip()!r} has no end"), len(text)
            if key[1].strip() in arguments:
                raise ValueError(f"the key {key[1].strip()!r} occurs twice")
            arguments[key[1].strip()] = _value(text[key.end() : close], properties.get(key[1].strip(), {}))
            at = close + len(END_OF_VALUE)
        end = END.match(text, at)
        if end is None:
            raise ValueError(f"neither <arg_key> nor {CLOSE} follows" if arguments else "it has no name and arguments")
        return call_of(name, arguments), end.end()
    except ValueError as error:
        tag = TAGS.search(text, at)
        end = len(text) if tag is None else tag.end() if tag[0] == CLOSE else tag.start()
        return Unreadable(text[start:end], str(error)), end


def _value(text: str, schema: Mapping[str, Any]) -> Any:
    """JSON where the schema allows what it says, else the text."""
    if types_of(schema) == {"string"}:
        return text
    try:
        value = loads(text)
    except ValueError:
        return text
    return text if fault_of(value, schema) and "string" in types_of(schema) else value


def _written(name: str, arguments: Mapping[str, Any]) -> str:
    lines = [f"{OPEN}{name}"]
    for key, value in arguments.items():
        shown = value if isinstance(value, str) else dumps(value)
        lines += [f"<arg_key>{key}</arg_key>", f"<arg_value>{shown}{END_OF_VALUE}"]
    return "\n".join([*lines, CLOSE])


PARSER = Glm()
