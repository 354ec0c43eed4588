"""What a parser of tool calls is: one file of ``parsers/``, which reads and writes calls as one kind of model does."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from megatron_rl.json_text import check_bounds, dumps, loads

Schemas = Mapping[str, Mapping[str, Any]]
"""Name of a function -> JSON schema of its arguments."""
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
        """Whether a chat template shows calls in this form; no two parsers may claim one."""

    @abstractmethod
    def read(self, text: str, schemas: Schemas) -> Iterator[Piece]:
        """The pieces of an answer in order. Raises nothing, in time linear in the text, whatever the text."""

    @abstractmethod
    def write(self, calls: Sequence[Written]) -> str:
        """Calls as the model writes them."""


class SearchingParser(Parser):
    """Reads one call after the other, each where ``begin`` is found."""

    begin: ClassVar[re.Pattern[str]]

    @abstractmethod
    def call(self, text: str, begin: re.Match[str], schemas: Schemas) -> tuple[Piece, int]:
        """What begins there, and where the text goes on."""

    def read(self, text: str, schemas: Schemas) -> Iterator[Piece]:
        """The calls, and the text between them."""
        at = 0
        while (begin := self.begin.search(text, at)) is not None:
            yield text[at : begin.start()]
            piece, at = self.call(text, begin, schemas)
            yield piece
        yield text[at:]


def call_of(name: object, arguments: object) -> Written:
    """A call; its arguments may be the JSON text of an object. ``ValueError`` for what cannot be sent on as JSON."""
    if not isinstance(name, str) or not name:
        raise ValueError("it has no name")
    if isinstance(arguments, str):
        arguments = loads(arguments)
    if not isinstance(arguments, Mapping):
        raise ValueError("its arguments are no JSON object")
    check_bounds([name, arguments])
    dumps(arguments)  # 1e999 is read as infinity
    return name, arguments
