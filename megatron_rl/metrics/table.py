"""Plain tables for the terminal.

For example::

    environment | pass@1 | greedy
    ------------+--------+-------
    arithmetic  |  0.512 |  0.550
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from typing import TextIO

_ASCII = (" | ", "-", "-+-")
_BOXES = (" \u2502 ", "\u2500", "\u2500\u253c\u2500")
"""What stands between columns, the rule, and where they cross."""


def format_table(headers: Sequence[str], rows: Sequence[Sequence[object]], *, unicode: bool = False) -> str:
    """Aligned columns under a ruled header; columns of numbers to the right. No trailing newline.

    ``unicode`` draws the rules with box characters; pass ``can_draw_boxes(stream)``.
    """
    for row in rows:
        if len(row) != len(headers):
            raise ValueError(f"a row of {len(row)} cells under {len(headers)} headers: {list(row)}")
    between, rule, cross = _BOXES if unicode else _ASCII
    texts = [[_cell(value) for value in row] for row in rows]
    columns = [[header, *(row[index] for row in texts)] for index, header in enumerate(headers)]
    widths = [max(_width(text) for text in column) for column in columns]
    right = [bool(rows) and all(_is_number(row[index]) for row in rows) for index in range(len(headers))]

    def line(cells: Sequence[str]) -> str:
        padded = [_pad(*each) for each in zip(cells, widths, right, strict=True)]
        return between.join(padded).rstrip()

    ruler = cross.join(rule * width for width in widths)
    return "\n".join([line(headers), ruler, *(line(row) for row in texts)])


def can_draw_boxes(stream: TextIO) -> bool:
    """Whether the stream's encoding knows the box characters."""
    try:
        _BOXES[2].encode(stream.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


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
