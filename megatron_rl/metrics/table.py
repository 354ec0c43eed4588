"""Plain tables for the terminal.

For example::

    environment | pass@1 | greedy
    ------------+--------+-------
    arithmetic  |  0.512 |  0.550
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence


def format_table(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Aligned columns under a ruled header; columns of numbers to the right. No trailing newline."""
    texts = [[_cell(value) for value in row] for row in rows]
    columns = list(zip(headers, *texts, strict=True))
    widths = [max(_width(text) for text in column) for column in columns]
    right = [bool(rows) and all(_is_number(row[index]) for row in rows) for index in range(len(headers))]

    def line(cells: Sequence[str]) -> str:
        padded = [_pad(*each) for each in zip(cells, widths, right, strict=True)]
        return " | ".join(padded).rstrip()

    ruler = "-+-".join("-" * width for width in widths)
    return "\n".join([line(headers), ruler, *(line(row) for row in texts)])


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}"
    return " ".join(str(value).split())


def _is_number(value: object) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def _width(text: str) -> int:
    """Terminal cells: East Asian wide characters take two, combining marks none."""
    wide = sum(unicodedata.east_asian_width(char) in "WF" for char in text)
    return len(text) + wide - sum(unicodedata.combining(char) != 0 for char in text)


def _pad(text: str, width: int, right: bool) -> str:
    space = " " * (width - _width(text))
    return space + text if right else text + space
