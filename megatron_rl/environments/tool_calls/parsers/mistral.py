"""Mistral up to 2024, Ministral: a JSON list of calls after a mark. Ids have nine letters or digits::

[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}, "id": "a1b2c3d4e"}]
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator

from megatron_rl.environments.tool_calls.parser import Example, MarkedParser, Piece, Schemas, Unreadable, call_of
from megatron_rl.json_text import first_value

CALLS, ID, ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
NEXT = re.compile(r"\s*([,\]])\s*")


class Mistral(MarkedParser):
    """Reads the form of later models, too."""

    markers = (CALLS, ID, ARGUMENTS)
    begin = re.compile(
        rf"{re.escape(CALLS)}\s*(?:(?P<list>\[\s*)(?=\{{)|"
        rf"(?P<name>[^\[\]{{}}\s]+)(?:{re.escape(ID)}(?P<id>[^\[\]{{}}\s]+))?(?:{re.escape(ARGUMENTS)})?\s*(?=\{{))?"
    )
    end = re.compile("")
    json_form, id_rule = ('{"name": "{}", "arguments": ', ', "id": "{id}"}'), "/[0-9A-Za-z]{9}/"
    around, between, close = (f"{CALLS}[", "]"), ", ", "]"
    template = f"{CALLS}[' + (tool_call.function | tojson)[:-1] + ', \"id\": \"' + tool_call.id + '\"}}'"
    examples = (
        Example(
            f'{CALLS} [{{"name": "get_weather", "arguments": {{"city": "Paris"}}, "id": "VvvODy9mT"}}]',
            (("get_weather", {"city": "Paris"}),),
            ids=("VvvODy9mT",),
        ),
        Example(
            f'Both.{CALLS}[{{"name": "now", "arguments": {{}}}}, {{"name": "now", "arguments": "{{}}"}}]',
            (("now", {}), ("now", {})),
            content="Both.",
        ),
    )

    def writes(self, template: str) -> bool:
        return CALLS in template and ARGUMENTS not in template

    def new_id(self, prefix: str, number: int) -> str:
        """Return nine digits and letters: the template refuses other ids."""
        return hashlib.sha256(f"{prefix}_{number}".encode()).hexdigest()[:9]

    def written_id(self, number: int) -> str:
        return self.new_id("call", number)

    def calls(self, text: str, begin: re.Match[str], schemas: Schemas) -> Iterable[tuple[Piece, int]]:
        return self._listed(text, begin) if begin["list"] else super().calls(text, begin, schemas)

    def _listed(self, text: str, begin: re.Match[str]) -> Iterator[tuple[Piece, int]]:
        """Yield the calls of a list, each with where it ends."""
        start, at, sign = begin.start(), begin.end(), ","
        while sign == ",":
            try:
                value, at = first_value(text, at)
                if not isinstance(value, dict):
                    raise ValueError("it is no JSON object")
                name, arguments = call_of(value.get("name"), value.get("arguments", {}))
                number, following = value.get("id"), NEXT.match(text, at)
                if following is None and text[at:].strip():
                    raise ValueError("neither another call nor ] follows its JSON")
            except ValueError as error:
                later = self.begin.search(text, max(at, getattr(error, "pos", 0)))
                end = later.start() if later else len(text)
                yield Unreadable(text[start:end], str(error)), end
                return
            start = at = following.end() if following else len(text)
            sign = following[1] if following else ""
            yield (name, arguments, number) if number and isinstance(number, str) else (name, arguments), at


PARSER = Mistral()
