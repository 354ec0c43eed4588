"""Calls written as tags, an argument at a time, without quotes: what one is depends on its schema."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, ClassVar

from megatron_rl.environments.tool_calls.parser import Piece, Schemas, SearchingParser, Unreadable, Written, call_of
from megatron_rl.environments.tool_calls.schemas import value_of
from megatron_rl.json_text import dumps


class TaggedParser(SearchingParser):
    """Reads what its tags say; a text argument may hold any text but the end of a value. The group of ``begin`` is the
    name."""

    key: ClassVar[re.Pattern[str]]
    """Up to where a value begins; its group is the argument's name."""
    end_of_value: ClassVar[str]
    around_value: ClassVar[str] = ""
    """What a value has before and after it, once each."""
    end: ClassVar[re.Pattern[str]]
    """Of a call."""

    written: ClassVar[tuple[str, str, str]]
    """How a call begins, with ``{}`` for the name, an argument of it, name and value, and how it ends: lines."""

    def write(self, calls: Sequence[Written]) -> str:
        """Texts as they are, and everything else as JSON."""
        begin, argument, end = self.written
        lines = []
        for name, arguments in calls:
            shown = ((key, value if isinstance(value, str) else dumps(value)) for key, value in arguments.items())
            lines += [begin.format(name), *(argument.format(*each) for each in shown), end]
        return "\n".join(lines)

    def call(self, text: str, begin: re.Match[str], schemas: Schemas) -> tuple[Piece, int]:
        """What begins there, and where the text goes on."""
        name, at = (begin[1] or "").strip(), begin.end()
        properties = schemas.get(name, {}).get("properties", {})
        arguments: dict[str, Any] = {}
        try:
            while (found := self.key.match(text, at)) is not None:
                key, close = found[1].strip(), text.find(self.end_of_value, found.end())
                if close < 0:  # and none of a later call: reading on would be quadratic
                    return Unreadable(text[begin.start() :], f"the value of {key!r} has no end"), len(text)
                if key in arguments:
                    raise ValueError(f"the key {key!r} occurs twice")
                value = text[found.end() : close].removeprefix(self.around_value).removesuffix(self.around_value)
                arguments[key] = value_of(value, properties.get(key, {}))
                at = close + len(self.end_of_value)
            end = self.end.match(text, at)
            if end is None:
                raise ValueError(f"it neither goes on nor ends after {len(arguments)} of its arguments")
            return call_of(name, arguments), end.end()
        except ValueError as error:
            following = self.begin.search(text, at)
            end_of_piece = following.start() if following else len(text)
            return Unreadable(text[begin.start() : end_of_piece], str(error)), end_of_piece
