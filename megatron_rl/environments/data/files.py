"""Rows of a local file: json, jsonl, csv (each also as .gz) and parquet.

Rows are numbered from 1; in a jsonl file that is the line. Whatever is wrong with a file is one ``ConfigError``
of one line that names the file.
"""

from __future__ import annotations

import csv
import gzip
import json
import zlib
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, TextIO

from megatron_rl.errors import ConfigError
from megatron_rl.json_text import loads

BATCH = 1024
"""Rows of a parquet file that are Python objects at one time."""


def read_file(path: str, wanted: Collection[str] = ()) -> Iterator[tuple[int, Any]]:
    """Pairs of row number and row. Of a parquet file that has all columns ``wanted`` only those are read."""
    file = Path(path).expanduser()
    if not file.is_file():
        why = "is a folder; name the file in it" if file.is_dir() else "does not exist"
        raise _bad(path, why)
    reader = _reader(file)
    try:
        yield from reader(file, wanted)
    except (EOFError, zlib.error) as error:
        raise _bad(path, f"is truncated or damaged: {_first_line(error)}") from error
    except gzip.BadGzipFile as error:
        raise _bad(path, "is not gzip, whatever its name says; drop .gz from the name") from error
    except UnicodeDecodeError as error:
        advice = "it is gzip: add .gz to its name" if _is_gzip(file) else "save it as UTF-8"
        raise _bad(path, f"is not UTF-8 text ({error.reason} at byte {error.start}); {advice}") from error
    except OSError as error:
        raise _bad(path, f"cannot be read: {error.strerror or _first_line(error)}") from error


def _reader(file: Path) -> Callable[[Path, Collection[str]], Iterator[tuple[int, Any]]]:
    kind = Path(file.name.removesuffix(".gz")).suffix.lower()
    readers = {".json": _json, ".jsonl": _jsonl, ".csv": _csv, ".parquet": _parquet}
    if kind not in readers or (kind == ".parquet" and file.suffix == ".gz"):
        raise _bad(str(file), "has an unknown ending; use .json, .jsonl or .csv (also .gz), or .parquet")
    return readers[kind]


def _open(file: Path) -> TextIO:
    if file.suffix == ".gz":
        return gzip.open(file, "rt", encoding="utf-8", newline="")
    return file.open(encoding="utf-8", newline="")


def _jsonl(file: Path, wanted: Collection[str]) -> Iterator[tuple[int, Any]]:
    with _open(file) as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = loads(line)
            except ValueError as error:
                # every complete row ends its line, so one that does not was cut
                cut = "" if line.endswith("\n") else "; the file ends in the middle of it and seems truncated"
                raise _bad(str(file), f"row {number} is not JSON ({_first_line(error)}){cut}") from error
            yield number, row


def _json(file: Path, wanted: Collection[str]) -> Iterator[tuple[int, Any]]:
    with _open(file) as opened:
        text = opened.read()
    try:
        rows = loads(text)
    except ValueError as error:
        advice = ""
        if isinstance(error, json.JSONDecodeError):
            several = error.msg == "Extra data"
            advice = "; name it .jsonl if every line is a row" if several else "; it may be truncated"
        raise _bad(str(file), f"is not JSON ({_first_line(error)}){advice}") from error
    if not isinstance(rows, list):
        raise _bad(str(file), f"must hold a list of rows, not a {type(rows).__name__}")
    yield from enumerate(rows, start=1)


def _csv(file: Path, wanted: Collection[str]) -> Iterator[tuple[int, Any]]:
    with _open(file) as opened:
        reader = csv.reader(opened, strict=True)
        try:
            header = next(reader, [])
            for number, fields in enumerate((fields for fields in reader if fields), start=1):
                if len(fields) != len(header):
                    raise _bad(str(file), f"row {number} has {len(fields)} fields, its header {len(header)}")
                yield number, dict(zip(header, fields, strict=True))
        except csv.Error as error:
            raise _bad(str(file), f"is not CSV or is truncated: line {reader.line_num}: {error}") from error


def _parquet(file: Path, wanted: Collection[str]) -> Iterator[tuple[int, Any]]:
    # imported here: pyarrow takes most of a second, which text files need not pay
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(file) as opened:
            names = opened.schema_arrow.names
            columns = list(wanted) if wanted and set(wanted) <= set(names) else None
            for batch in opened.iter_batches(BATCH, columns=columns):
                for row in batch.to_pylist():
                    number += 1
                    yield number, row
    except pyarrow.ArrowException as error:
        raise _bad(str(file), f"is not parquet or is truncated: {_first_line(error)}") from error


def _is_gzip(file: Path) -> bool:
    with file.open("rb") as opened:
        return opened.read(2) == b"\x1f\x8b"


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _bad(path: str, problem: str) -> ConfigError:
    return ConfigError([f"{path} {problem}" if not problem.startswith("row ") else f"{path}: {problem}"])
