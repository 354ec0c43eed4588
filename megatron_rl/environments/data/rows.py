"""Reads a data set, from a file or the Hugging Face hub, and checks every row before a run uses the first.

Files are json, jsonl, csv (each also as .gz) and parquet. Rows are numbered from 1; in a jsonl file that is the line.
"""

from __future__ import annotations

import csv
import gzip
import json
import os
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from itertools import chain, islice
from pathlib import Path
from typing import Any, TextIO, TypeVar

from megatron_rl.environments.data.layouts import Layout, bare_problem, recognised
from megatron_rl.environments.grading.text import last_boxes
from megatron_rl.errors import ConfigError, one_line
from megatron_rl.json_text import check_bounds, dumps, loads
from megatron_rl.types import Message
from megatron_rl.user_files import open_file

T = TypeVar("T")
NumberedRows = Iterator[tuple[int, Any]]
"""Number, from 1, and values, unchecked."""

MAX_PROBLEMS = 5
"""Bad rows that are shown before the rest is only counted."""
BATCH = 1024
"""Rows of a parquet file or of the hub that are Python objects at one time."""
MAX_FILES = 10_000
"""Of a folder: `datasets` looks at each of them, for minutes where a whole disk is named."""


class RowError(ValueError):
    """A problem of a row, to be read after its number: ``has an empty question``."""


@dataclass(frozen=True)
class Source:
    """The source of rows: the file ``path``, or without one the data set ``hub``."""

    hub: str
    split: str
    layouts: tuple[Layout, ...]
    """Those that are read; a data set has the first whose columns are all there."""
    config: str | None = None
    path: str = ""
    option: str = "path"
    """The option that sets ``path``, for messages."""
    all_columns: bool = False
    """Read those that the layout does not name, too."""
    otherwise: str = ""
    """What a user can do about other columns, for messages."""

    @property
    def where(self) -> str:
        """The file or data set, for messages."""
        return self.path or f"{self.hub} ({self.split})"

    @property
    def wanted(self) -> str:
        """The columns needed, for messages."""
        return " or ".join(dict.fromkeys(", ".join(layout.columns) for layout in self.layouts))

    def columns_of(self, there: Collection[str]) -> list[str] | None:
        """Return those to read of the columns that are there; None for all."""
        layout = recognised(self.layouts, there)
        if layout is None or self.all_columns:
            return None
        return list(dict.fromkeys([*layout.columns, *(name for name in layout.beside if name in there)]))


