"""Calls of tools in what a model says: read in the form that its chat template shows, checked against their schemas."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from megatron_rl.environments.tool_calls.parser import Parser, Piece, Unreadable
from megatron_rl.environments.tool_calls.schemas import Schemas, Tools, checked_tools, fault_of, schemas_of
from megatron_rl.errors import one_line, shorten
from megatron_rl.json_text import dumps
from megatron_rl.registry import PARSERS, unknown

__all__ = ["Parsed", "ToolCall", "Tools", "checked_tools", "parse", "parser_for", "split_thought"]

DEFAULT = "hermes"
"""Where no chat template says how calls are written."""
MOST_UNREADABLE = 100
"""An answer with so many has no calls at all. Each costs time in proportion to the answer: json counts its lines."""
BEGIN_OF_THOUGHT, END_OF_THOUGHT = "<think>", "</think>"
MARKS = re.compile(f"{BEGIN_OF_THOUGHT}|{END_OF_THOUGHT}")


@dataclass(frozen=True)
class ToolCall:
    """One call; ``problem`` says why it cannot be made: there is no such function, or it takes other arguments."""

    id: str
    name: str
    arguments: Mapping[str, Any]
    problem: str = ""

    def as_message(self) -> dict[str, Any]:
        """Return an element of a message's ``tool_calls`` as in OpenAI's API."""
        return {
            "id": self.id,
            "type": "function",
            "function": {"name": self.name, "arguments": dumps(dict(self.arguments))},
        }


@dataclass(frozen=True)
class Parsed:
    """An answer of the model."""

    content: str
    """All but its calls; what cannot be read as a call is part of it."""
    calls: tuple[ToolCall, ...] = ()
    problems: tuple[str, ...] = ()
    """Of each call that cannot be read; 100 at most."""


def parse(text: str, tools: Sequence[Mapping[str, Any]], parser: str = DEFAULT, prefix: str = "call") -> Parsed:
    """Return the calls of an answer; raises nothing whatever the text.

    A call has the id that the model wrote, else ``call_0``, ``call_1`` ... or what its format asks for.

    ``tools`` are checked. Thoughts are searched for no calls.
    """
    schemas = schemas_of(tools)
    content, calls, problems, ids = [], [], [], set()
    reader = PARSERS.get(parser)
    for piece in _pieces(text, reader, schemas):
        if isinstance(piece, str):
            content.append(piece)
        elif isinstance(piece, Unreadable):
            content.append(piece.text)
            problems.append(f"a call cannot be read: {one_line(piece.problem)}")
            if len(problems) == MOST_UNREADABLE:
                return Parsed(text, (), tuple(problems))
        else:
            name, arguments, *own = piece
            number = own[0] if own and own[0] not in ids else reader.new_id(prefix, len(calls))
            ids.add(number)
            if name in schemas:
                problem = fault_of(arguments, schemas[name])
            else:
                near = f"there is no function {unknown(name[:100], schemas)}"
                problem = near if schemas else f"no function {shorten(name)}"
            calls.append(ToolCall(number, name, arguments, problem))
    shown = "".join(content)
    return Parsed(shown.strip() if calls else shown, tuple(calls), tuple(problems))


def split_thought(text: str) -> tuple[str, str]:
    """Split an answer into the model's thought, with its end mark, and what it says then; either may be empty."""
    if not text.lstrip().startswith(BEGIN_OF_THOUGHT):  # it may be that a call's argument has an end mark
        return "", text
    thought, mark, answer = text.partition(END_OF_THOUGHT)
    return thought + mark, answer


def _pieces(text: str, reader: Parser, schemas: Schemas) -> Iterator[Piece]:
    """Yield the pieces of an answer, each thought as one; marks inside a call's arguments are part of the call.

    An end mark without a begin mark, which the chat template may have written, ends a thought, too.
    """
    begin, is_thought = 0, False
    for mark in islice(MARKS.finditer(text), MOST_UNREADABLE):
        ends, before = mark[0] == END_OF_THOUGHT, text[begin : mark.start()]
        if (is_thought and not ends) or (not is_thought and _ends_in_call(reader.read(before, schemas))):
            continue
        if ends:
            yield before + mark[0]
        else:
            yield from reader.read(before, schemas)
        begin, is_thought = mark.end() if ends else mark.start(), not ends
    yield from [text[begin:]] if is_thought else reader.read(text[begin:], schemas)


def _ends_in_call(pieces: Iterator[Piece]) -> bool:
    *_, last = ["", *filter(None, pieces)]
    return isinstance(last, Unreadable)


@functools.cache
def parser_for(template: str) -> str:
    """Return the parser of calls as a chat template shows them; "" where no parser knows its form."""
    return next((name for name in PARSERS.names() if PARSERS.get(name).writes(template)), "")
