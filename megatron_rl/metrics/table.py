"""Plain tables for the terminal.

For example::

    environment | pass@1 | greedy
    ------------+--------+-------
    arithmetic  |  0.512 |  0.550
"""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from typing import TextIO

from rich.box import ROUNDED, Box
from rich.console import Console
from rich.table import Table
from rich.text import Text

PLAIN = Box("    \n  | \n -+-\n  | \n    \n    \n  | \n    \n", ascii=True)
UNBROKEN = 100_000
"""Columns of a text that is not for a terminal: no line of it is wrapped."""


def format_table(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Aligned columns under a ruled header; columns of numbers to the right. No trailing newline."""
    stream = io.StringIO()
    table = _table(headers, rows, PLAIN)
    table.show_edge = table.pad_edge = False
    Console(file=stream, width=UNBROKEN, color_system=None).print(table)
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines())


def print_table(stream: TextIO, headers: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Draw it where the stream is a terminal, else write it as `format_table` does."""
    if is_terminal(stream):
        Console(file=stream).print(_table(headers, rows, ROUNDED))
    else:
        stream.write(format_table(headers, rows) + "\n")


def is_terminal(stream: TextIO) -> bool:
    """Whether lines may be drawn and erased."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def _table(headers: Sequence[str], rows: Sequence[Sequence[object]], box: Box) -> Table:
    table = Table(box=box)
    for index, header in enumerate(headers):
        right = bool(rows) and all(_is_number(row[index]) for row in rows)
        table.add_column(Text(header), justify="right" if right else "left", no_wrap=box is PLAIN)
    for row in rows:  # as `Text`: brackets in a name are no style
        table.add_row(*(Text(_cell(value)) for _, value in zip(headers, row, strict=True)))
    return table


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}"
    return " ".join(str(value).split())


def _is_number(value: object) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))