class Row:
    """One row of a data set; what its methods raise says what is missing and what is there."""

    def __init__(self, values: object, layout: Layout, number: int = 0) -> None:
        if not isinstance(values, Mapping):
            raise RowError(f"is a {type(values).__name__}, not a mapping of columns")
        self.values, self.layout, self.number = values, layout, number

    def __contains__(self, column: str) -> bool:
        return column in self.values

    def problem(self) -> tuple[str, tuple[Message, ...] | None]:
        """Return the bare problem, and the chat that asks for it where there is one."""
        path = self.layout.problem
        if isinstance(self.value(path), list):
            chat = self.asking(path)
        else:
            text = self.text(path).strip()
            if bare_problem(text) == text:
                return text, None
            chat = ({"role": "user", "content": text},)
        statement = bare_problem(chat[-1]["content"])
        if not statement.strip():
            raise RowError(f"has an empty problem in its {path}")
        return statement, chat

    def answer(self) -> str:
        """Return the right answer as text."""
        text = self.text(self.layout.answer)
        if not self.layout.boxed:
            return text
        boxes = last_boxes(text)
        if not boxes:
            raise RowError(f"has a {self.layout.answer} without \\boxed{{}} around its answer")
        return ", ".join(boxes)

    def tests(self) -> str:
        """Return the tests of code: text, or the JSON of a list or mapping, with the columns beside it."""
        value = self.value(self.layout.answer)
        if beside := {name: self.values[name] for name in self.layout.beside if name in self.values}:
            value = {self.layout.answer: value, **beside}
        return dumps(value) if isinstance(value, list | dict) else self.text(self.layout.answer)

    def solution(self) -> str:
        """Return what a model should learn to write; "" where layout or row has none."""
        column, _, inside = self.layout.solution.partition(".")
        missing = not column or (inside and inside not in (self.value(column) or {}))
        return "" if missing else self.text(self.layout.solution)

    def value(self, path: str) -> Any:
        """Return the value of a column, or with dots of a field in it: ``reward_model.ground_truth``."""
        value, keys = self.values, path.split(".")
        for depth, key in enumerate(keys):
            if not isinstance(value, Mapping):
                inside = ".".join(keys[:depth])
                raise RowError(f"has {inside} of type {type(value).__name__}; it must be a mapping with {key}")
            if key not in value:
                raise RowError(f"lacks {path}; {'.'.join(keys[:depth]) or 'it'} has {_names(value)}")
            value = value[key]
        return value

    def as_json(self) -> dict[str, Any]:
        """Return all columns. What JSON has no word for is text (a date, bytes), or None (NaN)."""
        values = json.loads(json.dumps(self.values, default=str), parse_constant=lambda _: None)
        try:
            check_bounds(values)
        except ValueError as error:
            raise RowError(f"cannot be sent: {error}") from error
        return values

    def text(self, path: str) -> str:
        """Return a text that is not empty, or the digits of a number: a whole float's as those of an integer."""
        value = self.value(path)
        if type(value) in (int, Decimal) or (type(value) is float and abs(value) < 2**53):  # a larger one has lost some
            number = Decimal(str(value))
            return f"{whole if (whole := number.to_integral_value()) == number else number:f}"
        return _checked_text(value, path)

    def asking(self, path: str) -> tuple[Message, ...]:
        """Return chat messages that a model is to answer."""
        messages = self.messages(path)
        if messages[-1]["role"] == "assistant":
            why = "no answer continues the assistant's own words; end it before them"
            raise RowError(f"has a {path} that ends with the assistant: {why}")
        return messages

    def messages(self, path: str) -> tuple[Message, ...]:
        """Return chat messages, at least one."""
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


def read_rows(source: Source, parse: Callable[[Row], T], bad: Callable[[str], None] | None = None) -> Iterator[T]:
    """Yield ``parse`` of every row; those for which it raises ``RowError`` are left out.

    ``bad`` gets a line for each of them; without it they are one ``ConfigError`` at the end.

    Raises:
        ConfigError: wrong columns, no rows, or a source that cannot be read; one line that names the source.
    """
    rows = _read_file(source) if source.path else _read_hub(source)
    first = next(rows, None)
    if first is None:
        raise ConfigError([f"{source.where} has no rows"])
    layout, problems = source.layouts[0], list[str]()
    if isinstance(columns := first[1], Mapping):  # else it is an error of each such row, not of the data set
        layout = recognised(source.layouts, columns)
    if layout is None:
        has = f"it has {_names(columns)}{source.otherwise}"
        raise ConfigError([f"{source.where} needs the columns {source.wanted}; {has}"])
    for number, values in chain([first], rows):
        try:
            parsed = parse(Row(values, layout, number))
        except RowError as error:
            (bad or problems.append)(f"{source.where}: row {number} {error}")
            continue
        yield parsed
    hidden = len(problems) - MAX_PROBLEMS
    if hidden > 0:
        problems[MAX_PROBLEMS:] = [f"{source.where}: {hidden} more rows have problems"]
    if problems:
        raise ConfigError(problems)


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


