"""Reads a data set and checks every row up front: a run must not find the bad one hours later."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeVar

from megatron_rl.environments.data.files import read_file
from megatron_rl.environments.data.hub import read_hub
from megatron_rl.errors import ConfigError
from megatron_rl.types import Message

T = TypeVar("T")

MAX_PROBLEMS = 5
"""Bad rows that are shown before the rest is only counted."""


class RowError(ValueError):
    """What is wrong with a row, to be read after its number: ``has an empty question``."""


@dataclass(frozen=True)
class Source:
    """Where rows come from: the file ``path``, or without one the data set ``hub``."""

    hub: str
    split: str
    columns: tuple[str, ...]
    config: str | None = None
    path: str = ""
    option: str = "path"
    """The option that sets ``path``, for error messages."""
    other_columns: tuple[str, ...] = ()
    """A second layout that is accepted, when the data set is published in two."""

    @property
    def where(self) -> str:
        """How messages call it."""
        return self.path or f"{self.hub} ({self.split})"

    def rows(self) -> Iterator[tuple[int, Any]]:
        """Pairs of row number and row, unchecked."""
        if self.path:
            return read_file(self.path, self.columns)
        instead = f"pass a local copy as {self.option}: FILE (jsonl, json, csv or parquet with {self.layouts})"
        return read_hub(self.hub, self.config, self.split, self.columns, instead)

    @property
    def layouts(self) -> str:
        """The columns needed, for messages."""
        return " or ".join(", ".join(names) for names in (self.columns, self.other_columns) if names)


class Row:
    """One row of a data set; what its methods raise says what is missing and what is there."""

    def __init__(self, values: object) -> None:
        if not isinstance(values, Mapping):
            raise RowError(f"is a {type(values).__name__}, not a mapping of columns")
        self.values = values

    def __contains__(self, column: str) -> bool:
        return column in self.values

    def value(self, path: str) -> Any:
        """The value of a column, or with dots of a field in it: ``reward_model.ground_truth``."""
        value: Any = self.values
        for depth, key in enumerate(path.split(".")):
            inside = ".".join(path.split(".")[:depth])
            if not isinstance(value, Mapping):
                raise RowError(f"has {inside} of type {type(value).__name__}; it must be a mapping with {key}")
            if key not in value:
                raise RowError(f"lacks {path}; {inside or 'it'} has {_names(value)}")
            value = value[key]
        return value

    def text(self, path: str) -> str:
        """Text that is not empty."""
        return _checked_text(self.value(path), path)

    def messages(self, path: str) -> tuple[Message, ...]:
        """Chat messages, at least one."""
        value = self.value(path)
        if not isinstance(value, list):
            raise RowError(f"has {path} of type {type(value).__name__}; it must be a list of chat messages")
        if not value:
            raise RowError(f"has an empty {path}")
        messages = []
        for index, message in enumerate(value):
            if not isinstance(message, Mapping) or not {"role", "content"} <= set(message):
                raise RowError(f"has a message {index} in {path} without role and content")
            messages.append({key: _checked_text(message[key], f"{path}[{index}].{key}") for key in ("role", "content")})
        return tuple(messages)


def read_rows(source: Source, parse: Callable[[Row], T]) -> Iterator[T]:
    """``parse`` of every row. At the end one ``ConfigError`` names the rows for which it raised ``RowError``.

    Wrong columns, no rows, and a source that cannot be read are errors of their own, raised at once.
    """
    rows = source.rows()
    first = next(rows, None)
    if first is None:
        raise ConfigError([f"{source.where} has no rows"])
    _check_columns(source, first[1])
    problems: list[str] = []
    for number, values in chain([first], rows):
        try:
            parsed = parse(Row(values))
        except RowError as error:
            problems.append(f"{source.where}: row {number} {error}")
            continue
        yield parsed
    hidden = len(problems) - MAX_PROBLEMS
    if hidden > 0:
        problems[MAX_PROBLEMS:] = [f"{source.where}: {hidden} more rows have problems"]
    if problems:
        raise ConfigError(problems)


def _check_columns(source: Source, values: object) -> None:
    """A file of another layout is one error, not one a row."""
    layouts = [set(names) for names in (source.columns, source.other_columns) if names]
    if isinstance(values, Mapping) and not any(names <= set(values) for names in layouts):
        raise ConfigError([f"{source.where} needs the columns {source.layouts}; it has {_names(values)}"])


def _checked_text(value: object, what: str) -> str:
    if not isinstance(value, str):
        raise RowError(f"has {what} of type {type(value).__name__} ({value!r:.40}); it must be text")
    if not value.strip():
        raise RowError(f"has an empty {what}")
    try:
        value.encode()
    except UnicodeEncodeError as error:  # half of a surrogate pair: legal in JSON, and no tokenizer takes it
        raise RowError(f"has {what} with a broken character at {error.start}") from error
    return value


def _names(values: Mapping) -> str:
    return ", ".join(map(str, values)) or "nothing"
