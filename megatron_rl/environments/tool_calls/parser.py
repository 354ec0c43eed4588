"""What a parser of tool calls is: one file of ``parsers/``, which reads and writes calls as one kind of model does."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from megatron_rl.environments.tool_calls.grammar import Literal, closed, json_rule, written
from megatron_rl.environments.tool_calls.schemas import Schemas, value_of
from megatron_rl.json_text import check_bounds, dumps, first_value, loads

Written = tuple[str, Mapping[str, Any]] | tuple[str, Mapping[str, Any], str]
"""Name and arguments of a call, and its id where the model writes one."""


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
    ids: tuple[str, ...] = ()
    """Of formats that write them."""


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

    def new_id(self, prefix: str, number: int) -> str:
        """Return the id of a call that was written without one; ``number`` counts the calls of an answer."""
        return f"{prefix}_{number}"

    def turn(self, mark: str, result: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
        """Return the model's turn before the ``result`` of a call, for the chat template: ``mark`` is what it said.

        The second part is text of that turn which the template writes after ``mark``.
        """
        return {"role": "assistant", "content": mark}, ""

    between: ClassVar[str] = "\n"
    """Stands between two calls."""
    around: ClassVar[tuple[str, str]] = ("", "")
    """What stands before the first call of an answer, and after the last."""
    close: ClassVar[str] = ""
    """Ends a call, and an answer that may have only one; empty where calls have no end mark."""

    def grammar(self, schemas: Schemas, literal: Literal) -> str:
        """Return rules in Lark's notation, of which ``call`` is any call as `write` writes it; empty: unknown."""
        return ""

    def answer(self, literal: Literal, is_one: bool = False) -> str:
        """Return what an answer of one call or several is, in terms of the rules of `grammar`."""
        between, before, after = (written(text, self.markers, literal) for text in (self.between, *self.around))
        return " ".join(filter(None, (before, "call" if is_one else f"call ({between} call)*", after)))


class SearchingParser(Parser):
    """Reads one call after the other, each where ``begin`` is found."""

    begin: ClassVar[re.Pattern[str]]
    json_form: ClassVar[tuple[str, str]] | None = None
    """What `write` puts before and after the JSON of the arguments of a call, with ``{}`` and ``{id}`` in it."""
    id_rule: ClassVar[str] = ""
    """A regular expression of Lark for the ids that calls have."""

    def shown_name(self, name: str) -> str:
        """Return the name as calls have it."""
        return dumps(name)

    def grammar(self, schemas: Schemas, literal: Literal) -> str:
        if self.json_form is None:
            return ""
        before, after = self.json_form
        rules = [f"call: {' | '.join(f'f{n}' for n in range(len(schemas)))}"]

        def shown(text: str) -> str:
            return f" {self.id_rule} ".join(written(part, self.markers, literal) for part in text.split("{id}"))

        for number, (name, schema) in enumerate(schemas.items()):
            rules.append(f"f{number}: {shown(before.replace('{}', self.shown_name(name)))} a{number} {shown(after)}")
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
            for piece, at in self.calls(text, begin, schemas):  # noqa: B007 - the last one counts
                yield piece
        yield text[at:]

    def calls(self, text: str, begin: re.Match[str], schemas: Schemas) -> Iterable[tuple[Piece, int]]:
        """Return all that begins there, each with where the text goes on; one call, unless a form has lists of them."""
        return [self.call(text, begin, schemas)]


class MarkedParser(SearchingParser):
    """Reads calls that are a name and the JSON of the arguments, with marks around either.

    ``begin`` may have a group ``id``; of its other groups one is the name, or none where a call is begun wrongly.
    """

    end: ClassVar[re.Pattern[str]]
    """Of a call. Where an answer ends, it may be missing: it may be the end token."""
    json_form: ClassVar[tuple[str, str]]

    def shown_name(self, name: str) -> str:
        return name

    def written_id(self, number: int) -> str:
        """Return what `write` has for ``{id}`` in the call ``number`` of an answer."""
        return str(number)

    def write(self, calls: Sequence[Written]) -> str:
        """Write the calls, their JSON as ``json.dumps`` does."""
        shown = []
        for number, (name, arguments, *_) in enumerate(calls):
            before, after = (text.replace("{id}", self.written_id(number)) for text in self.json_form)
            shown.append(before.replace("{}", name) + dumps(dict(arguments)) + after)
        return self.between.join(shown).join(self.around)

    def call(self, text: str, begin: re.Match[str], schemas: Schemas) -> tuple[Piece, int]:
        at, groups = begin.end(), begin.groupdict()
        number, name = groups.pop("id", None), "".join(filter(None, groups.values()))
        try:
            if not name:
                raise ValueError("its name and arguments do not follow its first mark")
            value, at = first_value(text, at)
            found, end = call_of(name, value), self.end.match(text, at)
            if end is None and text[at:].strip():
                raise ValueError("the mark of its end does not follow its JSON")
            return (*found, number) if number else found, end.end() if end else len(text)
        except ValueError as error:
            following = self.begin.search(text, max(at, getattr(error, "pos", 0)))
            end_of_piece = following.start() if following else len(text)
            return Unreadable(text[begin.start() : end_of_piece], str(error)), end_of_piece


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


def call_of(name: object, arguments: object) -> tuple[str, Mapping[str, Any]]:
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
