"""Llama 3.1, 3.2 and 3.3: a bare JSON object, perhaps after ``<|python_tag|>``, or a tag with the name in it::

{"name": "add", "parameters": {"a": 1}}
<function=add>{"a": 1}</function>
"""

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

TAG = "<|python_tag|>"
CLOSE = re.compile(r"\s*</function>")
BETWEEN = re.compile(r"[\s;]*")
"""Several objects are told apart by a semicolon."""


class Llama(SearchingParser):
    """A JSON object in prose is a call where it begins with ``name``, ``parameters`` or ``type`` and has a name and
    parameters."""

    markers = (TAG,)
    begin = re.compile(
        rf'{re.escape(TAG)}\s*|<function=(?P<tag>[^<>]*)>|(?P<bare>\{{)\s*"(?:name|parameters|type)"\s*:'
    )
    json_form = '{"name": {}, "parameters": ', "}"
    between = "; "
    template = 'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.'
    examples = (
        Example(
            '{"name": "get_current_conditions", "parameters": {"location": "San Francisco, CA", "unit": "Fahrenheit"}}',
            (("get_current_conditions", {"location": "San Francisco, CA", "unit": "Fahrenheit"}),),
        ),
        Example('<function=spotify_trending_songs>{"n": "5"}</function>', (("spotify_trending_songs", {"n": "5"}),)),
        Example(
            '<|python_tag|>{"type": "function", "name": "a", "parameters": {}}; {"name": "b", "parameters": {"c": 1}}',
            (("a", {}), ("b", {"c": 1})),
        ),
    )

    def writes(self, template: str) -> bool:
        return TAG in template or '"parameters": dictionary of argument name' in template

    def write(self, calls: Sequence[Written]) -> str:
        return "; ".join(dumps({"name": name, "parameters": dict(arguments)}) for name, arguments in calls)

    def call(self, text: str, begin: re.Match[str], schemas: Schemas) -> tuple[Piece, int]:
        at = end = begin.start("bare") if begin["bare"] else begin.end()
        try:
            value, end = first_value(text, at)
            if begin["tag"] is not None:
                close = CLOSE.match(text, end)
                # where the answer ends, a stop string may have taken the closing tag
                if close is None and text[end:].strip():
                    raise ValueError("</function> does not follow its JSON")
                found, end = call_of(begin["tag"].strip(), value), close.end() if close else len(text)
                return found, BETWEEN.match(text, end).end()
            given = value.get("parameters", value.get("arguments")) if isinstance(value, dict) else None
            if given is not None:
                return call_of(value.get("name"), given), BETWEEN.match(text, end).end()
            if begin["bare"]:
                return text[at:end], end  # some other JSON
            raise ValueError('it is no JSON object with "name" and "parameters"')
        except ValueError as error:
            # from where it is no JSON: what lies before is part of this call, and would be read again and again
            following = self.begin.search(text, max(begin.end(), end, getattr(error, "pos", 0)))
            end = following.start() if following else len(text)
            return Unreadable(text[begin.start() : end], str(error)), end


PARSER = Llama()
