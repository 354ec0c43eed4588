"""What a parser of tool calls is: one file of ``parsers/``, which reads and writes calls as one kind of model does."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from megatron_rl.environments.tool_calls.grammar import Literal, closed, json_rule, written
from megatron_rl.environments.tool_calls.schemas import Schemas, value_of
from megatron_rl.json_text import check_bounds, dumps, loads

Written = tuple[str, Mapping[str, Any]]
"""Name and arguments of a call."""


@dataclass(frozen=True)
class Unreadable:
    """A piece of an answer that begins as a call does, and is none."""

    text: str
    problem: str


Piece = str | Written | Unreadable


@dataclass(frozen=True)
class Example:
    """A published answer and what it means."""

    text: str
    calls: tuple[Written, ...]
    content: str = ""
    tools: Schemas | None = None
    """Of formats whose arguments are read by their schemas."""


class Parser(ABC):
    """Reads and writes the calls of one kind of model; a file defines one as ``PARSER``."""

    markers: ClassVar[tuple[str, ...]] = ()
    """Texts around calls that are special tokens of some tokenizers, which decoding would leave out."""
    template: ClassVar[str]
    """Words of a published chat template of such a model; `writes` knows them."""
    examples: ClassVar[tuple[Example, ...]]
    """Answers for the contract test."""

    @abstractmethod
    def writes(self, template: str) -> bool:
        """Return whether a chat template shows calls in this form; no two parsers may claim one."""

    @abstractmethod
    def read(self, text: str, schemas: Schemas) -> Iterator[Piece]:
        """Yield the pieces of an answer in order. Raises nothing, in time linear in the text, whatever the text."""

    @abstractmethod
    def write(self, calls: Sequence[Written]) -> str:
        """Calls as the model writes them."""

    between: ClassVar[str] = "\n"
    """Stands between two calls."""
    close: ClassVar[str] = ""
    """Ends a call, and an answer that may have only one; empty where calls have no end mark."""

    def grammar(self, schemas: Schemas, literal: Literal) -> str:
        """Return rules in Lark's notation, of which ``call`` is any call as `write` writes it; empty: unknown."""
        return ""


class SearchingParser(Parser):
    """Reads one call after the other, each where ``begin`` is found."""

    begin: ClassVar[re.Pattern[str]]
    json_form: ClassVar[tuple[str, str]] | None = None
    """What `write` puts before and after the JSON of the arguments, with ``{}`` for the name as a JSON text."""

    def grammar(self, schemas: Schemas, literal: Literal) -> str:
        if self.json_form is None:
            return ""
        before, after = self.json_form
        rules = [f"call: {' | '.join(f'f{n}' for n in range(len(schemas)))}"]
        for number, (name, schema) in enumerate(schemas.items()):
            begin = written(before.replace("{}", dumps(name)), self.markers, literal)
            rules.append(f"f{number}: {begin} a{number} {written(after, self.markers, literal)}")
            rules.append(f"a{number}: {json_rule(closed(schema))}")
        return "\n".join(rules)

    @abstractmethod
    def call(self, text: str, begin: re.Match[str], schemas: Schemas) -> tuple[Piece, int]:
        """Return what begins there, and where the text goes on."""

    def read(self, text: str, schemas: Schemas) -> Iterator[Piece]:
        """Yield the calls, and the text between them."""
        at = 0
        while (begin := self.begin.search(text, at)) is not None:
            yield text[at : begin.start()]
            piece, at = self.call(text, begin, schemas)
            yield piece
        yield text[at:]


class TaggedParser(SearchingParser):
    """Reads calls written as tags, an argument at a time, without quotes: what one is depends on its schema.

    A text argument may hold any text but the end of a value. The group of ``begin`` is the name.
    """

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
        """Write texts as they are, and everything else as JSON."""
        begin, argument, end = self.written
        lines = []
        for name, arguments in calls:
            shown = ((key, value if isinstance(value, str) else dumps(value)) for key, value in arguments.items())
            lines += [begin.format(name), *(argument.format(*each) for each in shown), end]
        return "\n".join(lines)

    def grammar(self, schemas: Schemas, literal: Literal) -> str:
        """Return the grammar of calls: a value of text type is any text that does not end it."""
        begin, argument, end = self.written
        before, between, after = argument.split("{}")
        rules = [f"call: {' | '.join(f'f{n}' for n in range(len(schemas)))}"]

        def shown(words: str) -> str:
            return written(words, self.markers, literal)

        for number, (name, schema) in enumerate(schemas.items()):
            parts = [shown(begin.replace("{}", name) + "\n")]
            definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
            for place, (key, value) in enumerate(schema.get("properties", {}).items()):
                rule, close = f"v{number}_{place}", shown(after)
                value = value if isinstance(value, Mapping) else {}  # true is a schema, too
                if value.get("type") != "string" or "enum" in value:
                    rules.append(f"{rule}: {json_rule({**definitions, **value})} {close}")
                elif close.startswith("<"):  # a special token, which is in no text
                    rules.append(f"{rule}: /(.|\\n)*/ {close}")
                else:
                    rules.append(f"{rule}[suffix={dumps(after)}]: /(.|\\n)*/")
                whole = f"{shown(before + key + between)} {rule} {shown(chr(10))}"
                parts.append(whole if key in schema.get("required", ()) else f"({whole})?")
            rules.append(f"f{number}: {' '.join(parts)} {shown(end)}")
        return "\n".join(rules)

    def call(self, text: str, begin: re.Match[str], schemas: Schemas) -> tuple[Piece, int]:
        """Read the arguments one by one, up to the end of the call."""
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


def call_of(name: object, arguments: object) -> Written:
    """Return a call; its arguments may be the JSON text of an object. ``ValueError`` for what is no JSON."""
    if not isinstance(name, str) or not name:
        raise ValueError("it has no name")
    if isinstance(arguments, str):
        arguments = loads(arguments)
    if not isinstance(arguments, Mapping):
        raise ValueError("its arguments are no JSON object")
    check_bounds([name, arguments])
    dumps(arguments)  # 1e999 is read as infinity
    return name, arguments