def _read_file(source: Source) -> NumberedRows:
    # Not by `datasets`, which changes values: "2024-01-05" to a date, "007" and "NA" of a csv file to 7 and None.
    file = Path(os.path.expanduser(source.path))
    kind = Path(file.name.removesuffix(".gz")).suffix.lower()
    try:
        if os.path.isdir(file):
            raise ValueError("is a folder; name the file in it")
        open_file(file).close()
        if kind == ".parquet":
            yield from _parquet(file, source)
        elif kind in _TEXT:
            opener = gzip.open if file.suffix == ".gz" else open
            with opener(file, "rt", encoding="utf-8-sig", newline="") as opened:
                yield from _TEXT[kind](opened)
        else:
            raise ValueError("has an unknown ending; use .json, .jsonl or .csv (also .gz), or .parquet")
    except UnicodeDecodeError as error:
        raise _bad(source, f"is not UTF-8 text ({error.reason} at byte {error.start}); save it as UTF-8") from error
    except (OSError, EOFError, zlib.error) as error:  # the latter two of damaged archives
        raise _bad(source, f"cannot be read: {getattr(error, 'strerror', None) or error}") from error
    except ValueError as error:
        raise _bad(source, str(error)) from error


def _jsonl(lines: TextIO) -> NumberedRows:
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                row = loads(line)
            except ValueError as error:
                # every complete row ends its line, so one that does not was cut
                cut = "" if line.endswith("\n") else "; the file ends in the middle of it and seems truncated"
                raise ValueError(f"row {number} is not JSON ({error}){cut}") from error
            yield number, row


def _json(file: TextIO) -> NumberedRows:
    text = file.read()
    try:
        rows = loads(text)
    except ValueError as error:
        advice = "; name it .jsonl if every line is a row" if str(error).startswith("Extra data") else ""
        raise ValueError(f"is not JSON ({error}){advice}") from error
    if not isinstance(rows, list):
        raise ValueError(f"must hold a list of rows, not a {type(rows).__name__}")
    return enumerate(rows, start=1)


def _csv(file: TextIO) -> NumberedRows:
    reader = csv.reader(file, strict=True)
    try:
        header = next(reader, [])
        for number, fields in enumerate(filter(None, reader), start=1):
            if len(fields) != len(header):
                raise ValueError(f"row {number} has {len(fields)} fields, its header {len(header)}")
            yield number, dict(zip(header, fields, strict=True))
    except csv.Error as error:
        raise ValueError(f"is not CSV or is truncated: line {reader.line_num}: {error}") from error


_TEXT = {".json": _json, ".jsonl": _jsonl, ".csv": _csv}


def _parquet(file: Path, source: Source) -> NumberedRows:
    # imported here: text files need not pay for pyarrow, nor parquet for `datasets`, seven times as slow
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(file) as opened:
            columns = source.columns_of(opened.schema_arrow.names)
            yield from _numbered(opened.iter_batches(BATCH, columns=columns))
    except pyarrow.ArrowException as error:
        raise ValueError(f"is not parquet or is truncated: {one_line(str(error))}") from error


def _bad(source: Source, problem: str) -> ConfigError:
    return ConfigError([f"{source.path or source.hub}{':' * problem.startswith('row ')} {problem}"])


def _read_hub(source: Source) -> NumberedRows:
    inside = (name for *_, names in os.walk(source.hub) for name in names)
    if next(islice(inside, MAX_FILES, None), None) is not None:
        raise _bad(source, f"is a folder with more than {MAX_FILES:,} files; name one of them")
    # imported here: `datasets` takes five seconds, which local files need not pay
    import datasets

    datasets.disable_progress_bars()
    try:
        rows = datasets.load_dataset(source.hub, source.config, split=source.split)
    except Exception as error:
        # of a dozen types: no network, no such data set, no access, a broken download
        from_hub = "" if Path(source.hub).exists() else " from the Hugging Face hub"
        why = f"cannot read {source.hub}{from_hub} ({one_line(str(error) or type(error).__name__)})"
        instead = f"pass a local copy as {source.option}: FILE (jsonl, json, csv or parquet with {source.wanted})"
        if isinstance(error, ValueError):  # a name that the data set does not have; the text tells those that it has
            instead = "use another split or config"
        raise ConfigError([f"{why}; {instead}"]) from error
    columns = source.columns_of(rows.column_names)
    if columns is not None:
        rows = rows.select_columns(columns)
    yield from _numbered(rows.with_format("arrow").iter(BATCH))


def _numbered(batches: Iterable[Any]) -> NumberedRows:
    return enumerate((row for batch in batches for row in batch.to_pylist()), start=1)
